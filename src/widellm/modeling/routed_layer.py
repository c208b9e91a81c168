"""A decoder layer that runs few rows (decode) as two native calls around the cache's update; anything else as before.

At small sizes transformers loses most of its time between the ops. The function is the same: see `kernels.fused`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from widellm.errors import BackendError
from widellm.families import LayerModules, Layout
from widellm.kernels import cpu
from widellm.kernels.fused import FusedLayer
from widellm.modeling.routed_mlp import is_plain_linear
from widellm.modeling.swap import dense_class, has_adapters, special_weight
from widellm.routing.router import Router
from widellm.routing.state import SubLayer

_UNDERSTOOD = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "position_embeddings",
    "cache_position",
    "is_causal",
    "output_attentions",
}
"""What transformers may pass a layer that the native calls respect, or have no need of (use_cache, positions)."""


class Binding:
    """A layer's native form, made on first use and again when a weight has moved. A copied model binds its own."""

    def __init__(self) -> None:
        self.fused: FusedLayer | None = None
        self.thresholds: tuple[float | None, float | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return Binding()


class RoutedLayer:
    """Behaviour put before the class of a decoder layer; see `swap`."""

    _native: tuple[LayerModules, Layout, SubLayer, SubLayer, bool, Binding]
    """The layer's modules, the model's layout, the attention and FFN states, whether its channels were regrouped, and
    the binding. Where they were not, budget 1.0 must give the dense model's very bits, so transformers runs it."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or not self._fits(hidden_states, kwargs):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        modules, _, attention, ffn, _, binding = self._native
        fused = binding.fused
        assert fused is not None
        thresholds = (attention.threshold, ffn.threshold)
        if binding.thresholds != thresholds:
            fused.set_thresholds(*thresholds)
            binding.thresholds = thresholds
        cos, sin = kwargs["position_embeddings"]
        q, k, v, keep = fused.qkv(hidden_states, cos, sin)
        cache = kwargs.get("cache")
        if cache is None:
            cache = kwargs.get("past_key_values")
        if cache is not None:
            k, v = cache.update(k, v, modules.attention.layer_idx)
        mask, tokens = kwargs.get("attention_mask"), hidden_states.shape[1]
        if mask is None and tokens > 1 and k.shape[2] > tokens:
            k, v = k[:, :, :tokens], v[:, :, :tokens]  # an empty static cache: only the first are filled
        out, ffn_keep = fused.rest(hidden_states, q, keep, k, v, mask=mask)
        attention.keep = None if attention.threshold is None else keep
        ffn.keep = None if ffn.threshold is None else ffn_keep
        return out

    def _fits(self, hidden: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether this call may run natively; binds the layer if it has to."""
        modules, layout, attention, ffn, regrouped, binding = self._native
        needs_graph = torch.is_grad_enabled() and (
            hidden.requires_grad or any(p.requires_grad for p in modules.layer.parameters())
        )
        if has_adapters(modules.attention, modules.mlp):
            return False
        if hidden.device.type != "cpu" or needs_graph or torch.compiler.is_compiling():
            return False
        if hidden.shape[0] * hidden.shape[1] > cpu.few_rows() or kwargs.get("position_embeddings") is None:
            return False
        if not {attention.backend, ffn.backend} <= {"auto", "cpu"} or kwargs.get("output_attentions"):
            return False
        if attention.threshold is None and not regrouped and "cpu" not in (attention.backend, ffn.backend):
            return False
        if any(value is not None for name, value in kwargs.items() if name not in _UNDERSTOOD):
            return False
        if binding.fused is None or binding.fused.stale():
            if hidden.dtype not in cpu.NATIVE_TYPES or obstacle(modules) is not None:
                return False
            binding.fused = bind(modules, layout)
            binding.thresholds = None
        return True


class NativeHead:
    """Behaviour of the output projection: few rows are multiplied at the speed of memory. `[..., D]` -> `[..., V]`."""

    _width: SubLayer
    """Any sub-layer of the model: it says which backend is wanted."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        bias: Tensor | None = self.bias  # type: ignore[attr-defined]
        rows = x.numel() // x.shape[-1]
        native = x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype in cpu.NATIVE_TYPES
        needs_graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        few = 0 < rows <= cpu.few_rows() and self._width.backend in ("auto", "cpu")
        if not (native and few) or needs_graph or torch.compiler.is_compiling():
            return super().forward(x)  # type: ignore[misc]
        return cpu.linear(x.reshape(rows, -1), weight, bias).view(*x.shape[:-1], -1)


def obstacle(modules: LayerModules) -> str | None:
    """Why a layer cannot be bound: only bare linears are, with nothing hooked onto what would not be called."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        module = getattr(modules, name)
        if module is not None and (special := special_weight(module)):
            return f"{name}'s weight is an {special}: quantised weights are multiplied by their own library"
    for name in ("k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"):
        module = getattr(modules, name)
        if module is not None and not is_plain_linear(module):
            return f"{name} is a {dense_class(module).__name__}, or has hooks: only plain linears are bound"
    for name in ("q_proj", "o_proj"):
        module = getattr(modules, name)
        if dense_class(module) is not torch.nn.Linear:
            return f"{name} is a {dense_class(module).__name__}, or has hooks: only plain linears are bound"
    if any(p.is_meta for p in modules.layer.parameters()):
        return "its weights are offloaded"
    if any(m._forward_hooks or m._forward_pre_hooks for m in modules.layer.modules() if m is not modules.layer):
        return "a module inside has hooks, which a native layer would not call"
    return None


def bind(modules: LayerModules, layout: Layout) -> FusedLayer | None:
    """The native form of a layer, or None where its weights' layout has none."""
    family = layout.family
    norms = {}
    for name, path in (("q_norm", family.q_norm), ("k_norm", family.k_norm)):
        if path is not None:
            norms[name] = getattr(modules.attention, path)
    gate = modules.gate_proj
    try:
        return FusedLayer.bind(
            attn_norm=modules.attention_norm.weight,
            ffn_norm=modules.ffn_norm.weight,
            w_q=modules.q_proj.weight,
            w_k=modules.k_proj.weight,
            w_v=modules.v_proj.weight,
            w_o=modules.o_proj.weight,
            w_gate=None if gate is None else gate.weight,
            w_up=modules.up_proj.weight,
            w_down=modules.down_proj.weight,
            b_q=modules.q_proj.bias,
            b_k=modules.k_proj.bias,
            b_v=modules.v_proj.bias,
            b_o=modules.o_proj.bias,
            b_gate=None if gate is None else gate.bias,
            b_up=modules.up_proj.bias,
            b_down=modules.down_proj.bias,
            q_norm=norms["q_norm"].weight if norms else None,
            k_norm=norms["k_norm"].weight if norms else None,
            qk_eps=norms["q_norm"].variance_epsilon if norms else 1e-6,
            head_dim=layout.head_dim,
            act=layout.activation,
            attn_eps=modules.attention_norm.variance_epsilon,
            ffn_eps=modules.ffn_norm.variance_epsilon,
            scale=modules.attention.scaling,
            attn_router=_router(modules.q_proj.router),
            ffn_router=_router(modules.mlp.router),
        )
    except BackendError:
        return None


def _router(router: Router) -> cpu.Router:
    return cpu.Router(router.down, router.up, router.bias, 0.0)

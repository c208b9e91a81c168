"""A decoder layer that runs few rows (decode) as one native call, together with those after it where it can (`ahead`);
as two around the update of a cache without room for the new tokens; anything else as before.

At small sizes transformers loses most of its time between the ops. The function is the same: see `kernels.fused`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from widellm.errors import BackendError
from widellm.families import LayerModules, Layout
from widellm.kernels import cpu, native
from widellm.kernels.fused import FusedLayer
from widellm.kernels.fused_stack import FusedStack
from widellm.modeling import linears
from widellm.modeling.ahead import Ahead, cache_in, followers, rotates, stack_step
from widellm.modeling.decide import ResidualTap
from widellm.modeling.linears import is_int8_linear, is_plain_linear
from widellm.modeling.roomy_cache import room_behind
from widellm.modeling.swap import dense_class, has_adapters, is_routed, special_weight
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


_NATIVE_NAMES = {"auto", "cpu"}
_most_rows = functools.cache(cpu.few_rows)


class Binding:
    """A layer's native form, made on first use and again when a weight has moved. A copied model binds its own."""

    def __init__(self) -> None:
        self.fused: FusedLayer | None = None
        self.setting: tuple[float | None, float | None, bool] | None = None
        self.sources: list[tuple[Any, int]] = []
        """Fused linears, of which parts are bound, and int8 ones, which are bound by what is inside their weights; and
        where those were."""
        self.parts: list[tuple[dict[str, Any], str, Any]] = []
        """The children of the attention and the FFN, as (their parent's, name, child) when the layer was bound."""
        self.ahead: Ahead | None = None
        """What an earlier layer's call has computed for this layer's next one."""
        self.misses = 0
        """How often that was not wanted."""
        self.stack: FusedStack | None = None
        """This layer and those that last followed it in one call."""

    def ready(self, attention: SubLayer, ffn: SubLayer) -> FusedLayer:
        """The bound layer, set to the sub-layers' thresholds."""
        fused, setting = self.fused, (attention.threshold, ffn.threshold, attention.shared)
        assert fused is not None
        if self.setting != setting:
            fused.set_thresholds(attention.threshold, ffn.threshold)
            fused.set_shared(attention.shared)
            self.setting = setting
        return fused

    def stale(self) -> bool:
        """Whether the layer has to be bound (again)."""
        if self.fused is None or self.fused.stale():
            return True
        return any(linears.address(linear) != was for linear, was in self.sources)

    def unchanged(self) -> bool:
        """Whether everything inside is as it was when the layer was bound, and without hooks. Some microseconds."""
        for home, name, child in self.parts:
            hooked = child._forward_hooks or child._forward_pre_hooks or "forward" in child.__dict__
            if hooked or home.get(name) is not child:
                return False
        return bool(self.parts) and not self.stale()

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return Binding()


class RoutedLayer:
    """Behaviour put before the class of a decoder layer; see `swap`."""

    _native: tuple[LayerModules, Layout, SubLayer, SubLayer, bool, Binding]
    """The layer's modules, the model's layout, the attention and FFN states, whether its channels were regrouped, and
    the binding. Where they were not, budget 1.0 must give the dense model's very bits, so transformers runs it."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        modules, layout, attention, ffn, _, binding = self._native
        ahead = binding.ahead
        if ahead is not None:
            binding.ahead = None
            setting = (attention.threshold, ffn.threshold, attention.shared)
            found = ahead.take(hidden_states, args, kwargs, setting)
            binding.misses = 0 if found is not None else binding.misses + 1
            if found is not None:
                return _told(attention, ffn, *found)
        if args or not self._fits(hidden_states, kwargs):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        fused = binding.ready(attention, ffn)
        cos, sin = kwargs["position_embeddings"] if rotates(modules, layout) else (None, None)
        cache = cache_in(kwargs)
        mask, index, (batch, tokens, _) = kwargs.get("attention_mask"), modules.attention.layer_idx, hidden_states.shape
        room = room_behind(cache, index, batch, tokens)
        if room is None:
            q, k, v, keep = fused.qkv(hidden_states, cos, sin)
            if cache is not None:
                k, v = cache.update(k, v, index)
            if mask is None and tokens > 1 and k.shape[2] > tokens:
                k, v = k[:, :, :tokens], v[:, :, :tokens]  # an empty static cache: only the first are filled
            out, ffn_keep = fused.rest(hidden_states, q, keep, k, v, mask=mask)
        elif others := followers(self, room, hidden_states, kwargs):
            out, keep, ffn_keep = stack_step(self, room, others, hidden_states, kwargs)
        else:
            k, v = room.extend(cache.layers[index], tokens)
            out, keep, ffn_keep = fused.step(hidden_states, cos, sin, k, v, mask=mask)
        return _told(attention, ffn, out, keep, ffn_keep)

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
        if hidden.shape[0] * hidden.shape[1] > _most_rows() or kwargs.get("position_embeddings") is None:
            return False
        names = {attention.backend, ffn.backend}
        if not names <= _NATIVE_NAMES or (attention.threshold is None and not regrouped and "cpu" not in names):
            return False
        for name, value in kwargs.items():
            if value is not None and (name not in _UNDERSTOOD or (name == "output_attentions" and value)):
                return False
        if attention.gate is not None or ffn.gate is not None:
            return False
        if not all(part is None or _is_readable(part) for part in modules.mlp._parts[:3]):  # adapters put in since
            return False
        if not binding.unchanged():
            if hidden.dtype not in cpu.NATIVE_TYPES or obstacle(modules) is not None:
                return False
            for part in (modules.o_proj, modules.down_proj):
                if (weight := linears.int8(part)) is not None:
                    linears.by_inputs(part, weight)
            binding.fused = bind(modules, layout, kwargs["position_embeddings"][0].shape[-1])
            if binding.fused is None:
                return False
            binding.fused.settle()
            moving = [m for m in maps_of(modules) if linears.int8(m) is not None] or [modules.q_proj, modules.up_proj]
            binding.sources = [(m, linears.address(m)) for m in moving]
            binding.setting = None
            inside = (modules.layer, modules.attention, modules.mlp, modules.q_proj)
            homes = [m._modules for m in inside if m is not None]
            binding.parts = [(home, name, child) for home in homes for name, child in home.items() if child is not None]
        return True

    def _follows(self, hidden: Tensor, kwargs: dict[str, Any]) -> bool:
        """`_fits`, sooner: of a call that fits the layer before this one."""
        _, _, attention, ffn, regrouped, binding = self._native
        gated = attention.gate is not None or ffn.gate is not None
        usual = attention.backend == ffn.backend == "auto" and (regrouped or attention.threshold is not None)
        if usual and not gated and not torch.is_grad_enabled() and binding.unchanged():
            return True
        return self._fits(hidden, kwargs)


def _told(attention: SubLayer, ffn: SubLayer, out: Tensor, keep: Tensor, ffn_keep: Tensor) -> Tensor:
    """`out`, once the sub-layers know what they kept."""
    attention.keep = None if attention.threshold is None else keep
    ffn.keep = None if ffn.threshold is None else ffn_keep
    return out


class NativeHead:
    """Behaviour of the output projection: few rows are multiplied at the speed of memory. `[..., D]` -> `[..., V]`."""

    _width: SubLayer
    """Any sub-layer of the model: it says which backend is wanted, and whether groups are dropped."""
    _regrouped: bool
    """As of `RoutedLayer`: where no channels were, and nothing is dropped, the dense model's very bits are due."""
    _settled = 0
    """Where the weight was when it was put into large pages."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        bias: Tensor | None = self.bias  # type: ignore[attr-defined]
        rows = x.numel() // x.shape[-1]
        known = x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype in cpu.NATIVE_TYPES
        if special_weight(self) and linears.int8(self) is None:  # type: ignore[arg-type]
            known = False
        needs_graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        backend, exact = self._width.backend, not self._regrouped and self._width.threshold is None
        few = 0 < rows <= cpu.few_rows() and backend in (("cpu",) if exact else ("auto", "cpu"))
        if not (known and few) or needs_graph or torch.compiler.is_compiling():
            return super().forward(x)  # type: ignore[misc]
        read = linears.readable(self)
        if self._settled != linears.address(self):
            native.large_pages(read.q if isinstance(read, cpu.Int8) else read)
            self._settled = linears.address(self)
        return cpu.linear(x.reshape(rows, -1), read, bias).view(*x.shape[:-1], -1)


_MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def maps_of(modules: LayerModules) -> list[Any]:
    """The linear maps of a layer; a fused one as often as it has parts."""
    return [m for m in (getattr(modules, name) for name in _MAPS) if m is not None]


def _is_readable(module: Any) -> bool:
    return is_plain_linear(module) or is_int8_linear(module)


def obstacle(modules: LayerModules) -> str | None:
    """Why a layer cannot be bound: only bare linears are, plain or int8, with nothing hooked onto what would not be
    called."""
    quantised = [linears.int8(module) is not None for module in maps_of(modules)]
    for name in _MAPS:
        module = getattr(modules, name)
        if module is not None and (special := special_weight(module)) and linears.int8(module) is None:
            return f"{name}'s weight is an {special}: quantised weights are multiplied by their own library"
    if any(quantised) and not all(quantised):
        return "some of its weights are int8, others are not"
    for name in ("k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"):
        module = getattr(modules, name)
        if module is not None and module is not modules.q_proj and not _is_readable(module):
            return f"{name} is a {dense_class(module).__name__}, or has hooks: only plain linears are bound"
    for name in ("q_proj", "o_proj"):
        module = getattr(modules, name)
        if dense_class(module) is not torch.nn.Linear:
            return f"{name} is a {dense_class(module).__name__}, or has hooks: only plain linears are bound"
    if any(p.is_meta for p in modules.layer.parameters()):
        return "its weights are offloaded"
    for module in modules.layer.modules():
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        if hooked and module is not modules.layer:
            return "a module inside has hooks or a forward of its own, which a native layer would not call"
    return None


def bind(modules: LayerModules, layout: Layout, rotary_dim: int | None = None) -> FusedLayer | None:
    """The native form of a layer, or None where its weights' layout has none. rotary_dim: None, all of each head."""
    family = layout.family
    norms = {}
    for name, path in (("q_norm", family.q_norm), ("k_norm", family.k_norm)):
        if path is not None:
            norms[name] = getattr(modules.attention, path)
    q_rows, kv_rows = (heads * layout.head_dim for heads in (layout.num_attention_heads, layout.num_key_value_heads))
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = _rows(
        (modules.q_proj, modules.k_proj, modules.v_proj), (q_rows, kv_rows, kv_rows)
    )
    (w_gate, b_gate), (w_up, b_up) = _rows((modules.gate_proj, modules.up_proj), (layout.intermediate_size,) * 2)
    try:
        return FusedLayer.bind(
            attn_norm=modules.attention_norm.weight,
            ffn_norm=modules.ffn_norm.weight,
            w_q=w_q,
            w_k=w_k,
            w_v=w_v,
            w_o=linears.readable(modules.o_proj),
            w_gate=w_gate,
            w_up=w_up,
            w_down=linears.readable(modules.down_proj),
            b_q=b_q,
            b_k=b_k,
            b_v=b_v,
            b_o=modules.o_proj.bias,
            b_gate=b_gate,
            b_up=b_up,
            b_down=modules.down_proj.bias,
            q_norm=norms["q_norm"].weight if norms else None,
            k_norm=norms["k_norm"].weight if norms else None,
            qk_eps=norms["q_norm"].variance_epsilon if norms else 1e-6,
            head_dim=layout.head_dim,
            rotary_dim=rotary_dim,
            act=layout.activation,
            attn_eps=modules.attention_norm.variance_epsilon,
            ffn_eps=modules.ffn_norm.variance_epsilon,
            scale=modules.attention.scaling,
            attn_router=_router(modules.q_proj.router),
            ffn_router=_router(modules.mlp.router),
            reads_stream=is_routed(modules.attention_norm, ResidualTap),
            one_decision=modules.mlp._width.follows is not None,
        )
    except BackendError:
        return None


def _rows(maps: tuple[Any, ...], sizes: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """(weight, bias) of each: rows of a fused linear where several are the same module, None where one is None."""
    if maps[0] is not maps[-1]:
        return [(None, None) if m is None else (linears.readable(m), m.bias) for m in maps]
    fused, ends = maps[0], list(itertools.accumulate(sizes))
    weight, rows = linears.readable(fused), [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
    return [(weight[cut], None if fused.bias is None else fused.bias[cut]) for cut in rows]


def _router(router: Router) -> cpu.Router:
    return cpu.Router(router.down, router.up, router.bias, 0.0)

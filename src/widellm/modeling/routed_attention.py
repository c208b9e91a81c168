"""Routed attention in three leaves: a q projection that routes, an attention function, an o projection.

The attention module's own forward is untouched: it calls the three, with rotary embedding, norms and cache between.
An FFN whose linears belong to the layer itself is routed by the same two projections.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from widellm.kernels import int8, masked, registry
from widellm.modeling import linears
from widellm.modeling.decide import decide, decide_softly, weigh
from widellm.modeling.linears import is_bare_linear, matrix
from widellm.modeling.swap import has_adapters
from widellm.routing.router import Router
from widellm.routing.state import SubLayer

ATTENTION_NAME = "widellm_sdpa"
"""The registered attention function: transformers' sdpa for everything that is not worth skipping."""


class RoutedIn:
    """Behaviour of a projection into the groups: decides which groups this token computes. `[..., D]` -> `[..., N]`.

    It is q (or a fused q, k, v: then only q's rows are skipped), or the first linear of an FFN that is no module.
    """

    router: Router
    _width: SubLayer

    def forward(self, x: Tensor) -> Tensor:
        sub = self._width
        if sub.threshold is None:
            sub.keep = sub.weights = sub.residual = None
            return super().forward(x)  # type: ignore[misc]
        if sub.gate is not None:
            decide_softly(sub, self.router, x)  # the attention's output is weighed, before whatever wraps o
            return super().forward(x)  # type: ignore[misc]
        rows = x.reshape(-1, x.shape[-1])
        keep = decide(sub, self.router, x)
        if not sub.skips_in:
            return super().forward(x)  # type: ignore[misc]
        if sub.blocks is not None:
            # one decision for each head's rows of the fused weight; the last column stands for k and v
            keep = torch.nn.functional.pad(keep, (0, 1), value=True)[:, sub.blocks.to(keep.device)]
        if (quantised := linears.int8(self)) is not None and int8.takes(rows, sub.backend):
            y = int8.routed_in(rows, quantised, keep, self.bias)  # type: ignore[attr-defined]
            return y.view(*x.shape[:-1], -1)
        if not is_bare_linear(self):  # type: ignore[arg-type]
            y = super().forward(x)  # type: ignore[misc]
            return masked.drop(y.reshape(-1, y.shape[-1]), keep).view(y.shape)
        y = registry.routed_in(rows, matrix(self), keep, self.bias, sub.backend)  # type: ignore[attr-defined]
        return y.view(*x.shape[:-1], -1)


class RoutedOut:
    """Behaviour of a projection out of the groups: reads only what the decision kept. `[..., N]` -> `[..., D]`."""

    _width: SubLayer

    def forward(self, h: Tensor) -> Tensor:
        sub = self._width
        rows = h.reshape(-1, h.shape[-1])
        if sub.gate is not None and sub.weights is not None:
            # heads are weighed in our attention function; where another runs, and for an FFN without a module, here
            if not sub.weighed:
                h = weigh(h, sub.weights.view(*h.shape[:-1], -1), sub.groups)
            return super().forward(h)  # type: ignore[misc]
        if sub.threshold is None or sub.keep is None:
            bare = is_bare_linear(self)  # type: ignore[arg-type]
            if not bare or not registry.native_when_dense("routed_out", rows, matrix(self), h.shape[-1], sub):
                return super().forward(h)  # type: ignore[misc]
            keep = torch.ones(rows.shape[0], sub.groups, dtype=torch.bool)
        else:
            keep = sub.keep.reshape(-1, sub.groups)
            if (quantised := linears.int8(self)) is not None and int8.takes(rows, sub.backend):
                quantised = linears.by_inputs(self, quantised)
                y = int8.routed_out(rows, quantised, keep, self.bias)  # type: ignore[attr-defined]
                return y.view(*h.shape[:-1], -1)
        if not is_bare_linear(self):  # type: ignore[arg-type]
            return super().forward(masked.drop(rows, keep).view(h.shape))  # type: ignore[misc]
        y = registry.routed_out(rows, matrix(self), keep, self.bias, sub.backend)  # type: ignore[attr-defined]
        return y.view(*h.shape[:-1], -1)


class OwnFFN:
    """Behaviour of a decoder layer whose FFN is no module: it flattens the batch before its first linear."""

    _width: SubLayer

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._width.lead = tuple(hidden_states.shape[:-1])
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention signature: query [B,H,Tq,d], key and value [B,K,Tk,d] -> ([B,Tq,H,d], None)."""
    sub: SubLayer | None = getattr(module, "_width", None)
    if sub is not None and sub.gate is not None and sub.weights is not None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        out, _ = sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        sub.weighed = True
        return weigh(out.flatten(2), sub.weights, sub.groups).view(out.shape), None
    if sub is not None and sub.keep is not None and sub.threshold is not None and not dropout:
        if registry.attention_skips(sub.backend, query, key, kwargs):
            if attention_mask is None and query.shape[2] > 1:  # an empty static cache: only the first Tq are filled
                key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            return registry.routed_attention(q, k, v, sub.keep, attention_mask, scaling, sub.backend), None
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    out, weights = sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if sub is not None and sub.keep is not None and has_adapters(module):
        # an adapter on o reads all of its input, and one on q has filled dropped heads again
        out = masked.drop(out.flatten(0, 1).flatten(1), sub.keep.flatten(0, 1)).view(out.shape)
    return out, weights


def register_attention() -> None:
    """Make ATTENTION_NAME known to transformers (again and again is fine)."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

"""Routed attention in three leaves: a q projection that routes, an attention function, an o projection.

The attention module's own forward is untouched: it calls the three, with rotary embedding, norms and cache between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from widellm.kernels import masked, registry
from widellm.modeling.swap import has_adapters, is_bare_linear
from widellm.routing.router import Router
from widellm.routing.state import SubLayer

ATTENTION_NAME = "widellm_sdpa"
"""The registered attention function: transformers' sdpa for everything that is not worth skipping."""


class RoutedQuery:
    """Behaviour of a routed q projection: decides which head groups this token computes. `[B,T,D]` -> `[B,T,H*d]`."""

    router: Router
    _width: SubLayer

    def forward(self, x: Tensor) -> Tensor:
        sub = self._width
        if sub.threshold is None:
            sub.keep = None
            return super().forward(x)  # type: ignore[misc]
        rows = x.reshape(-1, x.shape[-1])
        keep = self.router(rows) > sub.threshold
        sub.keep = keep.view(*x.shape[:-1], sub.groups)
        if not is_bare_linear(self):  # type: ignore[arg-type]
            q = super().forward(x)  # type: ignore[misc]
            return masked.drop(q.reshape(-1, q.shape[-1]), keep).view(q.shape)
        q = registry.routed_in(rows, self.weight, keep, self.bias, sub.backend)  # type: ignore[attr-defined]
        return q.view(*x.shape[:-1], -1)


class RoutedOutput:
    """Behaviour of a routed o projection: reads only the heads that q's decision kept. `[B,T,H*d]` -> `[B,T,D]`."""

    _width: SubLayer

    def forward(self, h: Tensor) -> Tensor:
        sub = self._width
        if sub.threshold is None or sub.keep is None:
            return super().forward(h)  # type: ignore[misc]
        rows, keep = h.reshape(-1, h.shape[-1]), sub.keep.reshape(-1, sub.groups)
        if not is_bare_linear(self):  # type: ignore[arg-type]
            return super().forward(masked.drop(rows, keep).view(h.shape))  # type: ignore[misc]
        y = registry.routed_out(rows, self.weight, keep, self.bias, sub.backend)  # type: ignore[attr-defined]
        return y.view(*h.shape[:-1], -1)


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

"""Consecutive layers (see `fused`) in one native call, where nothing between them has to be seen by Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from widellm.kernels import native
from widellm.kernels.cpu import check, mask_fields
from widellm.kernels.fused import FusedLayer

_OP = "fused stack"


class FusedStack:
    """Layers of the same sizes, each reading what the one before it wrote. Bits: those of `FusedLayer.step` in turn.

    Raises ValueError for layers of different sizes or dtypes.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self.layers = tuple(layers)
        if len({layer.sizes for layer in self.layers}) != 1:
            raise ValueError(f"{_OP}: layers of one size and dtype are needed, got {[x.sizes for x in self.layers]}")
        self._dtype, _, self._kv_heads, self._dim, _, self._attn_groups, self._ffn_groups = self.layers[0].sizes
        self._pointers = ctypes.c_void_p * len(self.layers)
        self._structs = self._pointers(*(layer.address for layer in self.layers))
        self._last: tuple[list[Tensor], Any, Any] | None = None
        """The last call's buffers, alive, and arrays of their addresses. Replaced whole: another thread may be
        inside a call."""

    def step(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        keys: int,
        *,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [N, B, T, D] of all N layers, and the keeps of their heads and FFNs, bool [N, B, T, G].

        x, cos, sin, mask: as `FusedLayer.step`, the same for all layers. k and v: each layer's contiguous buffers
        [B, K, capacity, d]; of their first `keys` positions the call writes the last T. Raises ValueError on shapes
        and dtypes.
        """
        first, n = self.layers[0], len(self.layers)
        x, cos, sin, rope_batch = first.inputs(x, cos, sin)
        batch, tokens, hidden = x.shape
        k_at, v_at = self._addresses([*k, *v], batch, keys, tokens)
        kv_batch, kv_head, kv_token, _ = k[0].stride()
        out = torch.empty(n, batch, tokens, hidden, dtype=x.dtype)
        keep = torch.empty(n, batch, tokens, self._attn_groups, dtype=torch.bool)
        ffn_keep = torch.empty(n, batch, tokens, self._ffn_groups, dtype=torch.bool)
        call = native.Stack(
            n, first.threads(batch * tokens), ctypes.addressof(self._structs), batch, tokens, keys, x.data_ptr(),
            None if cos is None else cos.data_ptr(), None if sin is None else sin.data_ptr(), rope_batch,
            ctypes.addressof(k_at), ctypes.addressof(v_at), kv_batch, kv_token, kv_head,
        )  # fmt: skip
        alive = mask_fields(_OP, call, mask, batch, tokens, keys)
        call.causal = mask is None
        call.out, call.keep, call.ffn_keep = out.data_ptr(), keep.data_ptr(), ffn_keep.data_ptr()
        native.call("widellm_stack_step", call)
        del alive
        return out, keep, ffn_keep

    def _addresses(self, caches: list[Tensor], batch: int, keys: int, tokens: int) -> tuple[Any, Any]:
        """Arrays of where the k and the v are; checked unless they are those of the last call."""
        shape, n = caches[0].shape, len(self.layers)
        if len(shape) != 4 or not tokens <= keys <= shape[2] or len(caches) != 2 * n:
            raise ValueError(f"{_OP}: {tokens} of {keys} positions, {len(caches)} buffers of {list(shape)} do not fit")
        if self._last is not None and shape[0] == batch:
            known, k, v = self._last
            if all(a is b for a, b in zip(caches, known, strict=True)):
                return k, v
        for t in caches:
            check(_OP, "k and v", t, (batch, self._kv_heads, shape[2], self._dim), self._dtype)
            if not t.is_contiguous():
                raise ValueError(f"{_OP}: k and v must be contiguous, got strides {t.stride()}")
        at = [t.data_ptr() for t in caches]
        self._last = caches, self._pointers(*at[:n]), self._pointers(*at[n:])
        return self._last[1:]

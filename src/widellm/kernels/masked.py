"""Compute everything with dense linears, then drop what the mask drops: dispatch's dense choice, and the training path.

Differentiable with respect to x and the weights. Same function as every other backend, only its time differs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from widellm.kernels.reference import activate


def drop(h: Tensor, keep: Tensor) -> Tensor:
    """Zero the groups of `h [M, N]` that `keep [M, G]` drops (whatever they hold, NaN included).

    On the CPU, where looking costs nothing, h itself when nothing is dropped.
    """
    if keep.device.type == "cpu" and not torch.compiler.is_compiling() and bool(keep.all()):
        return h
    m, groups = keep.shape
    return h.view(m, groups, h.shape[1] // groups).masked_fill(~keep.unsqueeze(-1), 0).view(h.shape)


def routed_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    keep: Tensor,
    act: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
) -> Tensor:
    """See `reference.routed_ffn`."""
    up = linear(x, w_up, b_up)
    h = activate(up, act) if w_gate is None else activate(linear(x, w_gate, b_gate), act) * up
    return linear(drop(h, keep), w_down, b_down)


def routed_in(x: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.routed_in`."""
    return drop(linear(x, w, bias), keep)


def routed_out(h: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.routed_out`."""
    return linear(drop(h, keep), w, bias)


def routed_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """See `reference.routed_attention`."""
    batch, tq, heads, _ = q.shape
    tk, kv_heads = k.shape[1], k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if kv_heads != heads:
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    causal = mask is None and tq == tk and tq > 1
    if mask is None and not causal and tq > 1:
        mask = torch.ones(tq, tk, dtype=torch.bool, device=q.device).tril(tk - tq)
    elif mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale).transpose(1, 2)
    kept = keep.repeat_interleave(heads // keep.shape[2], -1).unsqueeze(-1)
    out = out.masked_fill(~kept, 0)
    if mask is not None:  # rows with nothing to look at are 0, not NaN
        seen = mask if mask.dtype == torch.bool else mask > -torch.inf
        out = out.masked_fill(~seen.any(-1).expand(batch, 1, tq).transpose(1, 2).unsqueeze(-1), 0)
    return out.contiguous()

"""Plain torch, any device: one GEMM per group over the rows that keep it. Pays where rows are many (prefill)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from widellm.kernels import masked
from widellm.kernels.reference import activate
from widellm.routing.plan import rows_by_group

# Attention by rows of a head group needs its own kernel; in plain torch computing all rows is faster.
routed_attention = masked.routed_attention


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
    """See `reference.routed_ffn`. Groups are summed in float32; there is no [M, F] intermediate."""
    size = w_up.shape[0] // keep.shape[1]
    out = torch.zeros(x.shape[0], w_down.shape[0], dtype=torch.float32, device=x.device)
    for group, rows in enumerate(rows_by_group(keep)):
        if rows.numel() == 0:
            continue
        cut = slice(group * size, (group + 1) * size)
        kept = x.index_select(0, rows)
        up = linear(kept, w_up[cut], None if b_up is None else b_up[cut])
        if w_gate is None:
            h = activate(up, act)
        else:
            h = activate(linear(kept, w_gate[cut], None if b_gate is None else b_gate[cut]), act).mul_(up)
        out.index_add_(0, rows, linear(h, w_down[:, cut]).float())
    if b_down is not None:
        out += b_down
    return out.to(x.dtype)


def routed_in(x: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.routed_in`."""
    size = w.shape[0] // keep.shape[1]
    out = x.new_zeros(x.shape[0], w.shape[0])
    for group, rows in enumerate(rows_by_group(keep)):
        if rows.numel():
            cut = slice(group * size, (group + 1) * size)
            out[rows, cut] = linear(x.index_select(0, rows), w[cut], None if bias is None else bias[cut])
    return out


def routed_out(h: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.routed_out`. Groups are summed in float32."""
    size = w.shape[1] // keep.shape[1]
    out = torch.zeros(h.shape[0], w.shape[0], dtype=torch.float32, device=h.device)
    for group, rows in enumerate(rows_by_group(keep)):
        if rows.numel():
            cut = slice(group * size, (group + 1) * size)
            out.index_add_(0, rows, linear(h[:, cut].index_select(0, rows), w[:, cut]).float())
    if bias is not None:
        out += bias
    return out.to(h.dtype)

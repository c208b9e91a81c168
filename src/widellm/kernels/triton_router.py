"""The router in one kernel: keep = up (down x) + bias > threshold, float32 sums whatever x is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from widellm.kernels.triton_launch import VARYING, ceil_div, device_of, launch, power_of_two

BM, BK, BG = 16, 128, 64


@triton.jit(do_not_specialize=VARYING)
def router_kernel(
    x, down, up, bias, keep, partial, arrived, threshold, m, k, rank, groups, stride_x, splits, chunk, BM: tl.constexpr,
    BK: tl.constexpr, BG: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """keep[r, g] = 1 where up[g] . (down x[r]) + bias[g] > threshold. Grid: row tiles, splits of the inputs.

    A few rows would keep one program busy with reading `down` alone, so the inputs are split. Whoever arrives last adds
    the parts in a fixed order: the bits do not depend on who that is.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    row, r = tile * BM + tl.arange(0, BM), tl.arange(0, R)
    row_ok, r_ok = row < m, r < rank
    x_at = x + row.to(tl.int64)[:, None] * stride_x
    down_at = down + r[None, :] * k
    inner = tl.zeros([BM, R], tl.float32)
    for start in range(split * chunk, tl.minimum(k, (split + 1) * chunk), BK):
        col = start + tl.arange(0, BK)
        col_ok = col < k
        a = tl.load(x_at + col[None, :], mask=row_ok[:, None] & col_ok[None, :], other=0).to(tl.float32)
        b = tl.load(down_at + col[:, None], mask=col_ok[:, None] & r_ok[None, :], other=0)
        inner = tl.dot(a, b, inner, input_precision="ieee")
    here = tl.arange(0, BM)[:, None] * R + r[None, :]
    if splits > 1:
        own = partial + tile.to(tl.int64) * splits * BM * R
        tl.store(own + split * BM * R + here, inner)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != splits - 1:
            return
        inner = tl.zeros([BM, R], tl.float32)
        for part in range(0, splits):
            inner += tl.load(own + part * BM * R + here, cache_modifier=".cg")
    for first in range(0, groups, BG):
        g = first + tl.arange(0, BG)
        g_ok = g < groups
        w = tl.load(up + g[None, :] * rank + r[:, None], mask=g_ok[None, :] & r_ok[:, None], other=0)
        logits = tl.dot(inner, w, input_precision="ieee")
        logits += tl.load(bias + g, mask=g_ok, other=0)[None, :]
        at = keep + row.to(tl.int64)[:, None] * groups + g[None, :]
        tl.store(at, (logits > threshold).to(tl.uint8), mask=row_ok[:, None] & g_ok[None, :])


def routed_keep(x: Tensor, down: Tensor, up: Tensor, bias: Tensor, threshold: float) -> Tensor:
    """x [M, D] of any float dtype, down [r, D], up [G, r], bias [G] float32 -> keep bool [M, G].

    The sums are those of `Router.forward` in another order: a logit within rounding of the threshold may differ.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    m, k = x.shape
    rank, groups = down.shape[0], up.shape[0]
    tiles = ceil_div(m, BM)
    splits = min(32, ceil_div(k, BK), max(1, device_of(x).programs // max(1, tiles)))
    chunk = ceil_div(ceil_div(k, splits), BK) * BK
    splits = ceil_div(k, chunk)
    width = max(16, power_of_two(rank))
    keep = torch.empty(m, groups, dtype=torch.uint8, device=x.device)
    partial = torch.empty(tiles * splits * BM * width if splits > 1 else 1, dtype=torch.float32, device=x.device)
    arrived = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    launch(
        router_kernel, (tiles, splits), 4, 3, x=x, down=down.contiguous(), up=up.contiguous(), bias=bias, keep=keep,
        partial=partial, arrived=arrived, threshold=float(threshold), m=m, k=k, rank=rank, groups=groups,
        stride_x=x.stride(0), splits=splits, chunk=chunk, BM=BM, BK=BK, BG=BG, R=width,
    )  # fmt: skip
    return keep.view(torch.bool)

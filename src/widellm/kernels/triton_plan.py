"""From a keep mask to what kernels walk, on the device: counting and prefix sums, no sort, no copy to the host.

Every output has a size that depends on shapes alone, so a CUDA graph that holds these kernels can be replayed with
other masks. Two plans, because projections into the groups and out of them want different things:

- `RowPlan`, for projections into the groups and attention with many rows: which rows keep each group.
- `GroupPlan`, for projections out of the groups: which groups a tile of rows keeps (any of its rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from widellm.kernels.triton_launch import VARYING, ceil_div, launch, power_of_two

ROWS, COLUMNS = 128, 32  # a tile of the mask that one program counts
PANEL = 8  # row tiles of every group that are worked on before the next ones: their rows of x stay in the L2 cache


@dataclass(frozen=True)
class RowPlan:
    """The rows that keep each group. All int32, on the mask's device."""

    rows: Tensor
    """[B * G, T]: list b * G + g holds, ascending, the rows of sequence b that keep group g; then undefined."""
    counts: Tensor
    """[B * G]: how many."""
    work: Tensor
    """[tiles at most]: list << 16 | tile, for every tile of `tile` rows that is not empty; then undefined."""
    total: Tensor
    """[1]: how many entries `work` has."""
    tile: int
    """Rows of a tile."""


@dataclass(frozen=True)
class GroupPlan:
    """The groups that any row of a row tile keeps. All int32."""

    groups: Tensor
    """[tiles, G]: ascending, then undefined."""
    counts: Tensor
    """[tiles]"""
    tile: int


@triton.jit(do_not_specialize=VARYING)
def count_kernel(keep, partial, m, groups, stride_batch, stride_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """partial[b, block, g] = how many rows of a block of ROWS keep g. Grid: blocks, groups / COLUMNS, sequences."""
    block, batch = tl.program_id(0), tl.program_id(2)
    row = block * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = batch.to(tl.int64) * stride_batch + row[:, None].to(tl.int64) * stride_row + col[None, :]
    kept = tl.load(keep + at, mask=(row < m)[:, None] & (col < groups)[None, :], other=0).to(tl.int32)
    tl.store(partial + (batch * tl.num_programs(0) + block) * groups + col, tl.sum(kept, 0), mask=col < groups)


@triton.jit(do_not_specialize=VARYING)
def fill_kernel(
    keep, partial, rows, counts, m, groups, stride_batch, stride_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """rows[b * G + g] = the rows that keep g: those of earlier blocks are counted in `partial`, the own ones by a
    prefix sum. Grid: as `count_kernel`."""
    block, batch, blocks = tl.program_id(0), tl.program_id(2), tl.num_programs(0)
    row = block * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = col < groups
    before = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, block, 64):
        earlier = first + tl.arange(0, 64)
        at = (batch * blocks + earlier)[:, None] * groups + col[None, :]
        before += tl.sum(tl.load(partial + at, mask=(earlier < block)[:, None] & real[None, :], other=0), 0)
    at = batch.to(tl.int64) * stride_batch + row[:, None].to(tl.int64) * stride_row + col[None, :]
    kept = tl.load(keep + at, mask=(row < m)[:, None] & real[None, :], other=0).to(tl.int32)
    place = before[None, :] + tl.cumsum(kept, 0) - 1
    start = (batch * groups + col).to(tl.int64) * m
    tl.store(rows + start[None, :] + place, tl.broadcast_to(row[:, None], [ROWS, COLUMNS]), mask=kept != 0)
    if block == blocks - 1:
        tl.store(counts + batch * groups + col, before + tl.sum(kept, 0), mask=real)


@triton.jit(do_not_specialize=VARYING)
def work_kernel(counts, work, total, lists, TILE: tl.constexpr, PANEL: tl.constexpr, LISTS: tl.constexpr):
    """The tiles that are not empty, in panels: tiles 0..PANEL-1 of every list, then the next PANEL of every list.

    With t[l] tiles in list l, the tiles of earlier panels number sum_l min(t[l], p PANEL), and those of earlier lists
    in the same panel sum_{l' < l} clamp(t[l'] - p PANEL, 0, PANEL). Grid: lists, panels.
    """
    own, panel = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, LISTS)
    tiles = (tl.load(counts + index, mask=index < lists, other=0) + TILE - 1) // TILE
    here = tl.minimum(tl.maximum(tiles - panel * PANEL, 0), PANEL)
    place = tl.sum(tl.minimum(tiles, panel * PANEL)) + tl.sum(tl.where(index < own, here, 0))
    mine = tl.sum(tl.where(index == own, here, 0))
    step = tl.arange(0, PANEL)
    tl.store(work + place + step, (own << 16) | (panel * PANEL + step), mask=step < mine)
    if (own == 0) & (panel == 0):
        tl.store(total, tl.sum(tiles))


@triton.jit(do_not_specialize=VARYING)
def groups_kernel(keep, ids, counts, m, groups, stride_row, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """ids[tile] = the groups that a row of the tile keeps. Grid: row tiles. GROUPS: power of two at or above G."""
    tile = tl.program_id(0)
    col = tl.arange(0, GROUPS)
    seen = tl.zeros([GROUPS], tl.int32)
    for first in range(0, TILE, 16):
        row = tile * TILE + first + tl.arange(0, 16)
        at = row[:, None].to(tl.int64) * stride_row + col[None, :]
        kept = tl.load(keep + at, mask=(row < m)[:, None] & (col < groups)[None, :], other=0).to(tl.int32)
        seen = tl.maximum(seen, tl.max(kept, 0))
    tl.store(ids + tile * groups + tl.cumsum(seen, 0) - 1, col, mask=seen != 0)
    tl.store(counts + tile, tl.sum(seen))


def plan_rows(keep: Tensor, tile: int) -> RowPlan:
    """keep bool [T, G], or [B, T, G] for lists per sequence; last dimension contiguous. tile: rows of a work item."""
    keep = keep if keep.ndim == 3 else keep.unsqueeze(0)
    keep = keep if keep.stride(2) == 1 or keep.shape[2] == 1 else keep.contiguous()
    batch, m, groups = keep.shape
    blocks, lists = ceil_div(m, ROWS), batch * groups
    tiles = ceil_div(m, tile)
    assert lists < 1 << 15 and tiles < 1 << 16, "a work item is packed into 32 bits"

    def ints(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.int32, device=keep.device)

    partial = ints(batch * blocks * groups)
    plan = RowPlan(ints(lists, m), ints(lists), ints(lists * tiles), ints(1), tile)
    mask = keep.view(torch.uint8)
    sizes = {"m": m, "groups": groups, "stride_batch": keep.stride(0), "stride_row": keep.stride(1)}
    grid = (blocks, ceil_div(groups, COLUMNS), batch)
    launch(count_kernel, grid, 4, 1, keep=mask, partial=partial, **sizes, ROWS=ROWS, COLUMNS=COLUMNS)
    launch(
        fill_kernel, grid, 4, 1, keep=mask, partial=partial, rows=plan.rows, counts=plan.counts, **sizes,
        ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    launch(
        work_kernel, (lists, ceil_div(tiles, PANEL)), 4, 1, counts=plan.counts, work=plan.work, total=plan.total,
        lists=lists, TILE=tile, PANEL=PANEL, LISTS=power_of_two(lists),
    )  # fmt: skip
    return plan


def plan_groups(keep: Tensor, tile: int) -> GroupPlan:
    """keep bool [M, G], last dimension contiguous; tile: rows of a row tile, a multiple of 16."""
    m, groups = keep.shape
    tiles = ceil_div(m, tile)
    ids = torch.empty(tiles, groups, dtype=torch.int32, device=keep.device)
    counts = torch.empty(tiles, dtype=torch.int32, device=keep.device)
    warps = 4 if groups <= 256 else 8
    launch(
        groups_kernel, (tiles,), warps, 1, keep=keep.view(torch.uint8), ids=ids, counts=counts, m=m, groups=groups,
        stride_row=keep.stride(0), TILE=tile, GROUPS=power_of_two(groups),
    )  # fmt: skip
    return GroupPlan(ids, counts, tile)

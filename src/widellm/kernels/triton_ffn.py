"""The kernels of the projections: into the groups (q, or gate and up with the activation) and out of them (o, down).

    into_many     many rows: a tile of rows that keep one group, gathered through the plan's lists
    into_few      few rows (decode): a group's weights are streamed once for all rows; groups nobody keeps are not read
    out_of_groups any number of rows: a tile of rows walks the groups that any of its rows keeps, in ascending order

All sums are float32. In `out_of_groups` one program owns a tile of the output and adds the groups in a fixed order:
no atomics, so a result does not depend on timing. Its work follows the union of what a tile's rows keep: for few rows,
or rows that keep alike, that is where time is saved; for 64 rows with independent masks the union is everything, and
what is saved is only the loads of dropped rows. (Adding only kept (row, group) pairs would need a read and a write of
a float32 [rows, D] tile per group: at 128 channels a group that costs as much as it saves on tensor cores as fast as
Hopper's.)

Sizes: M rows, K inputs, SIZE channels of a group. Block sizes: BM rows, BN outputs, BK inputs. Tensors may be in any
layout whose strides are passed; loads are vectorised along whichever dimension has stride 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from widellm.kernels.triton_launch import VARYING


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation ACT of float32 x; NaN stays NaN."""
    if ACT == "silu":
        return x / (1.0 + tl.exp2(-1.4426950408889634 * x))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh z) = sigmoid(2 z)
    elif ACT == "relu":
        return tl.where(x < 0, 0.0, x)
    else:
        return x


@triton.jit
def project(
    x, gate, up, gate_bias, up_bias, row, row_ok, col, col_ok, k, stride_x, stride_up_n, stride_up_k, stride_gate_n,
    stride_gate_k, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """float32 [BM, BN]: act(x[row] gate[col]^T + b) * (x[row] up[col]^T + b), or act(x up^T + b) without gate.

    EVEN: BK divides k and all of col are real, so no load of a weight needs a mask.
    """
    inner = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * stride_x + inner[None, :]
    up_at = up + col.to(tl.int64)[None, :] * stride_up_n + inner[:, None] * stride_up_k
    up_sum = tl.zeros([BM, BN], tl.float32)
    gate_sum = tl.zeros([BM, BN], tl.float32)
    if gate is not None:
        gate_at = gate + col.to(tl.int64)[None, :] * stride_gate_n + inner[:, None] * stride_gate_k
    for start in range(0, k, BK):
        if EVEN:
            a = tl.load(x_at, mask=row_ok[:, None], other=0)
            b = tl.load(up_at)
        else:
            real = start + inner < k
            a = tl.load(x_at, mask=row_ok[:, None] & real[None, :], other=0)
            b = tl.load(up_at, mask=real[:, None] & col_ok[None, :], other=0)
        if gate is not None:
            if EVEN:
                c = tl.load(gate_at)
            else:
                c = tl.load(gate_at, mask=real[:, None] & col_ok[None, :], other=0)
            gate_sum = tl.dot(a, c, gate_sum, input_precision="ieee")
            gate_at += BK * stride_gate_k
        up_sum = tl.dot(a, b, up_sum, input_precision="ieee")
        up_at += BK * stride_up_k
        x_at += BK
    if up_bias is not None:
        up_sum += tl.load(up_bias + col, mask=col_ok, other=0).to(tl.float32)[None, :]
    if gate is None:
        return activate(up_sum, ACT)
    if gate_bias is not None:
        gate_sum += tl.load(gate_bias + col, mask=col_ok, other=0).to(tl.float32)[None, :]
    return activate(gate_sum, ACT) * up_sum


@triton.jit(do_not_specialize=VARYING)
def into_many(
    x, gate, up, gate_bias, up_bias, out, rows, counts, work, total, m, k, groups, stride_x, stride_up_n, stride_up_k,
    stride_gate_n, stride_gate_k, stride_out, SIZE: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """out[r, group g] for every row r that keeps g; nothing else of out [B * m, N] is written.

    m: rows of a sequence; the plan has a list for each group of each sequence.
    Persistent: as many programs as fit the device take turns at the plan's list of tiles, so empty ones cost nothing.
    """
    SPLITS: tl.constexpr = (SIZE + BN - 1) // BN  # tiles of one group's channels
    for item in range(tl.program_id(0), tl.load(total) * SPLITS, tl.num_programs(0)):
        entry = tl.load(work + item // SPLITS)
        own = entry >> 16  # sequence * groups + group
        group = own % groups
        place = (entry & 0xFFFF) * BM + tl.arange(0, BM)
        row_ok = place < tl.load(counts + own)
        row = own // groups * m + tl.load(rows + own.to(tl.int64) * m + place, mask=row_ok, other=0)
        inside = (item % SPLITS) * BN + tl.arange(0, BN)
        col, col_ok = group * SIZE + inside, inside < SIZE
        y = project(
            x, gate, up, gate_bias, up_bias, row, row_ok, col, col_ok, k, stride_x, stride_up_n, stride_up_k,
            stride_gate_n, stride_gate_k, ACT, BM, BN, BK, EVEN
        )  # fmt: skip
        at = out + row.to(tl.int64)[:, None] * stride_out + col[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


@triton.jit(do_not_specialize=VARYING)
def into_few(
    x, gate, up, gate_bias, up_bias, out, keep, m, k, stride_keep, stride_x, stride_up_n, stride_up_k, stride_gate_n,
    stride_gate_k, stride_out, SIZE: tl.constexpr, ACT: tl.constexpr, ZERO: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """out[r, group g] for M <= BM rows; ZERO: 0 where r drops g, else not written. Grid: all channel tiles.

    A program whose group no row keeps ends before it reads a weight.
    """
    SPLITS: tl.constexpr = (SIZE + BN - 1) // BN
    group = tl.program_id(0) // SPLITS
    row = tl.arange(0, BM)
    real = row < m
    kept = tl.load(keep + row * stride_keep + group, mask=real, other=0) != 0
    inside = (tl.program_id(0) % SPLITS) * BN + tl.arange(0, BN)
    col, col_ok = group * SIZE + inside, inside < SIZE
    at = out + row[:, None] * stride_out + col[None, :]
    if tl.max(kept.to(tl.int32), 0) == 0:
        if ZERO:
            tl.store(at, tl.zeros([BM, BN], out.dtype.element_ty), mask=real[:, None] & col_ok[None, :])
        return
    y = project(
        x, gate, up, gate_bias, up_bias, row, kept, col, col_ok, k, stride_x, stride_up_n, stride_up_k, stride_gate_n,
        stride_gate_k, ACT, BM, BN, BK, EVEN
    )  # fmt: skip
    if ZERO:
        y = tl.where(kept[:, None], y, 0.0)
        tl.store(at, y.to(out.dtype.element_ty), mask=real[:, None] & col_ok[None, :])
    else:
        tl.store(at, y.to(out.dtype.element_ty), mask=kept[:, None] & col_ok[None, :])


@triton.jit(do_not_specialize=VARYING)
def out_of_groups(
    h, w, bias, out, keep, ids, counts, m, d, groups, stride_h, stride_w_d, stride_w_n, stride_keep, stride_out,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """out[r] = sum over the groups g that r keeps, ascending, of h[r, g] w[:, g]^T, + bias. h [M, N], w [D, N].

    What h holds in dropped groups is not read. Grid: output tiles, ordered so that TILES row tiles share the weights
    that are in the L2 cache. EVEN: BN divides d, BK divides SIZE.
    """
    STEPS: tl.constexpr = (SIZE + BK - 1) // BK  # pieces of one group's channels
    row_tiles, col_tiles = tl.cdiv(m, BM), tl.cdiv(d, BN)
    first = tl.program_id(0) // (TILES * col_tiles) * TILES
    wide = tl.minimum(row_tiles - first, TILES)
    inside = tl.program_id(0) % (TILES * col_tiles)
    tile, col_tile = first + inside % wide, inside // wide
    row = tile * BM + tl.arange(0, BM)
    col = col_tile * BN + tl.arange(0, BN)
    row_ok, col_ok = row < m, col < d
    inner = tl.arange(0, BK)
    h_at = h + row.to(tl.int64)[:, None] * stride_h + inner[None, :]
    keep_at = keep + row.to(tl.int64) * stride_keep
    w_at = w + col.to(tl.int64)[None, :] * stride_w_d + inner[:, None] * stride_w_n
    acc = tl.zeros([BM, BN], tl.float32)
    ids += tile * groups
    steps = tl.load(counts + tile) * STEPS
    following = tl.load(ids, mask=steps > 0, other=0)
    for step in range(0, steps):
        group = following  # loaded one step ahead, so that the loads below do not wait for it
        following = tl.load(ids + (step + 1) // STEPS, mask=step + 1 < steps, other=0)
        kept = (tl.load(keep_at + group, mask=row_ok, other=0) != 0)[:, None]
        start = group.to(tl.int64) * SIZE + step % STEPS * BK
        if EVEN:
            a = tl.load(h_at + start, mask=kept, other=0)
            b = tl.load(w_at + start * stride_w_n)
        else:
            real = step % STEPS * BK + inner < SIZE
            a = tl.load(h_at + start, mask=kept & real[None, :], other=0)
            b = tl.load(w_at + start * stride_w_n, mask=real[:, None] & col_ok[None, :], other=0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + col, mask=col_ok, other=0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * stride_out + col[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])

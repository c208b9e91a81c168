"""Attention of the kept (row, head group) pairs: the kernels, and which of them run. See `reference.routed_attention`.

    attention_many   flash-style, over tiles of the query rows that keep a head's group
    attention_few    split-KV (flash decoding): up to 64 (query, head) pairs of one KV head share a piece of the cache
    combine          adds the splits in a fixed order

Every restriction on what a query may see (causal, sliding window, left padding, lengths of sequences in a batch, packed
sequences) is an interval of keys per query, [low, high). Where no tensor of them is given, it is the causal one. The
cache is [B, Tk, K, d] with any strides, or pages [P, page, K, d] with a table of page numbers [B, pages].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from widellm.kernels.triton_launch import VARYING, ceil_div, device_of, launch, power_of_two
from widellm.kernels.triton_plan import RowPlan, plan_rows
from widellm.kernels.triton_tuning import FEW, Config, check, choose

LOG2E = 1.4426950408889634


@triton.jit
def attend(
    acc, top, norm, q, k, v, table, mask, first, last, low, high, tk, scale, dim_ok, dims, stride_k_batch,
    stride_k_token, stride_v_batch, stride_v_token, stride_mask_key, batch, row_ok, PAGE: tl.constexpr,
    BN: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """One pass of online softmax over keys first..last-1 in pieces of BN. acc [BM, BD], top and norm [BM] so far.

    FULL: every query sees every one of these keys. scale includes log2(e): powers of two are what the hardware has.
    """
    for start in range(first, last, BN):
        key = start + tl.arange(0, BN)
        key_ok = key < tk
        if PAGE:
            page = tl.load(table + key // PAGE, mask=key < last, other=0).to(tl.int64)
            k_at = page * stride_k_batch + (key % PAGE) * stride_k_token
            v_at = page * stride_v_batch + (key % PAGE) * stride_v_token
        else:
            k_at = batch * stride_k_batch + key.to(tl.int64) * stride_k_token
            v_at = batch * stride_v_batch + key.to(tl.int64) * stride_v_token
        if FULL and EVEN:
            b = tl.load(k + k_at[None, :] + dims[:, None])
        else:
            b = tl.load(k + k_at[None, :] + dims[:, None], mask=key_ok[None, :] & dim_ok[:, None], other=0)
        scores = tl.dot(q, b, input_precision="ieee") * scale
        if not FULL:
            sees = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]) & key_ok[None, :]
            if mask is not None:
                at = mask + key.to(tl.int64)[None, :] * stride_mask_key
                allowed = tl.load(at, mask=sees & row_ok[:, None], other=0)
                if mask.dtype.element_ty == tl.uint8:
                    sees = sees & (allowed != 0)
                else:
                    scores += allowed.to(tl.float32) * 1.4426950408889634
            scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weight = tl.exp2(scores - finite[:, None])
        faded = tl.exp2(top - finite)
        norm = norm * faded + tl.sum(weight, 1)
        if FULL and EVEN:
            c = tl.load(v + v_at[:, None] + dims[None, :])
        else:
            c = tl.load(v + v_at[:, None] + dims[None, :], mask=key_ok[:, None] & dim_ok[None, :], other=0)
        acc = tl.dot(weight.to(c.dtype), c, acc * faded[:, None], input_precision="ieee")
        top = higher
    return acc, top, norm


@triton.jit(do_not_specialize=VARYING)
def attention_many(
    q, k, v, out, rows, counts, low, high, mask, table, scale, tq, tk, heads, kv_heads, groups, stride_q_batch,
    stride_q_token, stride_q_head, stride_k_batch, stride_k_token, stride_k_head, stride_v_batch, stride_v_token,
    stride_v_head, stride_mask_batch, stride_mask_query, stride_mask_key, stride_table, DIM: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """out[b, t, head] for the rows t that keep head's group; nothing else of out [B, Tq, H, d] is written.

    Grid: row tiles, heads, sequences. The last rows see the most keys and start first.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = batch * groups + head // (heads // groups)
    count = tl.load(counts + own)
    if tile * BM >= count:
        return
    place = tile * BM + tl.arange(0, BM)
    row_ok = place < count
    row = tl.load(rows + own * tq + place, mask=row_ok, other=0)
    dims = tl.arange(0, BD)
    dim_ok = dims < DIM
    at = batch * stride_q_batch + row.to(tl.int64)[:, None] * stride_q_token + head * stride_q_head + dims[None, :]
    a = tl.load(q + at, mask=row_ok[:, None] & dim_ok[None, :], other=0)
    if low is not None:
        lower = tl.load(low + batch * tq + row, mask=row_ok, other=2147483647)
        upper = tl.load(high + batch * tq + row, mask=row_ok, other=0)
    else:
        lower = tl.where(row_ok, 0, 2147483647)
        upper = tl.where(row_ok, tk, 0)
        if CAUSAL:
            upper = tl.where(row_ok, tl.minimum(row + (tk - tq + 1), tk), 0)
    first = tl.min(lower) // BN * BN
    last = tl.minimum(tl.max(upper), tk)
    # keys that every row sees need no comparisons: whole blocks between the largest lower and the smallest upper bound
    all_first = tl.minimum((tl.max(tl.where(row_ok, lower, 0)) + BN - 1) // BN * BN, last)
    all_last = tl.maximum(tl.min(tl.where(row_ok, upper, 2147483647)) // BN * BN, all_first)
    kv = head // (heads // kv_heads)
    k += kv.to(tl.int64) * stride_k_head
    v += kv.to(tl.int64) * stride_v_head
    if table is not None:
        table += batch * stride_table
    if mask is not None:
        mask += (batch * stride_mask_batch + row.to(tl.int64) * stride_mask_query)[:, None]
        all_last = all_first
    acc = tl.zeros([BM, BD], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    if low is not None:
        acc, top, norm = attend(
            acc, top, norm, a, k, v, table, mask, first, all_first, lower, upper, tk, scale, dim_ok, dims,
            stride_k_batch, stride_k_token, stride_v_batch, stride_v_token, stride_mask_key, batch, row_ok, PAGE, BN,
            False, BD == DIM
        )  # fmt: skip
    if mask is None:
        acc, top, norm = attend(
            acc, top, norm, a, k, v, table, mask, all_first, all_last, lower, upper, tk, scale, dim_ok, dims,
            stride_k_batch, stride_k_token, stride_v_batch, stride_v_token, stride_mask_key, batch, row_ok, PAGE, BN,
            True, BD == DIM
        )  # fmt: skip
    acc, top, norm = attend(
        acc, top, norm, a, k, v, table, mask, all_last, last, lower, upper, tk, scale, dim_ok, dims, stride_k_batch,
        stride_k_token, stride_v_batch, stride_v_token, stride_mask_key, batch, row_ok, PAGE, BN, False, BD == DIM
    )  # fmt: skip
    acc = acc / tl.where(norm == 0, 1.0, norm)[:, None]  # a row with nothing to look at is 0
    at = ((batch * tq + row) * heads + head)[:, None] * DIM + dims[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & dim_ok[None, :])


@triton.jit(do_not_specialize=VARYING)
def attention_few(
    q, k, v, keep, part, part_top, part_norm, low, high, mask, table, scale, tq, tk, heads, kv_heads, groups, splits,
    chunk, stride_q_batch, stride_q_token, stride_q_head, stride_k_batch, stride_k_token, stride_k_head,
    stride_v_batch, stride_v_token, stride_v_head, stride_mask_batch, stride_mask_query, stride_mask_key, stride_table,
    DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Sums over one piece of the cache for all queries and heads of one KV head: part [B, Tq, H, splits, d] float32.

    Grid: splits, KV heads, sequences. A program whose heads are all dropped ends before it reads the cache.
    """
    split, kv, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    shared = heads // kv_heads
    pair = tl.arange(0, BM)
    row, head = pair // shared, kv * shared + pair % shared
    kept = tl.load(keep + (batch * tq + row) * groups + head // (heads // groups), mask=row < tq, other=0) != 0
    if tl.max(kept.to(tl.int32), 0) == 0:
        return
    if low is not None:
        lower = tl.load(low + batch * tq + row, mask=kept, other=2147483647)
        upper = tl.load(high + batch * tq + row, mask=kept, other=0)
    else:
        lower = tl.where(kept, 0, 2147483647)
        upper = tl.where(kept, tk, 0)
        if CAUSAL:
            upper = tl.where(kept, tl.minimum(row + (tk - tq + 1), tk), 0)
    first = tl.maximum(split * chunk, tl.min(lower) // BN * BN)
    last = tl.minimum(tl.minimum((split + 1) * chunk, tl.max(upper)), tk)
    dims = tl.arange(0, BD)
    dim_ok = dims < DIM
    at = batch * stride_q_batch + row.to(tl.int64) * stride_q_token + head.to(tl.int64) * stride_q_head
    a = tl.load(q + at[:, None] + dims[None, :], mask=kept[:, None] & dim_ok[None, :], other=0)
    k += kv.to(tl.int64) * stride_k_head
    v += kv.to(tl.int64) * stride_v_head
    if table is not None:
        table += batch * stride_table
    if mask is not None:
        mask += (batch * stride_mask_batch + row.to(tl.int64) * stride_mask_query)[:, None]
    acc = tl.zeros([BM, BD], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc, top, norm = attend(
        acc, top, norm, a, k, v, table, mask, first, last, lower, upper, tk, scale, dim_ok, dims, stride_k_batch,
        stride_k_token, stride_v_batch, stride_v_token, stride_mask_key, batch, kept, PAGE, BN, False, BD == DIM
    )  # fmt: skip
    place = ((batch * tq + row) * heads + head) * splits + split
    tl.store(part + place[:, None] * DIM + dims[None, :], acc, mask=kept[:, None] & dim_ok[None, :])
    tl.store(part_top + place, top, mask=kept)
    tl.store(part_norm + place, norm, mask=kept)


@triton.jit(do_not_specialize=VARYING)
def combine(
    part, part_top, part_norm, keep, out, splits, heads, groups, DIM: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr
):
    """out[b, t, head] from its splits, in ascending order; 0 where it is dropped. Grid: heads, B * Tq."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BD)
    dim_ok = dims < DIM
    at = out + (row * heads + head) * DIM + dims
    if tl.load(keep + row * groups + head // (heads // groups)) == 0:
        tl.store(at, tl.zeros([BD], out.dtype.element_ty), mask=dim_ok)
        return
    top = tl.full([], float("-inf"), tl.float32)
    norm = tl.zeros([], tl.float32)
    acc = tl.zeros([BD], tl.float32)
    for start in range(0, splits, BS):
        split = start + tl.arange(0, BS)
        real = split < splits
        place = (row * heads + head) * splits + split
        tops = tl.load(part_top + place, mask=real, other=float("-inf"))
        higher = tl.maximum(top, tl.max(tops, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(tops - finite)
        faded = tl.exp2(top - finite)
        norm = norm * faded + tl.sum(weight * tl.load(part_norm + place, mask=real, other=0), 0)
        piece = tl.load(part + place[:, None] * DIM + dims[None, :], mask=real[:, None] & dim_ok[None, :], other=0)
        acc = acc * faded + tl.sum(weight[:, None] * piece, 0)
        top = higher
    acc = acc / tl.where(norm == 0, 1.0, norm)
    tl.store(at, acc.to(out.dtype.element_ty), mask=dim_ok)


def bounds(
    batch: int,
    tq: int,
    tk: int,
    device: torch.device,
    causal: bool = True,
    window: int | None = None,
    start: Tensor | None = None,
    lengths: Tensor | None = None,
    sequences: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(low, high), int32 [B, Tq]: query t of sequence b sees keys low..high-1; (None, None) where no tensor is needed.

    start [B]: first key that may be seen (left padding). lengths [B]: keys of each sequence, the last query sees the
    last of them; default all Tk. window: no further back than window - 1 keys. sequences [N + 1]: packed sequences
    begin at these positions of the one row of the batch (Tq = Tk). Nothing is copied to the host.
    """
    if not window and start is None and lengths is None and sequences is None:
        return None, None
    token = torch.arange(tq, device=device, dtype=torch.int32).expand(batch, tq)
    if lengths is None:
        high = token + (tk - tq + 1)
    else:
        high = token + (lengths.to(torch.int32).view(batch, 1) - tq + 1)
    here = high
    low = torch.zeros_like(high)
    if not causal:
        high = (
            torch.full_like(high, tk) if lengths is None else lengths.to(torch.int32).view(batch, 1).expand(batch, tq)
        )
    if window:
        low = (here - window).clamp(min=0)
    if start is not None:
        low = torch.maximum(low, start.to(torch.int32).view(batch, 1))
    if sequences is not None:
        edges = sequences.to(torch.int32)
        own = torch.searchsorted(edges, token[0].contiguous(), right=True, out_int32=True)
        low = torch.maximum(low, edges[own - 1])
        if not causal:
            high = edges[own].view(1, tq)
    return low.contiguous(), high.clamp(min=0, max=tk).contiguous()


def routed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    causal: bool | None = None,
    window: int | None = None,
    start: Tensor | None = None,
    lengths: Tensor | None = None,
    sequences: Tensor | None = None,
    table: Tensor | None = None,
    plan: RowPlan | None = None,
    config: Config | None = None,
) -> Tensor:
    """Softmax attention of each kept (row, head group), 0 elsewhere: [B, Tq, H, d] like q.

    q [B, Tq, H, d], keep bool [B, Tq, G]. k and v [B, Tk, K, d], last dimension contiguous; or, with `table` int32
    [B, pages], the pages [P, page size, K, d] of a paged cache, and then `lengths` is needed. mask: bool or additive,
    broadcastable to [B, 1, Tq, Tk]. causal None: causal exactly when no mask is given. plan: of
    `triton_ops.shared_plan`, made here if None. config: block sizes instead of the choice. The rest: see `bounds`.

    Raises ValueError on shapes and dtypes that do not fit, BackendError where there is no compiler for the device.
    """
    op = "routed_attention"
    batch, tq, heads, dim = q.shape
    kv_heads = k.shape[2]
    tk = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    for name, t, shape in (("k", k, (batch, tk)), ("v", v, (batch, tk))):
        shape = (*(shape if table is None else k.shape[:2]), kv_heads, dim)
        if t.shape != shape or t.dtype != q.dtype or t.device != q.device:
            raise ValueError(f"{op}: {name} must be {q.dtype} {list(shape)} like q, got {t.dtype} {list(t.shape)}")
    if keep.dtype != torch.bool or keep.shape[:2] != (batch, tq) or keep.ndim != 3 or heads % max(1, keep.shape[2]):
        raise ValueError(
            f"{op}: keep must be bool [{batch}, {tq}, G] with G dividing {heads}, got {keep.dtype} {list(keep.shape)}"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{op}: {kv_heads} KV heads do not fit {heads} query heads")
    if table is not None and (lengths is None or table.shape[0] != batch or table.dtype != torch.int32):
        raise ValueError(f"{op}: a paged cache needs table int32 [{batch}, pages] and lengths [{batch}]")
    out = torch.empty(batch, tq, heads, dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0 or tk == 0:
        return out.zero_()
    q, k, v = (t if t.stride(3) == 1 or dim == 1 else t.contiguous() for t in (q, k, v))
    causal = mask is None if causal is None else causal
    low, high = bounds(batch, tq, tk, q.device, causal, window, start, lengths, sequences)
    mask, mask_strides = _mask(mask, batch, tq, tk)
    groups = keep.shape[2]
    arguments = {
        "q": q, "k": k, "v": v, "low": low, "high": high, "mask": mask, "table": table,
        "scale": (dim**-0.5 if scale is None else scale) * LOG2E, "tq": tq, "tk": tk, "heads": heads,
        "kv_heads": kv_heads, "groups": groups, **mask_strides, "stride_table": 0 if table is None else table.stride(0),
        "DIM": dim, "BD": max(16, power_of_two(dim)), "PAGE": 0 if table is None else k.shape[1], "CAUSAL": causal,
    }  # fmt: skip
    for name, t in (("q", q), ("k", k), ("v", v)):
        arguments |= {f"stride_{name}_{part}": t.stride(i) for i, part in enumerate(("batch", "token", "head"))}
    device, pairs = device_of(q), tq * (heads // kv_heads)
    if pairs > FEW:
        kind = "attention" if mask is None and table is None else "irregular"
        config = check(config or choose(kind, device, tq, dim, dim, q.element_size()), kind, dim)
        plan = plan or plan_rows(keep, config.bm)
        grid = (ceil_div(tq, config.bm), heads, batch)
        launch(
            attention_many, grid, config.warps, config.stages, **arguments, out=out.zero_(), rows=plan.rows,
            counts=plan.counts, BM=config.bm, BN=config.bn,
        )  # fmt: skip
        return out
    config = check(config or choose("decode", device, pairs, dim, dim, q.element_size()), "decode", dim)
    wanted = ceil_div(2 * device.programs, batch * kv_heads)
    chunk = ceil_div(ceil_div(tk, max(1, min(wanted, 64))), config.bn) * config.bn
    splits = ceil_div(tk, chunk)
    mask8 = keep.contiguous().view(torch.uint8)
    part = torch.empty(batch * tq * heads * splits * dim, dtype=torch.float32, device=q.device)
    tops, norms = (torch.empty(batch * tq * heads * splits, dtype=torch.float32, device=q.device) for _ in range(2))
    launch(
        attention_few, (splits, kv_heads, batch), config.warps, config.stages, **arguments, keep=mask8, part=part,
        part_top=tops, part_norm=norms, splits=splits, chunk=chunk, BM=max(16, power_of_two(pairs)), BN=config.bn,
    )  # fmt: skip
    launch(
        combine, (heads, batch * tq), 4, 1, part=part, part_top=tops, part_norm=norms, keep=mask8, out=out,
        splits=splits, heads=heads, groups=groups, DIM=dim, BD=arguments["BD"], BS=16,
    )  # fmt: skip
    return out


def _mask(mask: Tensor | None, batch: int, tq: int, tk: int) -> tuple[Tensor | None, dict[str, int]]:
    """The mask as uint8 or float, with strides that are 0 where it is broadcast."""
    names = ("stride_mask_batch", "stride_mask_query", "stride_mask_key")
    if mask is None:
        return None, dict.fromkeys(names, 0)
    try:
        wide = mask.expand(batch, 1, tq, tk)
    except RuntimeError:
        wide = None
    if wide is None or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"routed_attention: mask must be bool or float, broadcastable to [{batch}, 1, {tq}, {tk}], "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    if mask.dtype == torch.bool:
        wide = wide.view(torch.uint8)
    return wide, dict(zip(names, (wide.stride(0), wide.stride(2), wide.stride(3)), strict=True))

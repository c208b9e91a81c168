"""Native CPU kernels of the four ops, for float32 and bfloat16, with float32 sums.

The C++ is in csrc/; this file checks every size before a pointer is passed on. Signatures are those of `reference.py`
with keyword extras. Up to `few_rows()` rows (decode) a weight is read once for all rows and a group that no row keeps
is never read; beyond (prefill) the rows that keep a group are gathered and multiplied in register tiles. A row's
result does not depend on its batch mates or on the number of threads. Between the maps of an FFN values are rounded to
the model's dtype where transformers' eager code rounds them.

Weights may be `Int8`: every product is exact, and each float32 sum is scaled once.

`w_down` and the weight of `routed_out` are best stored input-major: a [D, F] tensor that is `stored.t()` of a
contiguous [F, D] one, so that a skipped group is one block of memory. Row-major ones work, slower for few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import NamedTuple

import torch
from torch import Tensor

from widellm.errors import BackendError
from widellm.kernels import native
from widellm.kernels.native import Int8, Weight, availability, few_rows, levels

__all__ = [
    "NATIVE_TYPES",
    "Int8",
    "Router",
    "Weight",
    "availability",
    "few_rows",
    "levels",
    "linear",
    "routed_attention",
    "routed_ffn",
    "routed_in",
    "routed_out",
    "router_fields",
    "self_routed_ffn",
]


NATIVE_TYPES = (torch.float32, torch.bfloat16)
"""What the native library computes in."""


class Router(NamedTuple):
    """logits = up(act(down(x))) + bias in float32; a group is kept where its logit exceeds the threshold."""

    down: Tensor
    """float32 [r, D]"""
    up: Tensor
    """float32 [G, r]"""
    bias: Tensor | None
    """float32 [G] or None"""
    threshold: float
    act: str | None = None
    """None or "silu": between the two maps"""


def _fail(op: str, name: str, wanted: str, got: Tensor) -> ValueError:
    return ValueError(f"{op}: {name} must be {wanted}, got {got.dtype} {list(got.shape)} on {got.device}")


def check(op: str, name: str, t: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ValueError unless `t` is a dense CPU tensor of exactly this shape and dtype."""
    if t.dtype != dtype or t.shape != tuple(shape) or t.device.type != "cpu" or t.layout != torch.strided:
        raise _fail(op, name, f"{dtype} {list(shape)} on cpu", t)


def matrix(op: str, name: str, t: Weight, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
    """(pointer, row stride) of a weight [N, K] whose rows are contiguous. Raises ValueError, BackendError on layout."""
    if isinstance(t, Int8):
        t, dtype = t.q, torch.int8
    check(op, name, t, shape, dtype)
    if t.stride(1) != 1 and t.shape[1] > 1:
        raise BackendError(f"{op}: backend 'cpu' needs {name} contiguous along its inputs, got strides {t.stride()}")
    return t.data_ptr(), t.stride(0)


def either_matrix(op: str, name: str, t: Weight, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int, bool]:
    """(pointer, stride, is it input-major) of a weight [D, F] stored as rows of either dimension."""
    if isinstance(t, Int8):
        t, dtype = t.q, torch.int8
    check(op, name, t, shape, dtype)
    if t.stride(0) == 1 or t.shape[0] == 1:
        return t.data_ptr(), t.stride(1), True
    return (*matrix(op, name, t, shape, dtype), False)


def vector(op: str, name: str, t: Tensor | None, size: int, dtype: torch.dtype) -> int | None:
    """Pointer of a contiguous vector, None for None."""
    if t is None:
        return None
    check(op, name, t, (size,), dtype)
    if not t.is_contiguous():
        raise BackendError(f"{op}: backend 'cpu' needs {name} contiguous, got stride {t.stride()}")
    return t.data_ptr()


def scale_of(op: str, name: str, w: Weight | None) -> int | None:
    """Pointer of an int8 weight's scales, None for any other."""
    return vector(op, f"{name}'s scale", w.scale, w.shape[0], torch.float32) if isinstance(w, Int8) else None


def rows_of(t: Tensor) -> Tensor:
    """`t` itself when its last dimension is contiguous, else a contiguous copy."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def router_fields(op: str, router: Router | None, hidden: int, groups: int) -> Structure:
    """The `Router` struct (zeros for None). The caller keeps the tensors alive. Raises ValueError on shapes."""
    if router is None:
        return native.Router()
    rank = router.down.shape[0]
    if router.act not in (None, "silu"):
        raise ValueError(f"{op}: the router's activation must be None or 'silu', got {router.act!r}")
    if rank < 1:
        raise ValueError(f"{op}: the router's rank must be at least 1")
    for name, t, shape in (("router.down", router.down, (rank, hidden)), ("router.up", router.up, (groups, rank))):
        check(op, name, t, shape, torch.float32)
        if not t.is_contiguous():
            raise BackendError(f"{op}: backend 'cpu' needs {name} contiguous")
    bias = vector(op, "router.bias", router.bias, groups, torch.float32)
    act = int(router.act == "silu")
    return native.Router(router.down.data_ptr(), router.up.data_ptr(), bias, rank, act, 0, router.threshold)


def _keep(op: str, keep: Tensor, rows: int, size: int) -> Tensor:
    fits = keep.ndim == 2 and keep.shape[0] == rows and keep.shape[1] > 0 and size % keep.shape[1] == 0
    if keep.dtype != torch.bool or keep.device.type != "cpu" or not fits:
        raise _fail(op, "keep", f"bool [{rows}, G] with G dividing {size}", keep)
    return rows_of(keep)


def _x(op: str, x: Tensor, width: int) -> Tensor:
    if x.ndim != 2 or x.shape[1] != width or x.device.type != "cpu" or x.dtype not in native.DTYPES or width < 1:
        raise _fail(op, "x", f"float32 or bfloat16 [M, {width}] on cpu", x)
    return rows_of(x)


def _new(rows: int, width: int, like: Tensor) -> Tensor:
    return torch.empty(rows, width, dtype=like.dtype)


def _ffn(
    op: str,
    x: Tensor,
    w_gate: Weight | None,
    w_up: Weight,
    w_down: Weight,
    groups: int,
    act: str,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    isa: str | None,
) -> tuple[Structure, Tensor]:
    if w_up.ndim != 2:
        raise ValueError(f"{op}: w_up must be [F, D], got {list(w_up.shape)}")
    inner, hidden = w_up.shape
    if inner < 1:
        raise _fail(op, "w_up", "[F, D] with at least one channel", w_up.q if isinstance(w_up, Int8) else w_up)
    if act not in native.ACTIVATIONS:
        raise ValueError(f"{op}: act must be one of {', '.join(native.ACTIVATIONS)}, got {act!r}")
    run = native.run_fields(x.dtype, isa, x.shape[0] * inner * hidden * 2, w_gate, w_up, w_down)
    f = native.Ffn(run=run, act=native.ACTIVATIONS[act])
    out = _new(x.shape[0], hidden, x)
    f.rows, f.hidden, f.inner, f.groups = x.shape[0], hidden, inner, groups
    f.x, f.ldx = x.data_ptr(), x.stride(0)
    if w_gate is not None:
        f.gate, f.ldgate = matrix(op, "w_gate", w_gate, (inner, hidden), x.dtype)
        f.gate_bias = vector(op, "b_gate", biases[0], inner, x.dtype)
    elif biases[0] is not None:
        raise ValueError(f"{op}: b_gate is given without w_gate")
    f.up, f.ldup = matrix(op, "w_up", w_up, (inner, hidden), x.dtype)
    f.down, f.lddown, f.down_input_major = either_matrix(op, "w_down", w_down, (hidden, inner), x.dtype)
    f.up_bias = vector(op, "b_up", biases[1], inner, x.dtype)
    f.down_bias = vector(op, "b_down", biases[2], hidden, x.dtype)
    f.gate_scale, f.up_scale = scale_of(op, "w_gate", w_gate), scale_of(op, "w_up", w_up)
    f.down_scale = scale_of(op, "w_down", w_down)
    f.out, f.ldout = out.data_ptr(), hidden
    return f, out


def routed_ffn(
    x: Tensor,
    w_gate: Weight | None,
    w_up: Weight,
    w_down: Weight,
    keep: Tensor,
    act: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    isa: str | None = None,
) -> Tensor:
    """FFN over the kept channel groups; see `reference.routed_ffn`. [M, D] -> [M, D] in x's dtype.

    `isa` names an instruction set (`levels()`); None: the best. Raises ValueError on sizes and dtypes that do not fit,
    BackendError where the layout, the dtype or the machine is not one that this backend can work with.
    """
    op = "routed_ffn"
    x, keep = _x(op, x, w_up.shape[-1]), _keep(op, keep, x.shape[0], w_up.shape[0])
    f, out = _ffn(op, x, w_gate, w_up, w_down, keep.shape[1], act, (b_gate, b_up, b_down), isa)
    f.keep, f.ldkeep = keep.data_ptr(), keep.stride(0)
    if x.shape[0]:
        native.call("widellm_routed_ffn", f)
    return out


def self_routed_ffn(
    x: Tensor,
    w_gate: Weight | None,
    w_up: Weight,
    w_down: Weight,
    router: Router,
    act: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Router (it reads x) and FFN in one call: (out [M, D], keep bool [M, G]). Errors: as `routed_ffn`."""
    op = "self_routed_ffn"
    groups = router.up.shape[0]
    x = _x(op, x, w_up.shape[-1])
    if groups < 1 or w_up.shape[0] % groups:
        raise ValueError(f"{op}: the router's {groups} groups do not divide {w_up.shape[0]} channels")
    f, out = _ffn(op, x, w_gate, w_up, w_down, groups, act, (b_gate, b_up, b_down), isa)
    keep = torch.empty(x.shape[0], groups, dtype=torch.bool)
    f.router, f.keep_out = router_fields(op, router, w_up.shape[1], groups), keep.data_ptr()
    if x.shape[0]:
        native.call("widellm_routed_ffn", f)
    return out, keep


def _in(op: str, x: Tensor, w: Weight, keep: Tensor | None, bias: Tensor | None, isa: str | None) -> Tensor:
    if w.ndim != 2:
        raise ValueError(f"{op}: w must be [N, D], got {list(w.shape)}")
    outputs, inputs = w.shape
    rows = x.shape[0]
    out = _new(rows, outputs, x)
    groups, kept, ldkeep = (1, None, 0) if keep is None else (keep.shape[1], keep.data_ptr(), keep.stride(0))
    pointer, ldw = matrix(op, "w", w, (outputs, inputs), x.dtype)
    f = native.In(  # by position: at this size of an op, setting fields by name would be a tenth of its time
        native.run_fields(x.dtype, isa, rows * outputs * inputs, w),
        *(rows, inputs, outputs, groups, x.data_ptr(), x.stride(0), pointer, ldw),
        *(vector(op, "bias", bias, outputs, x.dtype), scale_of(op, "w", w), kept, ldkeep, out.data_ptr(), outputs),
    )
    if rows and outputs:
        native.call("widellm_routed_in", f)
    return out


def linear(x: Tensor, w: Weight, bias: Tensor | None = None, *, isa: str | None = None) -> Tensor:
    """The dense y = x w^T + bias, [M, D] -> [M, N]: for few rows at the speed of memory. Errors: as `routed_ffn`."""
    return _in("linear", _x("linear", x, w.shape[-1]), w, None, bias, isa)


def routed_in(x: Tensor, w: Weight, keep: Tensor, bias: Tensor | None = None, *, isa: str | None = None) -> Tensor:
    """Projection into the groups; see `reference.routed_in`. Skipped outputs are 0. Errors: as `routed_ffn`."""
    x, keep = _x("routed_in", x, w.shape[-1]), _keep("routed_in", keep, x.shape[0], w.shape[0])
    return _in("routed_in", x, w, keep, bias, isa)


def routed_out(h: Tensor, w: Weight, keep: Tensor, bias: Tensor | None = None, *, isa: str | None = None) -> Tensor:
    """Projection out of the groups; see `reference.routed_out`. Skipped inputs are not read. Errors as `routed_ffn`."""
    op = "routed_out"
    if w.ndim != 2:
        raise ValueError(f"{op}: w must be [D, N], got {list(w.shape)}")
    outputs, inputs = w.shape
    x, keep = _x(op, h, inputs), _keep(op, keep, h.shape[0], inputs)
    rows = x.shape[0]
    out = _new(rows, outputs, x)
    f = native.Out(  # by position, as in _in
        native.run_fields(x.dtype, isa, rows * outputs * inputs, w),
        *(rows, inputs, outputs, keep.shape[1], x.data_ptr(), x.stride(0)),
        *either_matrix(op, "w", w, (outputs, inputs), x.dtype),
        *(vector(op, "bias", bias, outputs, x.dtype), scale_of(op, "w", w)),
        *(keep.data_ptr(), keep.stride(0), out.data_ptr(), outputs),
    )
    if rows and outputs:
        native.call("widellm_routed_out", f)
    return out


def mask_fields(op: str, f: Structure, mask: Tensor | None, batch: int, tq: int, tk: int) -> Tensor | None:
    """Fill the mask fields of a struct; returns the tensor that must stay alive through the call."""
    if mask is None:
        return None
    broadcast = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] == 1 and mask.shape[2] in (1, tq)
    if not broadcast or mask.shape[3] not in (1, tk) or mask.device.type != "cpu":
        raise _fail(op, "mask", f"bool or float, broadcastable to [{batch}, 1, {tq}, {tk}]", mask)
    if mask.dtype not in native.MASKS:
        if not mask.is_floating_point():
            raise _fail(op, "mask", "bool or float", mask)
        mask = mask.to(torch.float32)
    mask = rows_of(mask.expand(-1, -1, -1, tk))
    f.mask, f.mask_kind = mask.data_ptr(), native.MASKS[mask.dtype]
    f.mask_batch = mask.stride(0) if mask.shape[0] > 1 else 0
    f.mask_query = mask.stride(2) if mask.shape[2] > 1 else 0
    return mask


def start_pointer(op: str, start: Tensor | None, batch: int) -> int | None:
    """Pointer of the first visible key per sequence, int64 [B]."""
    return None if start is None else vector(op, "start", start, batch, torch.int64)


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
    isa: str | None = None,
) -> Tensor:
    """Softmax attention of each kept (row, head group); see `reference.routed_attention`. Zeros where dropped.

    q [B, Tq, H, d], k and v [B, Tk, K, d] with any strides (transposed views of [B, K, Tk, d] caches are read in
    place), keep bool [B, Tq, G]. `mask` is bool or additive, broadcastable to [B, 1, Tq, Tk]. `causal` None: causal
    exactly when no mask is given; the last query sees the last key. `window`: no further back than window - 1 keys.
    `start` int64 [B]: the first key a sequence may see (left padding). All limits hold together.
    Returns [B, Tq, H, d], contiguous. Errors: as `routed_ffn`.
    """
    op = "routed_attention"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4 or t.dtype != q.dtype or t.device.type != "cpu" or t.shape[-1] != q.shape[-1]:
            raise _fail(op, name, f"{q.dtype} [B, T, heads, d] on cpu, like q", t)
    batch, tq, heads, dim = q.shape
    tk, kv_heads = k.shape[1:3]
    check(op, "k", k, (batch, tk, kv_heads, dim), q.dtype)
    check(op, "v", v, (batch, tk, kv_heads, dim), q.dtype)
    fits = keep.ndim == 3 and keep.shape[:2] == (batch, tq) and keep.shape[2] > 0 and heads % keep.shape[2] == 0
    if keep.dtype != torch.bool or keep.device.type != "cpu" or not fits:
        raise _fail(op, "keep", f"bool [{batch}, {tq}, G] with G dividing {heads}", keep)
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > native.MAX_SHARED_HEADS or dim < 1:
        raise ValueError(f"{op}: {kv_heads} KV heads do not fit {heads} query heads of size {dim}")
    q, k, v, flat = rows_of(q), rows_of(k), rows_of(v), keep.reshape(batch * tq, keep.shape[2])
    flat = rows_of(flat)
    out = _new(batch * tq, heads * dim, q).view(batch, tq, heads, dim)
    if out.numel() == 0:
        return out
    if tk == 0:
        return out.zero_()
    a = native.Attention(run=native.run_fields(q.dtype, isa, q.numel() * tk))
    a.batch, a.queries, a.keys, a.heads, a.kv_heads, a.head_dim, a.groups = (
        batch,
        tq,
        tk,
        heads,
        kv_heads,
        dim,
        keep.shape[2],
    )
    a.q, a.k, a.v, a.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    a.q_batch, a.q_token, a.q_head = q.stride()[:3]
    a.k_batch, a.k_token, a.k_head = k.stride()[:3]
    a.v_batch, a.v_token, a.v_head = v.stride()[:3]
    a.out_batch, a.out_token, a.out_head = out.stride()[:3]
    a.keep, a.ldkeep = flat.data_ptr(), flat.stride(0)
    alive = mask_fields(op, a, mask, batch, tq, tk)
    a.start = start_pointer(op, start, batch)
    a.causal = (mask is None) if causal is None else causal
    a.window = 0 if window is None else window
    a.scale = dim**-0.5 if scale is None else scale
    native.call("widellm_routed_attention", a)
    del alive
    return out

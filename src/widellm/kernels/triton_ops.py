"""The ops of `reference.py` in Triton: which kernels run for which shapes. CUDA and ROCm; in tests, the interpreter.

Nothing here reads a tensor's values on the host, and sizes of outputs and grids depend on shapes alone: calls can be
captured in a CUDA graph and replayed with other masks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from widellm.kernels import masked
from widellm.kernels.triton_attention import routed_attention
from widellm.kernels.triton_ffn import into_few, into_many, out_of_groups
from widellm.kernels.triton_launch import ceil_div, device_of, launch, power_of_two
from widellm.kernels.triton_plan import RowPlan, plan_groups, plan_rows
from widellm.kernels.triton_router import routed_keep
from widellm.kernels.triton_tuning import DENSE, FEW, Config, check, choose

__all__ = ["routed_attention", "routed_ffn", "routed_in", "routed_keep", "routed_out", "shared_plan"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROW_TILES = 8  # row tiles of a projection out of the groups that share the weights in the L2 cache


def _rows(t: Tensor) -> Tensor:
    """`t` itself when its last dimension is contiguous, else a contiguous copy."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def _want(op: str, x: Tensor, /, **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless each tensor has its shape and x's dtype and device."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{op}: x must be float32, float16 or bfloat16, got {x.dtype}")
    for name, (t, shape) in tensors.items():
        if t is not None and (t.shape != shape or t.dtype != x.dtype or t.device != x.device):
            raise ValueError(
                f"{op}: {name} must be {x.dtype} {list(shape)} on {x.device}, "
                f"got {t.dtype} {list(t.shape)} on {t.device}"
            )


def _group_size(op: str, keep: Tensor, rows: int, width: int) -> int:
    fits = keep.ndim == 2 and keep.shape[0] == rows and keep.shape[1] > 0 and width % keep.shape[1] == 0
    if keep.dtype != torch.bool or not fits:
        raise ValueError(
            f"{op}: keep must be bool [{rows}, G] with G dividing {width}, got {keep.dtype} {list(keep.shape)}"
        )
    return width // keep.shape[1]


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
    """See `reference.routed_ffn`. The activations between the maps are rounded to x's dtype.

    Raises ValueError on shapes and dtypes that do not fit, BackendError where there is no compiler for the device.
    """
    op = "routed_ffn"
    (inner, hidden), m = w_up.shape, x.shape[0]
    _want(
        op, x, x=(x, (m, hidden)), w_gate=(w_gate, (inner, hidden)), w_up=(w_up, (inner, hidden)),
        w_down=(w_down, (hidden, inner)), b_gate=(b_gate, (inner,)), b_up=(b_up, (inner,)), b_down=(b_down, (hidden,)),
    )  # fmt: skip
    if act not in ACTIVATIONS:
        raise ValueError(f"{op}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")
    if w_gate is None and b_gate is not None:
        raise ValueError(f"{op}: b_gate is given without w_gate")
    size, keep = _group_size(op, keep, m, inner), _rows(keep)
    config = choose("out", device_of(x), m, size, size, x.element_size())
    # what is dropped stays undefined where the projection out does not read it
    h = (torch.zeros if config == DENSE else torch.empty)(m, inner, dtype=x.dtype, device=x.device)
    project_in(x, w_gate, w_up, keep, act, b_gate, b_up, h, zero=False)
    return linear(h, w_down, b_down) if config == DENSE else project_out(h, w_down, keep, b_down, config)


def shared_plan(keep: Tensor, w: Tensor) -> RowPlan | None:
    """The plan of keep bool [B, T, G] for both q's projection (weight w [N, D]) and the attention of these rows.

    Pass it to `routed_in` and `routed_attention`; None for so few rows that none is needed.
    """
    rows = keep.shape[0] * keep.shape[1]
    if rows <= FEW:
        return None
    config = choose("in", device_of(w), rows, w.shape[0] // keep.shape[2], w.shape[1], w.element_size())
    return plan_rows(keep, config.bm)


def routed_in(x: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None, *, plan: RowPlan | None = None) -> Tensor:
    """See `reference.routed_in`. plan: of `shared_plan`, made here if None. Errors: as `routed_ffn`."""
    m, (outputs, inputs) = x.shape[0], w.shape
    _want("routed_in", x, x=(x, (m, inputs)), w=(w, (outputs, inputs)), bias=(bias, (outputs,)))
    _group_size("routed_in", keep, m, outputs)
    out = (torch.empty if m <= FEW else torch.zeros)(m, outputs, dtype=x.dtype, device=x.device)
    project_in(x, None, w, _rows(keep), "none", None, bias, out, zero=True, plan=plan)
    return out


def routed_out(h: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.routed_out`. Errors: as `routed_ffn`."""
    m, (outputs, inputs) = h.shape[0], w.shape
    _want("routed_out", h, h=(h, (m, inputs)), w=(w, (outputs, inputs)), bias=(bias, (outputs,)))
    _group_size("routed_out", keep, m, inputs)
    return project_out(h, w, _rows(keep), bias)


def project_in(
    x: Tensor, gate: Tensor | None, up: Tensor, keep: Tensor, act: str, b_gate: Tensor | None, b_up: Tensor | None,
    out: Tensor, zero: bool, config: Config | None = None, plan: RowPlan | None = None,
) -> None:  # fmt: skip
    """Write act(x gate^T + b_gate) * (x up^T + b_up) of the kept (row, group) pairs into out [M, N].

    zero: what is dropped is 0; with more than FEW rows `out` must hold zeros already. config: instead of the choice.
    """
    (m, k), groups = x.shape, keep.shape[1]
    if m == 0:
        return
    x, size, kind = _rows(x), up.shape[0] // groups, "in" if gate is None else "ffn_in"
    config = check(config or choose(kind, device_of(x), m, size, k, x.element_size()), kind, size)
    bm, bn, bk, warps, stages, waves = config
    if m <= FEW:
        bm = max(16, power_of_two(m))  # all rows in one tile
    arguments = {
        "x": x, "gate": gate, "up": up, "gate_bias": b_gate, "up_bias": b_up, "out": out, "m": m, "k": k,
        "stride_x": x.stride(0), "stride_up_n": up.stride(0), "stride_up_k": up.stride(1),
        "stride_gate_n": 0 if gate is None else gate.stride(0), "stride_gate_k": 0 if gate is None else gate.stride(1),
        "stride_out": out.stride(0), "SIZE": size, "ACT": act, "BM": bm, "BN": bn, "BK": bk,
        "EVEN": k % bk == 0 and size % bn == 0,
    }  # fmt: skip
    splits = ceil_div(size, bn)
    if m <= FEW:
        mask = keep.view(torch.uint8)
        arguments |= {"keep": mask, "stride_keep": keep.stride(0), "ZERO": zero}
        launch(into_few, (groups * splits,), warps, stages, **arguments)
        return
    plan = plan or plan_rows(keep, bm)
    arguments |= {"rows": plan.rows, "counts": plan.counts, "work": plan.work, "total": plan.total}
    arguments |= {"BM": plan.tile, "m": plan.rows.shape[1], "groups": groups}
    programs = min(device_of(x).programs * waves, plan.work.numel() * splits)
    launch(into_many, (programs,), warps, stages, **arguments)


def project_out(h: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None, config: Config | None = None) -> Tensor:
    """The sum over kept groups of h [M, N] w [D, N]^T, + bias: [M, D] in h's dtype."""
    m, d, groups = h.shape[0], w.shape[0], keep.shape[1]
    out = torch.empty(m, d, dtype=h.dtype, device=h.device)
    if m == 0:
        return out
    h, size = _rows(h), w.shape[1] // groups
    config = config or choose("out", device_of(h), m, size, size, h.element_size())
    if config == DENSE:
        return masked.routed_out(h, w, keep, bias)
    bm, bn, bk, warps, stages, _ = check(config, "out", size)
    plan = plan_groups(keep, bm)
    launch(
        out_of_groups, (ceil_div(m, bm) * ceil_div(d, bn),), warps, stages, h=h, w=w, bias=bias, out=out,
        keep=keep.view(torch.uint8), ids=plan.groups, counts=plan.counts, m=m, d=d, groups=groups,
        stride_h=h.stride(0), stride_w_d=w.stride(0), stride_w_n=w.stride(1), stride_keep=keep.stride(0),
        stride_out=out.stride(0), SIZE=size, BM=bm, BN=bn, BK=bk, EVEN=d % bn == 0 and size % bk == 0, TILES=ROW_TILES,
    )  # fmt: skip
    return out

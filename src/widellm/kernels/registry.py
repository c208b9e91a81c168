"""The public ops, the backends behind them, and which one `auto` takes.

    routed_ffn(x [M,D], w_gate [F,D] | None, w_up [F,D], w_down [D,F], keep [M,G], act, ...) -> [M,D]
    routed_in(x [M,D], w [N,D], keep [M,G], ...) -> [M,N]
    routed_out(h [M,N], w [D,N], keep [M,G], ...) -> [M,D]
    routed_attention(q [B,Tq,H,d], k, v [B,Tk,K,d], keep [B,Tq,G], ...) -> [B,Tq,H,d]

What each computes is written in `reference.py`. A backend changes the time and the rounding, never the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from widellm.errors import BackendError
from widellm.kernels import cpu, dispatch, gpu, grouped, masked, reference
from widellm.routing import state
from widellm.routing.router import Router
from widellm.routing.state import SubLayer

BACKENDS: dict[str, ModuleType] = {
    "reference": reference,
    "masked": masked,
    "grouped": grouped,
    "cpu": cpu,
    "triton": gpu,
}


def backends() -> dict[str, tuple[bool, str]]:
    """Name -> (can it run here, why not or what it is)."""
    native = cpu.availability()
    return {
        "reference": (True, "loops in plain torch, for tests"),
        "masked": (True, "dense linears, then drop; differentiable"),
        "grouped": (True, "plain torch, one GEMM per group over the rows that keep it"),
        "cpu": native,
        "triton": gpu.availability(),
    }


def check_backend(name: str) -> str:
    """Return `name` if it is "auto" or a backend that can run here, else raise BackendError listing those that can."""
    here = {"cpu": cpu.availability, "triton": gpu.availability}
    if name == "auto" or (name in BACKENDS and (name not in here or here[name]()[0])):
        return name
    table = backends()
    usable = ", ".join(["auto", *(n for n, (ok, _) in table.items() if ok)])
    why = f"cannot run here: {table[name][1]}" if name in table else "is not known"
    raise BackendError(f"backend {name!r} {why}; usable: {usable}")


def _run(name: str, op: str, x: Tensor, keep: Tensor, width: int, *args: object) -> Tensor:
    """`op` on all of `args`, by backend `name`; x, keep and width are what `auto` chooses by."""
    chosen = dispatch.choose(op, x, keep, width) if name == "auto" else check_backend(name)
    if chosen != "cpu":  # which checks by itself: twice would be a tenth of a small op
        _check(op, x, keep, width)
    try:
        return getattr(BACKENDS[chosen], op)(*args)
    except BackendError:
        # `auto` cannot see a weight's layout, and the native library does not take all.
        if name != "auto":
            raise
        return getattr(masked, op)(*args)


def _check(op: str, x: Tensor, keep: Tensor, size: int) -> None:
    lead = tuple(x.shape[: 2 if op == "routed_attention" else 1])
    fits = keep.ndim == len(lead) + 1 and keep.shape[:-1] == lead and keep.shape[-1] > 0 and size % keep.shape[-1] == 0
    if keep.dtype != torch.bool or not fits:
        shape = ", ".join(map(str, lead))
        raise ValueError(
            f"{op}: keep must be bool [{shape}, G] with G dividing {size}, got {keep.dtype} {list(keep.shape)}"
        )


def _eager(x: Tensor) -> bool:
    """Whether a call may bypass torch's dispatcher (20 us, an op's time): real CPU tensors, and nobody is tracing."""
    plain = type(x) is Tensor and x.device.type == "cpu"
    return plain and not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


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
    backend: str = "auto",
) -> Tensor:
    """FFN over the kept channel groups; see `reference.routed_ffn`. With gradients wanted, `masked` runs.

    Raises ValueError on shapes that do not fit, BackendError on a backend that cannot run here.
    """
    if _needs_grad(x, w_gate, w_up, w_down, b_gate, b_up, b_down):
        return masked.routed_ffn(x, w_gate, w_up, w_down, keep, act, b_gate, b_up, b_down)
    op = _run_ffn if _eager(x) else _routed_ffn
    return op(x, w_gate, w_up, w_down, keep, act, b_gate, b_up, b_down, backend)


def routed_in(x: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Projection into the groups; see `reference.routed_in`. Gradients, errors: as `routed_ffn`."""
    if _needs_grad(x, w, bias):
        return masked.routed_in(x, w, keep, bias)
    op = _run_in if _eager(x) else _routed_in
    return op(x, w, keep, bias, backend)


def routed_out(h: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Projection out of the groups; see `reference.routed_out`. Gradients, errors: as `routed_ffn`."""
    if _needs_grad(h, w, bias):
        return masked.routed_out(h, w, keep, bias)
    op = _run_out if _eager(h) else _routed_out
    return op(h, w, keep, bias, backend)


def routed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of the kept (row, head group) pairs; see `reference.routed_attention`. Gradients, errors: as above."""
    if _needs_grad(q, k, v):
        return masked.routed_attention(q, k, v, keep, mask, scale)
    op = _run_attention if _eager(q) else _routed_attention
    return op(q, k, v, keep, mask, scale, backend)


def _run_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    keep: Tensor,
    act: str,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    backend: str,
) -> Tensor:
    weights = (w_gate, w_up, w_down)
    return _run(backend, "routed_ffn", x, keep, w_up.shape[0], x, *weights, keep, act, b_gate, b_up, b_down)


_routed_ffn = torch.library.custom_op("widellm::routed_ffn", _run_ffn, mutates_args=())


@_routed_ffn.register_fake
def _(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    keep: Tensor,
    act: str,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    backend: str,
) -> Tensor:
    return x.new_empty(x.shape[0], w_down.shape[0])


def _run_in(x: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return _run(backend, "routed_in", x, keep, w.shape[0], x, w, keep, bias)


_routed_in = torch.library.custom_op("widellm::routed_in", _run_in, mutates_args=())


@_routed_in.register_fake
def _(x: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _run_out(h: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return _run(backend, "routed_out", h, keep, w.shape[1], h, w, keep, bias)


_routed_out = torch.library.custom_op("widellm::routed_out", _run_out, mutates_args=())


@_routed_out.register_fake
def _(h: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return h.new_empty(h.shape[0], w.shape[0])


def _run_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None, scale: float | None, backend: str
) -> Tensor:
    return _run(backend, "routed_attention", q, keep, q.shape[-2], q, k, v, keep, mask, scale)


_routed_attention = torch.library.custom_op("widellm::routed_attention", _run_attention, mutates_args=())


@_routed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None, scale: float | None, backend: str) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])


def native_when_dense(op: str, x: Tensor, weight: Tensor, width: int, sub: SubLayer) -> bool:
    """See `dispatch.native_when_dense`; a backend asked for by name is not replaced by another."""
    return sub.backend == "auto" and dispatch.native_when_dense(op, x, weight, width, sub.groups)


def decide(router: Router, rows: Tensor, lead: Sequence[int], sub: SubLayer) -> Tensor:
    """Which groups each of rows [M, D] keeps: bool [M, G]; see `state.decide`. On a GPU the router is one kernel."""
    keep = None
    if sub.threshold is not None and not sub.shared:
        keep = routed_keep(rows, router.down, router.up, router.bias, sub.threshold, sub.backend)
    return state.decide(router(rows), lead, sub) if keep is None else keep


def routed_keep(
    x: Tensor, down: Tensor, up: Tensor, bias: Tensor, threshold: float, backend: str = "auto"
) -> Tensor | None:
    """The router's decision in one kernel: keep bool [M, G] of x [M, D]; None where that would not be faster.

    down [r, D], up [G, r], bias [G] float32: see `routing.router.Router`. None too where gradients are wanted.
    """
    fused = backend == "triton" or (backend == "auto" and x.device.type == "cuda")
    if not fused or not gpu.availability()[0] or _needs_grad(x, down, up, bias):
        return None
    return _routed_keep(x, down, up, bias, threshold)


@torch.library.custom_op("widellm::routed_keep", mutates_args=())
def _routed_keep(x: Tensor, down: Tensor, up: Tensor, bias: Tensor, threshold: float) -> Tensor:
    return gpu.routed_keep(x, down, up, bias, threshold)


@_routed_keep.register_fake
def _(x: Tensor, down: Tensor, up: Tensor, bias: Tensor, threshold: float) -> Tensor:
    return x.new_empty(x.shape[0], up.shape[0], dtype=torch.bool)


def attention_skips(backend: str, query: Tensor, key: Tensor, kwargs: dict[str, object]) -> bool:
    """Whether attention over dropped heads should be skipped here (query [B,H,Tq,d], key [B,K,Tk,d]).

    `kwargs` is what transformers passes besides: a soft cap, a position bias or attention sinks have no kernel here.
    """
    if any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux")):
        return False
    return (dispatch.choose_attention(query, key) if backend == "auto" else backend) not in ("masked", "grouped")

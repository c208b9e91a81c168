"""The routed ops on int8 weights with one scale per output (`Int8`), activations as they are.

Two backends: "cpu" (native: reads half of what bf16 weights are) and "reference" (loops, for tests). Elsewhere, and
where gradients are wanted, a quantised module's own library multiplies all, and dropped groups are dropped after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widellm.errors import BackendError
from widellm.kernels import cpu, reference
from widellm.kernels.cpu import Int8

__all__ = ["Int8", "routed_ffn", "routed_in", "routed_out", "takes"]


def takes(x: Tensor, backend: str = "auto") -> bool:
    """Whether the native kernels do a call on x [..., K]: on the CPU, no gradients wanted, nobody tracing."""
    if backend not in ("auto", "cpu") or x.device.type != "cpu" or x.dtype not in cpu.NATIVE_TYPES:
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or (torch.is_grad_enabled() and x.requires_grad):
        return False
    return cpu.availability()[0]


def _native(backend: str) -> bool:
    if backend not in ("cpu", "reference"):
        raise BackendError(f"int8 weights have the backends cpu and reference, got {backend!r}")
    return backend == "cpu"


def routed_ffn(
    x: Tensor,
    w_gate: Int8 | None,
    w_up: Int8,
    w_down: Int8,
    keep: Tensor,
    act: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    backend: str = "cpu",
) -> Tensor:
    """FFN over the kept channel groups; see `reference.routed_ffn`. [M, D] -> [M, D] in x's dtype.

    w_gate, w_up [F, D], w_down [D, F], best with q input-major. Raises ValueError on sizes and dtypes that do not fit,
    BackendError on layouts that "cpu" does not take and on other backends.
    """
    if _native(backend):
        return cpu.routed_ffn(x, w_gate, w_up, w_down, keep, act, b_gate, b_up, b_down)
    gate = None if w_gate is None else w_gate.dense()
    return reference.routed_ffn(x, gate, w_up.dense(), w_down.dense(), keep, act, b_gate, b_up, b_down)


def routed_in(x: Tensor, w: Int8, keep: Tensor, bias: Tensor | None = None, backend: str = "cpu") -> Tensor:
    """Projection into the groups; see `reference.routed_in`. w [N, K]. Errors: as `routed_ffn`."""
    if _native(backend):
        return cpu.routed_in(x, w, keep, bias)
    return reference.routed_in(x, w.dense(), keep, bias)


def routed_out(h: Tensor, w: Int8, keep: Tensor, bias: Tensor | None = None, backend: str = "cpu") -> Tensor:
    """Projection out of the groups; see `reference.routed_out`. w [D, N], best input-major. Errors: as `routed_ffn`."""
    if _native(backend):
        return cpu.routed_out(h, w, keep, bias)
    return reference.routed_out(h, w.dense(), keep, bias)

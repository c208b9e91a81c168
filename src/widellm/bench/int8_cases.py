"""The ops on int8 weights that are timed: native ones, against torchao's arithmetic and against all groups kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from widellm.bench.cases import Call, Case, ModelShape, copies, in_turn
from widellm.kernels import int8, masked
from widellm.kernels.cost_table import noise
from widellm.kernels.int8 import Int8

OPS = ("int8_ffn", "int8_in", "int8_out")
"""As routed_ffn, routed_in (q) and routed_out (o)."""


def _weight(outputs: int, inputs: int, input_major: bool = False) -> Int8:
    q = torch.randint(-127, 128, (inputs, outputs) if input_major else (outputs, inputs), dtype=torch.int8)
    return Int8(q.t() if input_major else q, torch.full((outputs,), inputs**-0.5 / 74))


def _whole(x: Tensor, w: Int8) -> Tensor:
    """As torchao multiplies: the weight becomes x's dtype at each call."""
    return torch.mm(x, w.q.t().to(x.dtype)) * w.scale.to(x.dtype)


class Int8Weights:
    """Random int8 weights of one op at one shape, made once for all numbers of rows."""

    def __init__(self, op: str, s: ModelShape, dtype: torch.dtype) -> None:
        self.op, self.s, self.dtype = op, s, dtype
        self.inner = s.inner if op == "int8_ffn" else s.heads * s.head_dim
        maps = {"int8_ffn": 3}.get(op, 1)
        self.sets = [self._set() for _ in range(copies(maps * s.hidden * self.inner))]

    def _set(self) -> tuple[Int8, ...]:
        hidden, inner = self.s.hidden, self.inner
        if self.op == "int8_in":
            return (_weight(inner, hidden),)
        if self.op == "int8_out":
            return (_weight(hidden, inner, input_major=True),)
        return _weight(inner, hidden), _weight(inner, hidden), _weight(hidden, inner, input_major=True)


def int8_case(weights: Int8Weights, rows: int) -> Case:
    """One op on int8 weights; `torch` among the dense ways is torchao's arithmetic."""
    op, s, sets, dtype = weights.op, weights.s, weights.sets, weights.dtype
    x = noise(rows, weights.inner if op == "int8_out" else s.hidden, dtype=dtype, scale=1.0)
    group = s.ffn_group if op == "int8_ffn" else s.head_dim

    def native(keep: Tensor) -> Callable[..., Tensor]:
        if op == "int8_ffn":
            return lambda w: int8.routed_ffn(x, w[0], w[1], w[2], keep, "silu")
        routed = int8.routed_in if op == "int8_in" else int8.routed_out
        return lambda w: routed(x, w[0], keep)

    def whole(w: tuple[Int8, ...]) -> Tensor:
        return _whole(silu(_whole(x, w[0])).mul_(_whole(x, w[1])), w[2]) if op == "int8_ffn" else _whole(x, w[0])

    def reference(keep: Tensor, first: int) -> Tensor:
        w, some, kept = [m.dense() for m in sets[0]], x[:first].float(), keep[:first]
        if op == "int8_ffn":
            return masked.routed_ffn(some, w[0], w[1], w[2], kept, "silu")
        return (masked.routed_in if op == "int8_in" else masked.routed_out)(some, w[0], kept)

    def routed(keep: Tensor, backend: str) -> Call:
        return in_turn(native(keep), sets)

    groups = weights.inner // group
    dense = {"torch": in_turn(whole, sets), "cpu": in_turn(native(torch.ones(rows, groups, dtype=torch.bool)), sets)}
    sizes = (weights.inner, s.hidden) if op == "int8_out" else (s.hidden, weights.inner)
    kind = "ffn" if op == "int8_ffn" else "attention"
    return Case(f"{sizes[0]}x{sizes[1]} g{group}", kind, groups, dense, routed, lambda keep: "cpu", reference)

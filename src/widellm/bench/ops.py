"""Time of the routed ops against the faster of two dense ways: torch's linears and the native kernels' own dense."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from widellm.bench.cases import CASES, SHAPES, Call, Case, ModelShape, Weights, native_ready
from widellm.bench.int8_cases import OPS as INT8_OPS
from widellm.bench.int8_cases import Int8Weights, int8_case
from widellm.bench.layers import interleaved_rows, layer_rows, router_rows, step_rows
from widellm.bench.masks import LearnedMasks, random_mask, shared_mask
from widellm.bench.rows import OpRow
from widellm.errors import WidellmError
from widellm.kernels.timing import Timing, alternate

ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 1024)
DENSITIES = (1.0, 0.75, 0.5, 0.25)
SHARED_ROWS = (8, 16, 32)
PARTS = {
    "ffn": ("routed_ffn",),
    "projections": ("routed_in", "routed_out"),
    "attention": ("routed_attention",),
    "int8": INT8_OPS,
    "layer": ("layer", "attention_step", "router", "interleaved"),
}
"""Part of `widellm bench` -> the ops in it."""
CASE_SECONDS = 3.0
"""A case ends with the round in which this much time has passed, so that a part of the bench takes under a minute."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest error, as a share of the largest value, that passes the check before timing."""


@dataclass(frozen=True)
class OpSettings:
    """What to time."""

    ops: Sequence[str] = tuple(op for ops in PARTS.values() for op in ops)
    shapes: Sequence[str] = tuple(SHAPES)
    rows: Sequence[int] = ROWS
    densities: Sequence[float] = DENSITIES
    dtype: torch.dtype = torch.bfloat16
    backend: str = "auto"
    rounds: int = 3

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 1:
            raise WidellmError(f"--rows must be at least 1, got {list(self.rows)}")
        if not self.densities or not all(0 < d <= 1 for d in self.densities):
            raise WidellmError(f"--densities must be in (0, 1], got {list(self.densities)}")
        if self.dtype not in TOLERANCE:
            raise WidellmError(f"ops are timed in float32 or bfloat16, got {self.dtype}")
        if self.rounds < 1:
            raise WidellmError(f"--rounds must be at least 1, got {self.rounds}")
        for name, chosen, known in (("shape", self.shapes, SHAPES), ("op", self.ops, OpSettings.ops)):
            for one in chosen:
                if one not in known:
                    raise WidellmError(f"{name} {one!r} is not known; known: {', '.join(known)}")


@torch.inference_mode()
def time_ops(
    settings: OpSettings,
    learned: LearnedMasks | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[OpRow]:
    """Check each op's result, then time it: one group per (op, shape, rows), in which dense and routed alternate.

    Raises WidellmError when a routed result is wrong: then no time means anything.
    """
    rows: list[OpRow] = []
    todo = [(op, SHAPES[name]) for op in settings.ops for name in settings.shapes]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for done, (op, shape) in enumerate(todo):
            progress("ops", done, len(todo))
            rows += list(_op_rows(op, shape, settings, learned))
    progress("ops", len(todo), len(todo))
    return rows


def _op_rows(op: str, shape: ModelShape, settings: OpSettings, learned: LearnedMasks | None) -> Iterator[OpRow]:
    if op == "layer":
        yield from layer_rows(shape, settings.dtype, settings.rows, settings.densities, settings.rounds)
    elif op == "attention_step":
        yield from step_rows(shape, settings.dtype, settings.rows, settings.densities, settings.rounds)
    elif op == "interleaved":
        yield from interleaved_rows(shape, settings.dtype, settings.rows, settings.rounds)
    elif op == "router":
        yield from router_rows(shape, settings.dtype, settings.rows, settings.rounds)
    elif op in INT8_OPS:
        if not native_ready(settings.dtype):
            return
        int8_weights = Int8Weights(op, shape, settings.dtype)
        for count in settings.rows:
            case = int8_case(int8_weights, count)
            check(op, case, count, settings.dtype, "cpu")
            yield from _case_rows(op, shape, case, count, replace(settings, backend="cpu"), learned)
    else:
        weights = Weights(op, shape, settings.dtype)
        for count in settings.rows:
            case = CASES[op](weights, count)
            check(op, case, count, settings.dtype, settings.backend)
            yield from _case_rows(op, shape, case, count, settings, learned)


def check(op: str, case: Case, rows: int, dtype: torch.dtype, backend: str) -> None:
    """Raise WidellmError unless the routed op gives the right answer for a random mask of density 0.5."""
    keep = random_mask(rows, case.groups, 0.5)
    first = min(rows, 8)
    got = case.routed(keep, case.choice(keep) if backend == "auto" else backend)()
    if op == "routed_attention" and got.ndim == 4:
        return  # dense attention computes dropped heads too: there is nothing to compare
    want = case.reference(keep, first)
    error = (got[:first].float() - want).abs().max().item() / max(want.abs().max().item(), 1e-6)
    if not error <= TOLERANCE[dtype]:
        raise WidellmError(f"{op} {case.shape}, {rows} rows, is wrong by {error:.2g} of its range: nothing was timed")


def _case_rows(
    op: str, shape: ModelShape, case: Case, count: int, settings: OpSettings, learned: LearnedMasks | None
) -> Iterator[OpRow]:
    masks: dict[tuple[str, float], Tensor] = {}
    for density in settings.densities:
        masks["random", density] = random_mask(count, case.groups, density)
        if learned is not None and density < 1:
            masks["learned", density] = learned.mask(case.kind, count, case.groups, density)
        if count in SHARED_ROWS and density < 1:
            masks["shared", density] = shared_mask(count, case.groups, density)
    calls: dict[str, Call] = {f"dense {name}": call for name, call in case.dense.items()}
    chosen = {}
    for (kind, density), keep in masks.items():
        chosen[kind, density] = case.choice(keep) if settings.backend == "auto" else settings.backend
        calls[f"{kind} {density}"] = case.routed(keep, chosen[kind, density])
    times = alternate(calls, settings.rounds, limit=CASE_SECONDS)
    name, dense = fastest(times, "dense ")
    for (kind, density), keep in masks.items():
        took = times[f"{kind} {density}"]
        yield OpRow(
            op=op,
            shape=shape.name,
            sizes=case.shape,
            rows=count,
            density=density,
            kept=round(float(keep.float().mean()), 4),
            masks=kind,
            backend=chosen[kind, density],
            dense_backend=name,
            ms=took.ms,
            dense_ms=dense.ms,
            spread=took.spread,
            dense_spread=dense.spread,
        )


def fastest(times: dict[str, Timing], prefix: str) -> tuple[str, Timing]:
    """(name without the prefix, timing) of the fastest of the timings whose names begin with `prefix`."""
    found = {name.removeprefix(prefix): t for name, t in times.items() if name.startswith(prefix)}
    best = min(found, key=lambda name: found[name].ms)
    return best, found[best]

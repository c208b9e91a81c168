"""What is measured, a row each; docs/bench.md lists the keys."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class OpRow:
    """One op, timed routed and dense in one run. Times are medians in milliseconds, spreads largest over smallest."""

    op: str
    shape: str
    """The model whose layer it is."""
    sizes: str
    rows: int
    density: float
    """What the mask was asked to keep; `kept` is what it does."""
    kept: float
    masks: str
    """"random", "shared" (one mask for all rows) or "learned"."""
    backend: str
    dense_backend: str
    """The faster of "torch" and "cpu" (the native kernels keeping everything)."""
    ms: float
    dense_ms: float
    spread: float
    dense_spread: float

    @property
    def speedup(self) -> float:
        """Dense time over routed time."""
        return self.dense_ms / self.ms

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "op", **_rounded({**asdict(self), "speedup": self.speedup})}


@dataclass(frozen=True)
class ModelRow:
    """One phase of one model under one engine; medians over the rounds."""

    model: str
    phase: str
    """"prefill", "decode" or "batch" (8 prompts of different lengths, tokens of all of them)."""
    budget: float
    engine: str
    tokens_per_s: float
    spread: float
    """Largest over smallest time."""
    peak_memory_gb: float
    """Of the engine's own process, weights and libraries included."""
    first_token_ms: float | None = None
    """Decode and batch: from the call to the first new token."""
    token_ms: float | None = None
    """Decode and batch: median gap between two tokens."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "model", **_rounded(asdict(self))}


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}

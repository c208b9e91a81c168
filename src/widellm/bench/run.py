"""All parts of `widellm bench` in one call, and the JSON that it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from widellm.bench.masks import LearnedMasks, learned_masks
from widellm.bench.models import ModelSettings, time_model
from widellm.bench.ops import PARTS as OP_PARTS
from widellm.bench.ops import OpSettings, time_ops
from widellm.bench.rows import ModelRow, OpRow
from widellm.bench.zoo import RANDOM, check_model, routed_model, tokens_for
from widellm.config import KINDS
from widellm.errors import ConfigError
from widellm.kernels import cost_table, dispatch
from widellm.modeling.attach import width_of
from widellm.modeling.checkpoint import read_width
from widellm.provenance import versions

RANDOM_MODEL = RANDOM + "llama-3.2-1b"
PARTS = (*OP_PARTS, "model", "llama-1b")
"""`model` is the routed directory given, `llama-1b` a random-weight Llama-3.2-1B."""
GROUPS = {"ops": tuple(OP_PARTS), "models": ("model", "llama-1b")}


def parts(only: str | None, has_model: bool) -> tuple[str, ...]:
    """The parts named in a comma-separated list ("ops" and "models" are groups); all that can run without a list.

    Raises ConfigError for an unknown name, or for `model` without a routed directory.
    """
    if only is None:
        return tuple(p for p in PARTS if p != "model" or has_model)
    chosen: list[str] = []
    for name in (n.strip() for n in only.split(",")):
        if name not in PARTS and name not in GROUPS:
            raise ConfigError(f"--only: {name!r} is not a part; parts: {', '.join((*PARTS, *GROUPS))}")
        if name == "model" and not has_model:
            raise ConfigError("--only model needs a routed directory: pass --model DIR")
        chosen += [p for p in GROUPS.get(name, (name,)) if p != "model" or has_model]
    return tuple(dict.fromkeys(chosen))


@dataclass
class BenchResult:
    """Everything that was measured, and on what."""

    ops: list[OpRow] = field(default_factory=list)
    models: list[ModelRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dtype: str = "bfloat16"
    config: str | None = None
    """Digest of the configuration of the routed directory that was given."""

    def to_json(self) -> list[dict[str, Any]]:
        """All rows, and one of kind "run" that says what they were measured on; docs/bench.md lists the keys."""
        return [self.about(), *(row.to_json() for row in self.ops), *(row.to_json() for row in self.models)]

    def about(self) -> dict[str, Any]:
        """The row of kind "run"."""
        _, why = dispatch.table_state()
        return {
            "kind": "run",
            "notes": self.notes,
            "dtype": self.dtype,
            "config": self.config,
            "threads": torch.get_num_threads(),
            "machine": cost_table.machine(),
            "dispatch": "rules" if why else "measured table",
            "versions": versions(),
        }


def bench(
    chosen: Sequence[str],
    ops: OpSettings,
    model: str | None = None,
    model_settings: Callable[[str], ModelSettings] = ModelSettings,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> BenchResult:
    """Run these parts. `model`: a routed directory, for its learned masks and for the part "model".

    Raises WidellmError when a result is wrong (nothing is timed then) or a setting does not fit.
    """
    result = BenchResult(dtype=str(ops.dtype).removeprefix("torch."))
    if model is not None:
        check_model(model)
        result.config = read_width(Path(model)).config.digest()
    names = [op for part in chosen if part in OP_PARTS for op in OP_PARTS[part] if op in ops.ops]
    if names:
        learned = _learned(model, max(ops.rows), progress) if model is not None else None
        if learned is None:
            result.notes.append("no learned masks: pass --model DIR with a routed directory of both kinds")
        result.ops = time_ops(replace(ops, ops=names), learned, progress)
    for part in chosen:
        if part in OP_PARTS:
            continue
        name = RANDOM_MODEL if part == "llama-1b" else model
        assert name is not None
        rows, notes = time_model(model_settings(name), progress)
        result.models += rows
        result.notes += [n for n in notes if n not in result.notes]
    return result


def _learned(model: str, rows: int, progress: Callable[[str, int, int], None]) -> LearnedMasks | None:
    progress("learned masks", 0, 1)
    loaded = routed_model(model, torch.bfloat16)
    if width_of(loaded).config.kinds != KINDS:
        return None
    masks = learned_masks(loaded, tokens_for(model, min(rows, 1024)))
    progress("learned masks", 1, 1)
    return masks

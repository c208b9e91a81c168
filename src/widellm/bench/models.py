"""Speed of whole models under several engines, taking turns in one run, after a check that they compute the same."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from widellm.bench.engines import ENGINES, EngineSpec
from widellm.bench.rows import ModelRow
from widellm.bench.worker import Worker
from widellm.bench.zoo import RANDOM, check_model, tokens_for
from widellm.config import check_budget
from widellm.errors import WidellmError
from widellm.optional import available

PHASES = ("prefill", "decode", "batch", "batch_shared")
BATCH_LENGTHS = (128, 112, 96, 80, 64, 48, 32, 16)
TOLERANCE = {"float32": 0.01, "bfloat16": 0.1}
"""Largest difference of two engines' logits, as a share of their range, that passes the check before timing."""


@dataclass(frozen=True)
class ModelSettings:
    """What to time."""

    model: str
    """A routed directory or "random:SHAPE"."""
    engines: Sequence[str] = ("widellm", "transformers", "llama.cpp")
    phases: Sequence[str] = PHASES
    budget: float = 0.5
    """Of the routed rows; "widellm" is timed at 1.0 as well."""
    prompt: int = 512
    """Tokens prefilled."""
    decode_prompt: int = 128
    new_tokens: int = 32
    rounds: int = 3
    seconds: float = 20.0
    """No round begins later than this after the first, which is not counted; one is always counted."""
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_model(self.model)
        check_budget(self.budget)
        for kind, chosen, known in (("engine", self.engines, ENGINES), ("phase", self.phases, PHASES)):
            for one in chosen:
                if one not in known:
                    raise WidellmError(f"{kind} {one!r} is not known; known: {', '.join(known)}")
        if self.dtype not in TOLERANCE:
            raise WidellmError(f"models are timed in float32 or bfloat16, got {self.dtype}")
        for name in ("prompt", "decode_prompt", "rounds"):
            if getattr(self, name) < 1:
                raise WidellmError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.new_tokens < 2:
            raise WidellmError(f"new_tokens must be at least 2, got {self.new_tokens}")


@dataclass
class _Times:
    prefill: list[float]
    decode: list[float]
    first: list[float]
    batch: list[float]
    batch_first: list[float]
    batch_shared: list[float]
    batch_shared_first: list[float]

    @staticmethod
    def none() -> _Times:
        return _Times([], [], [], [], [], [], [])


def time_model(
    settings: ModelSettings, progress: Callable[[str, int, int], None] = lambda stage, done, total: None
) -> tuple[list[ModelRow], list[str]]:
    """(rows, notes: what was left out and why). Each engine runs in a process of its own; only one works at a time.

    Raises WidellmError when two engines' logits disagree: then they do not run the same model.
    """
    notes = []
    engines = list(settings.engines)
    for name in [name for name in engines if name.endswith("-int8") and not available("torchao")]:
        engines.remove(name)
        notes.append(f'{name} is left out: pip install "widellm[quant]"')
    if "llama.cpp" in engines and not available("llama_cpp"):
        engines.remove("llama.cpp")
        notes.append('llama.cpp is left out: pip install "widellm[llama]" (it compiles for minutes)')
    label = settings.model.removeprefix(RANDOM) if settings.model.startswith(RANDOM) else Path(settings.model).name
    stage = label if settings.model.startswith(RANDOM) else "model"
    ids = tokens_for(settings.model, max(settings.prompt, settings.decode_prompt, BATCH_LENGTHS[0]))
    longest = max(settings.prompt, settings.decode_prompt + settings.new_tokens) + 8
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name in engines:  # all load at once
            spec = EngineSpec(
                name, settings.model, settings.dtype, torch.get_num_threads(), settings.new_tokens, longest
            )
            workers[name] = stack.enter_context(Worker(spec))
        for done, worker in enumerate(workers.values()):
            progress(f"{stage}: load", done, len(engines))
            worker.ready()
        progress(f"{stage}: load", len(engines), len(engines))
        check_parity(workers, ids[:, : min(64, ids.shape[1])], settings.dtype)
        times = _rounds(workers, ids, settings, lambda done, total: progress(f"{stage}: time", done, total))
        memory = {name: worker.peak_memory_gb() for name, worker in workers.items()}
    return _rows(label, times, memory, settings), notes


def check_parity(workers: dict[str, Worker], ids: Tensor, dtype: str) -> None:
    """Raise WidellmError unless all engines (widellm at budget 1) give nearly the first one's logits, and so those on
    int8 weights among them."""
    for in_int8 in (False, True):
        names = [name for name in workers if name.endswith("-int8") == in_int8]
        if len(names) < 2:
            continue
        logits = {name: workers[name].call("logits", ids) for name in names}
        base = "transformers" if "transformers" in logits else names[0]
        scale = float(logits[base].max() - logits[base].min())
        for name, found in logits.items():
            error = float((found - logits[base]).abs().max()) / scale
            if not error <= TOLERANCE[dtype]:
                raise WidellmError(
                    f"{name} and {base} differ by {error:.2g} of their logits' range, above {TOLERANCE[dtype]}: "
                    f"they do not run the same model, and nothing was timed"
                )


def _rounds(
    workers: dict[str, Worker], ids: Tensor, settings: ModelSettings, progress: Callable[[int, int], None]
) -> dict[tuple[str, float], _Times]:
    turns = [(n, b) for n in workers for b in ((1.0, settings.budget) if n.startswith("widellm") else (1.0,))]
    turns = list(dict.fromkeys(turns))
    found = {turn: _Times.none() for turn in turns}
    short = ids[:, : settings.decode_prompt]
    prompts, mask = left_padded(ids, BATCH_LENGTHS)
    total, began = (settings.rounds + 1) * len(turns), time.perf_counter()
    for turn in range(settings.rounds + 1):  # the first is not counted
        if turn > 1 and time.perf_counter() - began > settings.seconds:
            break
        for place, (name, budget) in enumerate(turns):
            progress(turn * len(turns) + place, total)
            times = _Times.none() if turn == 0 else found[name, budget]
            if "prefill" in settings.phases:
                times.prefill.append(workers[name].call("prefill", ids[:, : settings.prompt], budget))
            if "decode" in settings.phases:
                first, gaps = workers[name].call("decode", short, torch.ones_like(short), budget)
                times.first.append(first)
                times.decode.append(statistics.median(gaps))
            if "batch" in settings.phases and name != "llama.cpp":
                first, gaps = workers[name].call("decode", prompts, mask, budget)
                times.batch_first.append(first)
                times.batch.append(statistics.median(gaps))
            if "batch_shared" in settings.phases and name.startswith("widellm") and budget < 1.0:
                first, gaps = workers[name].call("decode", prompts, mask, budget, True)
                times.batch_shared_first.append(first)
                times.batch_shared.append(statistics.median(gaps))
    progress(total, total)
    return found


def left_padded(ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths cut from ids [1, T]: (ids [B, longest], mask [B, longest]), padded on the left."""
    prompts = torch.zeros(len(lengths), max(lengths), dtype=ids.dtype)
    mask = torch.zeros_like(prompts)
    for row, length in enumerate(lengths):
        prompts[row, -length:] = ids[0, :length]
        mask[row, -length:] = 1
    return prompts, mask


def _rows(
    label: str, times: dict[tuple[str, float], _Times], memory: dict[str, float], settings: ModelSettings
) -> list[ModelRow]:
    rows = []
    for phase in settings.phases:
        for (name, budget), t in times.items():
            seconds: list[float] = getattr(t, phase)
            if not seconds:
                continue
            batch = len(BATCH_LENGTHS)
            median, tokens = statistics.median(seconds), {"prefill": settings.prompt, "batch": batch}
            tokens["batch_shared"] = batch
            first = {"decode": t.first, "batch": t.batch_first, "batch_shared": t.batch_shared_first}.get(phase)
            rows.append(
                ModelRow(
                    model=label,
                    phase=phase,
                    budget=budget,
                    engine=name,
                    tokens_per_s=tokens.get(phase, 1) / median,
                    spread=max(seconds) / min(seconds),
                    peak_memory_gb=memory[name],
                    first_token_ms=None if first is None else statistics.median(first) * 1e3,
                    token_ms=None if phase == "prefill" else median * 1e3,
                )
            )
    return rows

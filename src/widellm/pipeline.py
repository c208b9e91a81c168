"""The main job from end to end: dense model in, routed directory and honest figures out. No printing here."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.bench.speed import Speed, measure
from widellm.calibrate.calibration import Calibration, Settings, calibrate
from widellm.config import check_budget
from widellm.errors import TextError, WidellmError
from widellm.evaluation.perplexity import Comparison, Perplexity, compare_with_dense, perplexity
from widellm.files import atomic_write_text, check_new_directory
from widellm.modeling.attach import is_attached, set_budget, width_of
from widellm.modeling.card import model_card
from widellm.modeling.checkpoint import CARD_FILE, load, load_any, read_width, save
from widellm.progress import Progress, no_progress
from widellm.provenance import versions
from widellm.sources.models import load_dense, place
from widellm.sources.texts import (
    check_window,
    context_of,
    read_text,
    read_texts,
    sample_texts,
    split_windows,
    token_windows,
    whole_text_windows,
    window_record,
)

MISS_TOLERANCE = 0.02
"""How far the realised share of routable work may be from the budget before saving needs `force`."""


@dataclass(frozen=True)
class PruneResult:
    """What `prune` did: everything its table and JSON show."""

    model: str
    comparison: Comparison
    dense_speed: Speed
    routed_speed: Speed
    calibration: Calibration
    text: dict[str, Any]
    saved_to: str | None
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The stable keys that docs/json.md lists."""
        both = self.comparison
        return {
            "model": self.model,
            "dense": {"perplexity": both.dense_perplexity, **_speed_json(self.dense_speed)},
            "routed": {
                "perplexity": both.routed_perplexity,
                "kl_to_dense": both.kl_to_dense,
                "top1_agreement": both.top1_agreement,
                **_speed_json(self.routed_speed),
            },
            "work": dataclasses.asdict(both.work),
            "calibration": {
                "seconds": self.calibration.seconds,
                "peak_memory_gb": self.calibration.peak_memory_gb,
                "tokens": self.calibration.tokens,
            },
            "evaluation": {
                "metric": "token perplexity",
                "windows": both.windows,
                "window": both.window,
                "tokens": both.tokens,
            },
            "text": self.text,
            "saved_to": self.saved_to,
            "warnings": list(self.warnings),
            "versions": versions(),
        }


def _speed_json(speed: Speed) -> dict[str, float]:
    return {
        "prefill_tokens_per_s": speed.prefill_tokens_per_s,
        "prefill_spread": speed.prefill_spread,
        "decode_tokens_per_s": speed.decode_tokens_per_s,
        "decode_spread": speed.decode_spread,
    }


def prune(
    model_name: str,
    out: str | Path | None,
    budget: float,
    text: str = "python-docs",
    tokens: int = 32768,
    window: int = 1024,
    held_out_windows: int = 6,
    settings: Settings | None = None,
    dtype: Any = "auto",
    force: bool = False,
    overwrite: bool = False,
    column: str = "text",
    device: str = "cpu",
    progress: Progress = no_progress,
) -> PruneResult:
    """Calibrate `model_name` on text, measure it against itself dense, and save it to `out` (None: do not save).

    budget: share of routable work that may be spent, in (0, 1]. text: see `sources.texts.read_texts`, or "self".
    tokens: calibration tokens; `held_out_windows` more windows of the same text, never calibrated on, are evaluated.
    device: see `sources.models.place`.

    Raises WidellmError for anything a user can mend; nothing is left at `out` then.
    """
    budget = check_budget(budget)
    settings = Settings() if settings is None else settings
    if tokens < window:
        raise TextError(f"--tokens {tokens} is less than one window of {window}: ask for more, or a smaller --window")
    if out is not None:
        check_new_directory(out, overwrite=overwrite)
    progress("loading", 0, 1)
    dense = load_dense(model_name, dtype=dtype)
    progress("loading", 1, 1)
    model, tokenizer = place(dense.model, device), dense.tokenizer
    check_window(model, window)
    wanted = (math.ceil(tokens / window) + held_out_windows) * window
    texts: Iterable[str]
    if text == "self":
        texts = sample_texts(model, tokenizer, wanted, settings.seed, lambda d, t: progress("sampling text", d, t))
    else:
        texts = read_texts(text, column=column, seed=settings.seed)
    progress("tokenising", 0, 1)
    windows = token_windows(tokenizer, texts, wanted, window)
    progress("tokenising", 1, 1)
    used, held_out = split_windows(windows, held_out_windows)
    source = window_record(used, text, settings.seed)
    calibration = calibrate(model, used, settings, name=dense.source, text=source, budget=budget, progress=progress)
    set_budget(model, budget)
    comparison = compare_with_dense(model, held_out, lambda d, t: progress("held-out text", d, t))
    warnings = _verdict(comparison, budget, force)
    record_results(model, [_result_row(comparison, f"held-out part of {text}")])
    progress("speed", 0, 1)
    prompt = held_out.reshape(1, -1)[:, : min(1024, context_of(model) or 1024)]  # learned positions end there
    dense_speed, routed_speed = measure(model, prompt, [1.0, budget])
    progress("speed", 1, 1)
    if out is not None:
        save(model, out, tokenizer, overwrite=overwrite)
    saved_to = None if out is None else str(out)
    return PruneResult(dense.source, comparison, dense_speed, routed_speed, calibration, source, saved_to, warnings)


def _verdict(comparison: Comparison, budget: float, force: bool) -> tuple[str, ...]:
    """Warnings about a result; WidellmError about one that should not be saved, unless `force`."""
    problems = []
    if not math.isfinite(comparison.routed_perplexity):
        problems.append(f"the routed model's perplexity is {comparison.routed_perplexity}")
    spent = 1.0 - comparison.work.saved_routable
    if abs(spent - budget) > MISS_TOLERANCE:
        problems.append(
            f"it spends {spent:.3f} of the routable work on held-out text, not {budget:.3f} +- {MISS_TOLERANCE}"
        )
    if problems and not force:
        raise WidellmError(f"not saved: {'; '.join(problems)}: calibrate on more or closer text, or pass --force")
    ratio = comparison.routed_perplexity / comparison.dense_perplexity
    if ratio > 2.0:
        problems.append(f"perplexity is {ratio:.1f}x the dense model's: raise the budget or train the routers")
    return tuple(problems)


def _result_row(comparison: Comparison, text: str) -> dict[str, Any]:
    """What the model card says of one budget."""
    return {
        **dataclasses.asdict(comparison.work),
        "perplexity": comparison.routed_perplexity,
        "dense_perplexity": comparison.dense_perplexity,
        "text": text,
        "windows": comparison.windows,
        "window": comparison.window,
    }


def record_results(model: Any, rows: list[dict[str, Any]]) -> None:
    """Keep what was measured of a routed model in its provenance, for its card; replaces what was there."""
    width = width_of(model)
    width.config = width.config.replace(provenance={**width.config.provenance, "results": rows})


def measure_card(
    directory: str | Path,
    text: str,
    budgets: Sequence[float],
    window: int = 1024,
    max_windows: int | None = None,
    dtype: Any = "auto",
    column: str = "text",
    base: str | None = None,
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Measure a routed directory at `budgets` on a text, and write the rows into its width_config.json and card.

    Returns the rows; nothing is written when something fails. Raises as `evaluate` does.
    """
    folder = Path(directory)
    model, tokenizer = load(folder, dtype=dtype, base=base)
    check_window(model, window)
    windows = whole_text_windows(tokenizer, read_text(text, column=column), window, max_windows)
    rows = []
    for budget in budgets:
        set_budget(model, budget)
        step = f"budget {budget:g}"
        found = compare_with_dense(model, windows, functools.partial(progress, step))
        rows.append(_result_row(found, Path(text).name))
    record_results(model, rows)
    config = dataclasses.replace(read_width(folder).config, provenance=width_of(model).config.provenance)
    atomic_write_text(folder / "width_config.json", config.to_json())
    atomic_write_text(folder / CARD_FILE, model_card(config, width_of(model).dial))
    return rows


@dataclass(frozen=True)
class EvalResult:
    """What `evaluate` found."""

    model: str
    text: str
    result: Perplexity
    config: str | None
    """Digest of the routed model's configuration, None for a dense one."""

    def to_json(self) -> dict[str, Any]:
        """The stable keys that docs/json.md lists."""
        work = None if self.result.work is None else dataclasses.asdict(self.result.work)
        return {
            "model": self.model,
            "config": self.config,
            "metric": "token perplexity",
            "perplexity": self.result.perplexity,
            "windows": self.result.windows,
            "window": self.result.window,
            "tokens": self.result.tokens,
            "work": work,
            "text": self.text,
            "versions": versions(),
        }


def evaluate(
    name: str,
    text: str,
    window: int = 1024,
    max_windows: int | None = None,
    budget: float | None = None,
    dtype: Any = "auto",
    column: str = "text",
    base: str | None = None,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> EvalResult:
    """Token perplexity of a routed directory or a dense model on a whole text, in windows of `window` tokens."""
    progress("loading", 0, 1)
    model, tokenizer = load_any(name, budget, dtype, base)
    place(model, device)
    progress("loading", 1, 1)
    check_window(model, window)
    windows = whole_text_windows(tokenizer, read_text(text, column=column), window, max_windows)
    result = perplexity(model, windows, lambda d, t: progress("evaluating", d, t))
    return EvalResult(name, text, result, width_of(model).config.digest() if is_attached(model) else None)


@torch.inference_mode()
def generate(
    model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, sample: bool = False, method: Any = None
) -> str:
    """Continue `prompt`; returns prompt and continuation. Greedy unless `sample`. method: a `Speculative`, or None."""
    if not prompt.strip():
        raise TextError("the prompt is empty: give some text to continue")
    encoded = tokenizer(prompt, return_tensors="pt")
    ids: Tensor = model.generate(
        **encoded.to(model.device),
        max_new_tokens=max_new_tokens,
        do_sample=sample,
        custom_generate=method,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))

"""Run a routed model on a text and count: everything a report shows, as plain data that JSON can hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.config import check_budget
from widellm.errors import ConfigError, TextError
from widellm.modeling.attach import Width, get_budget, set_budget, width_of
from widellm.modeling.checkpoint import load
from widellm.progress import Progress, no_progress
from widellm.provenance import versions
from widellm.report import budgets, masks
from widellm.report.extras import read_bench, read_compare
from widellm.report.findings import findings
from widellm.report.tokens import KINDS_OF_TOKEN, Tokens, tokenise
from widellm.routing.budget import WorkCounter, routable_share
from widellm.sources.texts import PYTHON_DOCS, context_of, read_text, read_texts, token_windows

FORMAT = 1
MAX_TOKENS = 1024
"""Tokens of a given text that are shown unless more are asked for."""
DEFAULT_TOKENS = 512
"""Tokens of Python's documentation that are shown when no text is given."""
CURVE_TOKENS = 1024
CURVE_WINDOW = 256
_CALIBRATION_TOKENS = 32768
_LOOK = 1_000_000
"""Characters of a text that are tokenised at most."""
_POSITIONS = (0, 1, 4, 16, 64, 256, 1024, 4096)


def collect(
    path: str | Path,
    text: str | None = None,
    budget: float | None = None,
    tokens: int | None = None,
    bench: str | Path | None = None,
    compare: str | Path | None = None,
    column: str = "text",
    dtype: Any = "auto",
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """The report on the routed directory `path`, as the data that docs/report.md describes.

    text: a source of `sources.texts.read_texts`; None: Python's documentation, the part the routers were not
    calibrated on. budget: None takes the model's own. tokens: how many are shown; a longer text is cut, which the
    data says. bench, compare: see `extras`.

    Raises WidellmError (one line) for an empty or too short text, `tokens` above the model's context, files of another
    model, and whatever `load` refuses.
    """
    path = Path(path)
    if budget is not None:
        check_budget(budget)
    progress("loading", 0, 1)
    model, tokenizer = load(path, budget=budget, dtype=dtype)
    progress("loading", 1, 1)
    width = width_of(model)
    base = width.config.base.get("name", "")
    name = base or path.resolve().name
    names = {n for n in (base, str(path), path.resolve().name, width.config.base.get("fingerprint", "")) if n}
    bench_rows = None if bench is None else read_bench(bench, names)
    compare_rows = None if compare is None else read_compare(compare, names)

    context = context_of(model) or MAX_TOKENS
    if tokens is not None and tokens > context:
        raise ConfigError(f"--tokens {tokens} is more than the model's context of {context}: ask for fewer")
    shown = min(tokens or (DEFAULT_TOKENS if text is None else MAX_TOKENS), context)
    if tokens is not None and tokens < 2:
        raise ConfigError(f"--tokens must be at least 2, got {tokens}")
    wanted = max(shown, CURVE_TOKENS)
    if text is None:
        source, held_out = PYTHON_DOCS, _is_held_out(width)
        words = _held_out_text(width, tokenizer, wanted)
    else:
        source, held_out = text, None
        words = read_text(text, column=column)
    whole = tokenise(tokenizer, words[:_LOOK], wanted)
    data = describe(model, whole, shown, name, progress)
    data["model"]["directory"] = path.name
    data["text"] = {
        "source": source,
        "held_out": held_out,
        "tokens": len(data["tokens"]["ids"]),
        "total_tokens": whole.total,
        "total_is_exact": len(words) <= _LOOK,
        "notice": None,
    }
    if text is not None and whole.total > shown:
        more = "" if len(words) <= _LOOK else "more than "
        data["text"]["notice"] = (
            f"The text has {more}{whole.total:,} tokens; the first {shown:,} are shown, "
            f"and the budgets are measured on the first {data['curve']['windows'] * data['curve']['window']:,}."
        )
    data["bench"], data["compare"] = bench_rows, compare_rows
    data["findings"] = findings(data)
    data["versions"] = versions()
    return data


def describe(
    model: Any, whole: Tokens, shown: int, name: str = "model", progress: Progress = no_progress
) -> dict[str, Any]:
    """What can be counted on a routed model at its present budget: `collect` without files around it.

    The first `shown` tokens of `whole` are counted one by one; the curve takes up to CURVE_TOKENS of it.
    """
    width = width_of(model)
    budget = get_budget(model)
    ids = torch.tensor(whole.ids[:shown], dtype=torch.long)
    progress("who computes what", 0, 1)
    kept = masks.run(model, ids)
    progress("who computes what", 1, 1)
    counter = _counted(width, kept)
    shares, by_kind = masks.token_shares(width, kept), masks.kind_shares(width, kept)
    layers = [masks.layer(sub, mask) for sub, mask in zip(width.sublayers, kept, strict=True)]
    dead = masks.dead_weights(width, layers)
    windows = _windows(whole.ids[:CURVE_TOKENS], model)
    curve = budgets.measure(
        model, windows, budgets.choose_budgets(model, budget), lambda d, t: progress("budgets", d, t)
    )
    set_budget(model, budget)
    groups = {sub.kind: sub for sub in width.sublayers}
    kinds = whole.kinds[: len(ids)]
    return {
        "format": FORMAT,
        "model": {
            "name": name,
            "type": width.config.model_type,
            "fingerprint": width.config.base.get("fingerprint", ""),
            "layers": len(width.layout.layers),
            "groups": {kind: groups[kind].groups for kind in groups},
            "group_size": {kind: groups[kind].group_size for kind in groups},
            "group_weights": {kind: groups[kind].group_cost for kind in groups},
            "routable_weights": masks.routable_weights(width),
            "routable_share": routable_share(width.layout, width.config.kinds),
        },
        "work": dataclasses.asdict(counter.work(budget)),
        "spread": {
            "least": float(shares.min()),
            "p10": float(shares.quantile(0.1)),
            "median": float(shares.quantile(0.5)),
            "p90": float(shares.quantile(0.9)),
            "most": float(shares.max()),
        },
        "tokens": {
            "ids": ids.tolist(),
            "text": whole.pieces[: len(ids)],
            "kind": kinds,
            "share": [round(float(s), 6) for s in shares],
            **{kind: masks.token_counts(width, kept, kind) for kind in groups},
        },
        "kinds": [
            {"kind": kind, **_means(shares, by_kind, [i for i, k in enumerate(kinds) if k == kind])}
            for kind in KINDS_OF_TOKEN
            if kind in kinds
        ],
        "positions": [
            {"first": a, "last": min(b, len(ids)) - 1, **_means(shares, by_kind, list(range(a, min(b, len(ids)))))}
            for a, b in zip(_POSITIONS, (*_POSITIONS[1:], context_end(len(ids))), strict=True)
            if a < len(ids)
        ],
        "layers": [dataclasses.asdict(found) for found in layers],
        "shared": [dataclasses.asdict(found) for found in masks.shared(width, kept)],
        "dead": {
            "groups": sum(found.never for found in layers),
            "weights": dead,
            "share": dead / masks.routable_weights(width),
        },
        "curve": dataclasses.asdict(curve),
        "bench": None,
        "compare": None,
    }


def context_end(tokens: int) -> int:
    """The end of the last range of positions: past all of them."""
    return max(tokens, _POSITIONS[-1] + 1)


def _counted(width: Width, kept: list[Tensor]) -> WorkCounter:
    counter = width.counter()
    counter.kept = torch.tensor([float(mask.sum()) for mask in kept], dtype=torch.float64)
    counter.tokens = len(kept[0])
    return counter


def _means(shares: Tensor, by_kind: dict[str, Tensor], places: list[int]) -> dict[str, Any]:
    return {
        "tokens": len(places),
        "share": float(shares[places].mean()),
        **{kind: float(by_kind[kind][places].mean()) for kind in by_kind},
    }


def _windows(ids: list[int], model: Any) -> Tensor:
    """ids in windows of CURVE_WINDOW (or the model's context, or the text, where shorter); the rest is dropped."""
    context = context_of(model) or CURVE_WINDOW
    window = min(CURVE_WINDOW, context, len(ids))
    count = len(ids) // window
    return torch.tensor(ids[: count * window], dtype=torch.long).view(count, window)


def _is_held_out(width: Width) -> bool | None:
    """Whether the default text is unseen by the routers; None where the checkpoint does not say what they saw."""
    record = width.config.provenance.get("text") or {}
    return True if record.get("source") else None


def _held_out_text(width: Width, tokenizer: Any, tokens: int) -> str:
    """Python's documentation from where calibration stopped, in the order that calibration read it."""
    record = width.config.provenance.get("text") or {}
    seed, skip = 0, _CALIBRATION_TOKENS
    if record.get("source") == PYTHON_DOCS:
        seed, skip = record.get("seed") or 0, int(record["windows"][1]) * int(record["window"])
    elif record.get("source"):
        skip = 0
    try:
        ids = token_windows(tokenizer, read_texts(PYTHON_DOCS, seed=seed), tokens, tokens, skip=skip)[0]
    except TextError as error:
        raise TextError(f"no part of {PYTHON_DOCS} is left that the routers did not see: give --text FILE") from error
    return str(tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)).lstrip()

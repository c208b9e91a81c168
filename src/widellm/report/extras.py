"""Rows measured elsewhere that a report can show: speeds (`widellm bench --json`) and recipes, checked on reading."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Any

from widellm.errors import WidellmError
from widellm.files import one_line

_MAX_BYTES = 20_000_000


def read_bench(path: str | Path, names: Collection[str]) -> list[dict[str, Any]]:
    """Model rows of a bench file about one of `names`: phase, engine, budget (1.0 where there is none), tokens_per_s.

    Rows of `kind` "op" are left out. Raises WidellmError when the file cannot be read, a row lacks a field or holds
    nonsense, or every model row is about another model.
    """
    rows = [(i, row) for i, row in enumerate(_rows(path)) if row.get("kind", "model") == "model"]
    if not rows:
        raise WidellmError(f'{path} has no row with kind "model": make it with widellm bench --model DIR --json FILE')
    found = []
    for i, row in _of_model(path, rows, names):
        where = f"{path} row {i}"
        budget = row.get("budget")
        found.append(
            {
                "phase": _text(row, "phase", where),
                "engine": _text(row, "engine", where),
                "budget": 1.0 if budget is None else _number(budget, "budget", where, low=0.0, high=1.0),
                "tokens_per_s": _number(row.get("tokens_per_s"), "tokens_per_s", where, low=0.0),
            }
        )
    return sorted(found, key=lambda r: (r["phase"], r["engine"], r["budget"]))


def read_compare(path: str | Path, names: Collection[str]) -> list[dict[str, Any]]:
    """Rows of a file of recipes: recipe, budget, perplexity (mean), std (None where one run was made).

    A row's perplexity is a number, `perplexity_mean` and `perplexity_std`, or {"mean": ..., "std": ...}; its `model`
    may be missing. Rows of one recipe and budget (a seed each, as `widellm compare` writes) become one.

    Raises WidellmError as `read_bench` does.
    """
    rows = list(enumerate(_rows(path)))
    if not rows:
        raise WidellmError(f"{path} has no rows: expected a list of objects with recipe, budget and perplexity")
    if any("model" in row for _, row in rows):
        rows = _of_model(path, rows, names)
    found: list[dict[str, Any]] = []
    for i, row in rows:
        where = f"{path} row {i}"
        value: Any = row.get("perplexity", row.get("perplexity_mean"))
        std = row.get("perplexity_std", row.get("std"))
        if isinstance(value, dict):
            value, std = value.get("mean"), value.get("std", std)
        found.append(
            {
                "recipe": _text(row, "recipe", where),
                "budget": _number(row.get("budget"), "budget", where, low=0.0, high=1.0),
                "perplexity": _number(value, "perplexity", where, low=0.0),
                "std": None if std is None else _number(std, "std", where, low=-1e-12),
            }
        )
    seeds: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in found:
        seeds.setdefault((row["recipe"], row["budget"]), []).append(row)
    return [rows[0] if len(rows) == 1 else _over_seeds(rows) for _, rows in sorted(seeds.items())]


def _over_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    values = [row["perplexity"] for row in rows]
    return {**rows[0], "perplexity": statistics.mean(values), "std": statistics.stdev(values)}


def _rows(path: str | Path) -> list[dict[str, Any]]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise WidellmError(f"{path} cannot be read ({one_line(error)})") from None
    if len(data) > _MAX_BYTES:
        raise WidellmError(f"{path} has {len(data)} bytes, more than any table of results: is it the right file?")
    try:
        rows = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise WidellmError(f"{path} is not valid JSON ({one_line(error)})") from None
    if isinstance(rows, dict):
        rows = rows.get("rows", rows.get("results"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WidellmError(f"{path} holds no list of objects: give a file that widellm wrote with --json")
    return rows


def _of_model(
    path: str | Path, rows: list[tuple[int, dict[str, Any]]], names: Collection[str]
) -> list[tuple[int, dict[str, Any]]]:
    """The rows whose `model` is one of `names`; a path counts by its last part too, and case does not matter."""
    known = {form for name in names for form in _forms(name)}
    kept = [(i, row) for i, row in rows if known & _forms(str(row.get("model", "")))]
    if not kept:
        others = sorted({one_line(ValueError(str(row.get("model"))), 40) for _, row in rows})
        raise WidellmError(
            f"{path} is of another model ({', '.join(others[:3])}), this one is {' or '.join(sorted(set(names)))}"
        )
    return kept


def _forms(name: str) -> set[str]:
    name = name.strip().lower().rstrip("/")
    return {name, name.replace("\\", "/").rpartition("/")[2]} - {""}


def _text(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise WidellmError(f"{where}: {field} must be a name, got {one_line(ValueError(repr(value)), 40)}")
    return value[:80]


def _number(value: Any, field: str, where: str, low: float, high: float = math.inf) -> float:
    """`value` as a float in (low, high]."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low < value <= high:
        limits = f"above {low:g}" if high == math.inf else f"in ({low:g}, {high:g}]"
        raise WidellmError(f"{where}: {field} must be a number {limits}, got {one_line(ValueError(repr(value)), 40)}")
    return float(value)

"""Recipes against each other on one model: equal tokens, seeds and budgets; JSON, a Markdown table and a figure."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from widellm.config import check_budget
from widellm.errors import ConfigError
from widellm.evaluation.perplexity import perplexity
from widellm.files import atomic_write_json, atomic_write_text
from widellm.modeling.attach import set_budget
from widellm.modeling.checkpoint import load
from widellm.optional import require
from widellm.progress import Progress, no_progress
from widellm.provenance import versions
from widellm.sources.models import place
from widellm.sources.texts import context_of, read_text, whole_text_windows
from widellm.training.run import train
from widellm.training.settings import Settings, read_config

EVAL_WINDOW = 1024
"""Tokens in a window of the evaluation, where the model's context has as many."""
SECOND_ORDER = 1000
"""Added to the seed of stage 1, where there are two."""
Timer = Callable[[Any, Tensor, Sequence[float]], Sequence[Any]]
"""`bench.speed.measure`: (model, prompt [1, T], budgets) -> one object with the two speeds for each."""


@dataclass(frozen=True)
class Plan:
    """What is compared, and on what."""

    recipes: tuple[str, ...]
    texts: tuple[str, ...]
    eval_text: str
    tokens: int = 100_000
    window: int = 512
    batch_tokens: int = 1024
    """Of every recipe: at few tokens the published 65,536 would be a step or two."""
    seeds: int = 3
    budgets: tuple[float, ...] = (0.9, 0.75, 0.6, 0.5, 0.4)
    max_windows: int | None = None
    """Of `eval_text`, EVAL_WINDOW tokens each; None: all."""
    config: Path | None = None
    column: str = "text"
    device: str = "cpu"
    """Of the evaluation; training takes the accelerator where there is one."""

    def __post_init__(self) -> None:
        for budget in self.budgets:
            check_budget(budget)
        if self.seeds < 1 or not self.recipes or not self.budgets:
            raise ConfigError("a comparison needs at least one recipe, seed and budget")
        for name in self.recipes:  # a name that is wrong is said before hours of training
            read_config(name, self.config)


def run(
    directory: str, out: str | Path, plan: Plan, progress: Progress = no_progress, timer: Timer | None = None
) -> str:
    """Train, evaluate and (with a timer) time what `out` does not hold yet; return the table.

    `out` gets results.json, results.md and results.png. Every recipe starts from `directory`. The same stages and
    tokens whatever the recipe: `first_share` of them train routers, the rest recover. Raises ConfigError when `out` is
    of another plan: only recipes and seeds can be added.
    """
    out = Path(out)
    rows = _read(out, directory, plan)
    for name, seed in [("start", 0), *((name, seed) for seed in range(plan.seeds) for name in plan.recipes)]:
        folder = Path(directory) if name == "start" else out / f"{name}-{seed}"
        here = [r for r in rows if (r["recipe"], r["seed"]) == (name, seed)]
        untimed = timer is not None and not all("prefill_tokens_per_s" in r for r in here)
        if here and not untimed:
            continue
        if not here and not folder.exists():
            _train(directory, folder, plan, name, seed, progress)
        model, windows = _loaded(folder, plan)
        if not here:
            here = evaluate(model, windows, plan, name, seed, progress)
            rows += here
        if timer is not None:
            for row, speed in zip(here, timer(model, windows[:1], [r["budget"] for r in here]), strict=True):
                row["prefill_tokens_per_s"] = speed.prefill_tokens_per_s
                row["decode_tokens_per_s"] = speed.decode_tokens_per_s
        out.mkdir(parents=True, exist_ok=True)
        _write(out, directory, plan, rows)
    return table(rows, plan)


def _train(directory: str, out: Path, plan: Plan, name: str, seed: int, progress: Progress) -> None:
    recipe, trainer = read_config(name, plan.config)
    recipe = recipe.replace(
        routers=dataclasses.replace(recipe.routers, batch_tokens=plan.batch_tokens),
        recover=dataclasses.replace(recipe.recover, batch_tokens=plan.batch_tokens),
    )
    first = int(plan.tokens * recipe.first_share)
    settings = Settings(
        recipe,
        "recover",
        plan.tokens - first,
        plan.texts,
        plan.column,
        plan.window,
        micro_batch=max(1, min(2, plan.batch_tokens // plan.window)),
        seed=seed,
        trainer=trainer,
    )
    if first:
        between = out.with_name(f"{out.name}.routers")
        if not between.exists():
            # another order, so that stage 2 does not read the same documents again
            stage = dataclasses.replace(settings, stage="routers", tokens=first, seed=seed + SECOND_ORDER)
            train(directory, between, stage, resume=_unfinished(between), progress=progress)
        directory = str(between)
    train(directory, out, settings, resume=_unfinished(out), progress=progress)


def _unfinished(out: Path) -> bool:
    return any(Path(f"{out}.run").glob("checkpoint-*/manifest.json"))


def _loaded(directory: str | Path, plan: Plan) -> tuple[Any, Tensor]:
    """(model, windows to evaluate on)."""
    model, tokenizer = load(directory, budget=1.0)
    length = min(EVAL_WINDOW, context_of(model) or EVAL_WINDOW)
    windows = whole_text_windows(tokenizer, read_text(plan.eval_text, plan.column), length, plan.max_windows)
    return place(model, plan.device), windows


def evaluate(
    model: Any, windows: Tensor, plan: Plan, recipe: str, seed: int, progress: Progress = no_progress
) -> list[dict[str, Any]]:
    """One row per budget (and one for 1.0): token perplexity and shares of work saved."""
    budgets = [1.0, *plan.budgets]
    rows = []
    for number, budget in enumerate(budgets):
        set_budget(model, budget)
        found = perplexity(model, windows)
        assert found.work is not None
        rows.append(
            {
                "recipe": recipe,
                "seed": seed,
                "budget": budget,
                "perplexity": found.perplexity,
                "windows": found.windows,
                "window": found.window,
                **{k: v for k, v in dataclasses.asdict(found.work).items() if k != "budget"},
            }
        )
        progress(f"evaluating {recipe}", number + 1, len(budgets))
    return rows


def table(rows: Sequence[dict[str, Any]], plan: Plan) -> str:
    """Markdown: recipes down, budgets across; perplexity as mean +- standard deviation over seeds, and work saved."""
    dense = statistics.mean(r["perplexity"] for r in rows if r["budget"] == 1.0 and r["recipe"] == "start")
    head = ["recipe", "seeds", *(f"budget {b:g}" for b in plan.budgets)]
    lines = [" | ".join(["", *head, ""]).strip(), " | ".join(["", *["---"] * len(head), ""]).strip()]
    for name in dict.fromkeys(r["recipe"] for r in rows):
        of_recipe = [r for r in rows if r["recipe"] == name]
        cells = [name, str(len({r["seed"] for r in of_recipe}))]
        for budget in plan.budgets:
            here = [r for r in of_recipe if r["budget"] == budget]
            mean, spread = mean_and_spread([r["perplexity"] for r in here])
            saved = statistics.mean(r["saved_routable"] for r in here)
            around = f" ± {spread:.2g}" if len(here) > 1 else ""
            cells.append(f"{mean:.1f}{around} ({mean / dense:.2f}x, {saved:.1%} saved)")
        lines.append(" | ".join(["", *cells, ""]).strip())
    note = (
        f"Token perplexity, {rows[0]['windows']} windows of {rows[0]['window']} of {Path(plan.eval_text).name}; "
        f"dense {dense:.2f}; {plan.tokens} training tokens each, batches of {plan.batch_tokens}."
    )
    return "\n".join([*lines, "", note])


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1); 0 for one value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _read(out: Path, directory: str, plan: Plan) -> list[dict[str, Any]]:
    """Rows that are there; ConfigError unless they are of this plan, recipes and seeds aside."""
    path = out / "results.json"
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    wanted = _described(directory, plan)
    odd = [k for k in wanted if k not in _MAY_DIFFER and found["plan"].get(k) != wanted[k]]
    if odd:
        raise ConfigError(
            f"{out} was made with {odd[0]} {found['plan'].get(odd[0])!r}, not {wanted[odd[0]]!r}: "
            f"compare as before, or into another directory"
        )
    rows: list[dict[str, Any]] = found["rows"]
    return rows


_MAY_DIFFER = ("recipes", "seeds", "device")


def _described(directory: str, plan: Plan) -> dict[str, Any]:
    """A plan as JSON, the settings in its file included."""
    described = dataclasses.asdict(plan)
    described["config"] = None if plan.config is None else json.loads(plan.config.read_text(encoding="utf-8"))
    found: dict[str, Any] = json.loads(json.dumps({"start": directory, **described}))
    return found


def _write(out: Path, directory: str, plan: Plan, rows: list[dict[str, Any]]) -> None:
    described = _described(directory, plan)
    atomic_write_json(out / "results.json", {"plan": described, "rows": rows, "versions": versions()})
    atomic_write_text(out / "results.md", table(rows, plan) + "\n")
    figure(rows, out / "results.png")


def figure(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Perplexity against work saved, and against prefill time per token where it was measured; bars over seeds."""
    figures = require("matplotlib.figure", "bench", "the comparison's figure")
    axes_of = [("saved_routable", "routable work saved", lambda r: r["saved_routable"])]
    if all("prefill_tokens_per_s" in r for r in rows):
        axes_of.append(("time", "prefill, ms per token", lambda r: 1000.0 / r["prefill_tokens_per_s"]))
    drawn = figures.Figure(figsize=(6 * len(axes_of), 4.2), layout="constrained")
    for number, (_, label, x_of) in enumerate(axes_of):
        axes = drawn.add_subplot(1, len(axes_of), number + 1)
        for name in dict.fromkeys(r["recipe"] for r in rows):
            points = []
            for budget in sorted({r["budget"] for r in rows}):
                here = [r for r in rows if r["recipe"] == name and r["budget"] == budget]
                if here:
                    mean, spread = mean_and_spread([r["perplexity"] for r in here])
                    points.append((statistics.mean(x_of(r) for r in here), mean, spread))
            x, y, error = zip(*sorted(points), strict=True)
            axes.errorbar(x, y, yerr=error, marker="o", capsize=3, label=name)
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("token perplexity")
        axes.grid(True, alpha=0.3)
        axes.legend()
    temporary = path.with_suffix(".tmp.png")
    drawn.savefig(temporary, dpi=130)
    temporary.replace(path)

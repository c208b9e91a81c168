"""What training reaches: one recipe from one calibrated directory, then perplexity against work saved, as JSON.

    python benchmarks/training.py DIR --name default --text c4.jsonl --text wikipedia.jsonl \\
        --test wikitext2_raw/wiki.test.raw --results results.jsonl
    python benchmarks/training.py --results results.jsonl          # only print the table
    python benchmarks/training.py --memory [--layers 4]            # memory of routers-only training on 1B shapes

A run appends its row to `--results`; a name that is there already is not run again. A recipe with two stages gives
stage 1 its share of the tokens. Budgets in the columns are those asked for; the last two columns are found by search:
25 % and 50 % of the routable work saved on the test text itself. Token perplexity: the whole text tokenised at once,
non-overlapping windows of 1,024. `--batch-tokens` is for every recipe: 100,000 tokens are less than two of the
published method's steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from widellm.calibrate.calibration import peak_memory_gb
from widellm.evaluation.compare import SECOND_ORDER
from widellm.evaluation.perplexity import perplexity
from widellm.modeling.attach import set_budget, width_of
from widellm.modeling.checkpoint import load
from widellm.provenance import versions
from widellm.sources.texts import read_text, whole_text_windows
from widellm.training.run import Settings, checkpoint_activations, read_config, train

BUDGETS = (0.9, 0.75, 0.6, 0.5, 0.4)
SAVED = (0.25, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", help="calibrated directory")
    parser.add_argument("--name", help="of the row")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--config", type=Path, help="as for widellm train")
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--test", help="text to evaluate on")
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, required=False)
    parser.add_argument("--out", type=Path, help="directory of the trained model (default: beside the results)")
    parser.add_argument("--budget-range", type=float, nargs=2, help="replace the recipe's: a specialist has two equal")
    parser.add_argument("--no-train", action="store_true", help="evaluate DIR as it is")
    parser.add_argument("--only-saved", action="store_true", help="only the two points of equal work saved")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    if args.memory:
        memory(args.layers)
        return
    rows = read(args.results)
    if args.directory and not any(r["name"] == args.name for r in rows):
        row = run(args)
        with open(args.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
    show(rows)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, evaluate, describe."""
    recipe, trainer = read_config(args.recipe, args.config)
    stages = {s: dataclasses.replace(recipe.stage(s), batch_tokens=args.batch_tokens) for s in ("routers", "recover")}
    recipe = recipe.replace(**stages)
    if args.budget_range:
        recipe = recipe.replace(budgets=tuple(args.budget_range))
    first = int(args.tokens * recipe.first_share)
    common = {
        "recipe": recipe,
        "texts": tuple(args.text),
        "window": args.window,
        "micro_batch": args.micro_batch,
        "seed": args.seed,
        "trainer": trainer,
    }
    out = args.out or args.results.with_name(args.name)
    source, runs = args.directory, []
    if not args.no_train:
        for stage, tokens, target in (
            ("routers", first, out.with_name(f"{out.name}.routers")),
            ("recover", args.tokens - first, out),
        ):
            if tokens:
                if not target.exists():
                    again = any(Path(f"{target}.run").glob("checkpoint-*/manifest.json"))
                    # another order, so that stage 2 does not read the same documents again
                    chosen = {**common, "seed": args.seed + (SECOND_ORDER if stage == "routers" else 0)}
                    runs.append(train(source, target, Settings(stage=stage, tokens=tokens, **chosen), resume=again))
                source = str(target)
    model, tokenizer = load(source, budget=1.0)
    windows = whole_text_windows(tokenizer, read_text(args.test), 1024, args.windows)
    points = [] if args.only_saved else [at(model, windows, b) for b in (1.0, *BUDGETS)]
    found = {str(s): at(model, windows, budget_that_saves(model, windows, s)) for s in SAVED}
    return {
        "name": args.name,
        "recipe": recipe.name,
        "settings": dataclasses.asdict(recipe),
        "tokens": sum(r.tokens for r in runs),
        "window": args.window,
        "seconds": sum(r.seconds for r in runs),
        "tokens_per_s": [r.tokens_per_s for r in runs],
        "loss": [(r.loss_before, r.loss_after) for r in runs],
        "warnings": [w for r in runs for w in r.warnings],
        "windows": args.windows,
        "test": Path(args.test).name,
        "points": points,
        "saved": found,
        "versions": versions(),
    }


def at(model: Any, windows: Tensor, budget: float) -> dict[str, float]:
    """Perplexity and work at one budget."""
    set_budget(model, budget)
    found = perplexity(model, windows)
    assert found.work is not None
    return {"perplexity": found.perplexity, **dataclasses.asdict(found.work)}


def budget_that_saves(model: Any, windows: Tensor, saved: float) -> float:
    """The budget at which this share of the routable work is saved on a tenth of the windows (three secant steps)."""
    some = windows[:: max(1, len(windows) // 8)]
    dial = width_of(model).dial
    assert dial is not None
    low, high = float(dial.budgets[0]), 0.99
    budget = 1.0 - saved
    for _ in range(3):
        error = at(model, some, budget)["saved_routable"] - saved
        budget = min(max(budget + error, low), high)
    return budget


def show(rows: list[dict[str, Any]]) -> None:
    """All rows as a table: perplexity (work saved)."""
    table = Table()
    for column in ("", "tokens", "dense", *(f"{b:g}" for b in BUDGETS), *(f"{s:.0%} saved" for s in SAVED)):
        table.add_column(column, justify="right")
    for row in rows:
        points = {p["budget"]: p for p in row["points"]}
        cells = [row["name"], str(row["tokens"])]
        for budget in (1.0, *BUDGETS):
            p = points.get(budget)
            cells.append("" if p is None else f"{p['perplexity']:.1f} ({p['saved_routable']:.0%})")
        cells += [
            f"{row['saved'][str(s)]['perplexity']:.1f} ({row['saved'][str(s)]['saved_routable']:.1%})" for s in SAVED
        ]
        table.add_row(*cells)
    Console(width=200).print(table)


def memory(layers: int) -> None:
    """Routers-only training of Llama-3.2-1B shapes with random weights: peak resident memory and what it is made of."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from widellm.config import WidthConfig
    from widellm.modeling.attach import attach
    from widellm.training.objective import Objective
    from widellm.training.prices import GRID, Prices
    from widellm.training.recipes import recipe_of

    config = AutoConfig.for_model(
        "llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    width = attach(model, WidthConfig("llama", layers, 4, 128, 32))
    model.requires_grad_(False)
    for sub in width.sublayers:
        router = width.router(sub).requires_grad_(True)
        torch.nn.init.normal_(router.down, std=0.02)
        torch.nn.init.normal_(router.up)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    loaded = peak_memory_gb()
    optimiser = torch.optim.AdamW(trained, lr=1e-3)
    objective = Objective(model, recipe_of("default"), Prices.start([0.0] * len(GRID)))
    objective.install()
    for checkpointing in (True, False):
        if checkpointing:
            checkpoint_activations(model)
        else:
            model.gradient_checkpointing_disable()
        model.train()
        start = time.perf_counter()
        objective.train_loss(model, torch.randint(1000, (1, 512)), 0, 0).backward()
        optimiser.step()
        optimiser.zero_grad()
        print(
            f"{layers} layers, 512 tokens, activation checkpointing {checkpointing}: weights {weights:.2f} GB, routers "
            f"{sum(p.numel() for p in trained) / 1e6:.1f} M parameters, peak before the step {loaded:.2f} GB, "
            f"after {peak_memory_gb():.2f} GB, {time.perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""What trained directories reach at equal work, and what training needs of memory.

    python benchmarks/training.py DIR [DIR ...] --test wikitext2_raw/wiki.test.raw [--saved 0.25,0.5] [--json FILE]
    python benchmarks/training.py --memory [--layers 4]            # memory of routers-only training on 1B shapes

`widellm compare` trains recipes and evaluates them at the budgets asked for; what those spend differs a little from
model to model. Here the budget of each directory is searched, on every eighth of the test windows, so that all save
the same share of the routable work. Token perplexity: the whole text tokenised at once, non-overlapping windows of
1,024.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from widellm.calibrate.calibration import peak_memory_gb
from widellm.evaluation.perplexity import perplexity
from widellm.files import atomic_write_json
from widellm.modeling.attach import set_budget, width_of
from widellm.modeling.checkpoint import load
from widellm.provenance import versions
from widellm.sources.texts import read_text, whole_text_windows
from widellm.training.run import checkpoint_activations, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", help="routed directories")
    parser.add_argument("--test", help="text to evaluate on")
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--saved", default="0.25,0.5", help="shares of routable work saved, with commas between")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    if args.memory:
        memory(args.layers)
        return
    if not args.directories or not args.test:
        parser.error("give directories and --test, or --memory")
    shares = [float(s) for s in args.saved.split(",")]
    rows = [row for d in args.directories for row in equal_work(d, args.test, args.windows, shares)]
    if args.json:
        atomic_write_json(args.json, {"rows": rows, "versions": versions()})
    table = Table("directory", "perplexity", "x dense", "routable work saved", "budget asked")
    for r in rows:
        table.add_row(
            r["directory"], f"{r['perplexity']:.2f}", f"{r['perplexity'] / r['dense']:.2f}",
            f"{r['saved_routable']:.1%}", f"{r['budget']:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)


def equal_work(directory: str, test: str, count: int, shares: list[float]) -> list[dict[str, Any]]:
    """One row per share of routable work saved, and the dense perplexity in each."""
    model, tokenizer = load(directory, budget=1.0)
    windows = whole_text_windows(tokenizer, read_text(test), 1024, count)
    dense = at(model, windows, 1.0)["perplexity"]
    rows = []
    for saved in shares:
        found = at(model, windows, budget_that_saves(model, windows, saved))
        rows.append({"directory": directory, "windows": count, "dense": dense, **found})
    return rows


def at(model: Any, windows: Tensor, budget: float) -> dict[str, float]:
    """Perplexity and work at one budget."""
    set_budget(model, budget)
    found = perplexity(model, windows)
    assert found.work is not None
    return {"perplexity": found.perplexity, **dataclasses.asdict(found.work)}


def budget_that_saves(model: Any, windows: Tensor, saved: float) -> float:
    """The budget at which this share of the routable work is saved on an eighth of the windows (three secant steps)."""
    some = windows[:: max(1, len(windows) // 8)]
    dial = width_of(model).dial
    assert dial is not None
    low, high = float(dial.budgets[0]), 0.99
    budget = 1.0 - saved
    for _ in range(3):
        error = at(model, some, budget)["saved_routable"] - saved
        budget = min(max(budget + error, low), high)
    return budget


def memory(layers: int, tokens: int = 512) -> list[dict[str, float]]:
    """Routers-only training of Llama-3.2-1B shapes with random weights: weights, and peaks of resident memory, in GB.

    One row with and one without activation checkpointing, in this order: peaks never fall.
    """
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
    rows = []
    for checkpointing in (True, False):
        if checkpointing:
            checkpoint_activations(model)
        else:
            plain(model)
        model.train()
        start = time.perf_counter()
        objective.train_loss(model, torch.randint(1000, (1, tokens)), 0, 0).backward()
        optimiser.step()
        optimiser.zero_grad()
        print(
            f"{layers} layers, {tokens} tokens, activation checkpointing {checkpointing}: weights {weights:.2f} GB, "
            f"routers {sum(p.numel() for p in trained) / 1e6:.1f} M parameters, peak before the step {loaded:.2f} GB, "
            f"after {peak_memory_gb():.2f} GB, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        rows.append({"weights": weights, "before": loaded, "after": peak_memory_gb()})
    return rows


if __name__ == "__main__":
    main()

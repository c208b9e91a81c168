"""`widellm train` and `widellm compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from widellm.cli.options import Column, Device, JsonFile, Threads, numbers, set_threads, write_json

Texts = Annotated[
    list[str] | None, typer.Option("--text", help="FILE, DIR or data set id; repeat to take several in turn.")
]
Tokens = Annotated[int, typer.Option(help="Training tokens.")]
Window = Annotated[int, typer.Option(help="Tokens in a training sequence.")]
Config = Annotated[
    Path | None,
    typer.Option(help='JSON: {"recipe": {...}, "routers": {...}, "recover": {...}, "trainer": {...}} of settings.'),
]


def train(
    model: Annotated[str, typer.Argument(help="Routed directory (or a dense model, for a recipe that starts so).")],
    out: Annotated[Path, typer.Option(help="Directory to write; must not exist. Checkpoints go to OUT.run.")],
    stage: Annotated[str, typer.Option(help="routers (backbone frozen), or recover (adapters too).")] = "routers",
    recipe: Annotated[str, typer.Option(help="default, wide, skipgpt, layer-skip or static-width.")] = "default",
    text: Texts = None,
    tokens: Tokens = 100_000,
    window: Window = 512,
    micro_batch: Annotated[int, typer.Option(help="Sequences in one forward.")] = 2,
    budget: Annotated[float, typer.Option(help="What the saved model is set to.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of order, noise, budgets and starts.")] = 0,
    config: Config = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the text as needed, not packed first.")] = False,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Less memory, one more forward.")
    ] = False,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; default: 4 in a run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest good checkpoint.")] = False,
    column: Column = None,
    threads: Threads = None,
    json_file: JsonFile = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing directory.")] = False,
) -> None:
    """Train routers, or routers and adapters; adapters are folded in and the dial is measured anew."""
    from widellm.cli import show
    from widellm.sources.texts import column_of
    from widellm.training.run import train as run
    from widellm.training.settings import Settings, read_config

    set_threads(threads)
    chosen, trainer = read_config(recipe, config)
    texts = tuple(text or ("python-docs",))
    settings = Settings(
        recipe=chosen,
        stage=stage,
        tokens=tokens,
        texts=texts,
        column=column_of(column, *texts),
        window=window,
        micro_batch=micro_batch,
        seed=seed,
        budget=budget,
        streaming=streaming,
        activation_checkpointing=activation_checkpointing,
        save_every=save_every,
        trainer=trainer,
    )
    with show.progress() as progress:
        result = run(model, out, settings, resume=resume, overwrite=overwrite, progress=progress)
    show.train_table(result)
    write_json(json_file, result.to_json())


def compare(
    model: Annotated[str, typer.Argument(help="Calibrated directory that every recipe starts from.")],
    out: Annotated[Path, typer.Option(help="Directory for the models and results; what is there is not run again.")],
    eval_text: Annotated[str, typer.Option(help="Text that perplexity is measured on.")],
    recipe: Annotated[
        list[str] | None, typer.Option(help="Recipes; repeat. Default: default, wide, static-width.")
    ] = None,
    text: Texts = None,
    tokens: Tokens = 100_000,
    window: Window = 512,
    batch_tokens: Annotated[int, typer.Option(help="Tokens in an optimiser step, of every recipe.")] = 1024,
    seeds: Annotated[int, typer.Option(help="Runs per recipe; their spread is shown.")] = 3,
    budgets: Annotated[str, typer.Option(help="Budgets to evaluate at, with commas between.")] = "0.9,0.75,0.6,0.5,0.4",
    max_windows: Annotated[int | None, typer.Option(help="Evaluate on the first N windows of 1024.")] = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also time prefill and decode at each budget, of earlier results too.")
    ] = False,
    config: Config = None,
    column: Column = None,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Several recipes on one model with equal tokens, seeds and budgets: JSON, a Markdown table and a figure."""
    from widellm.bench.speed import measure
    from widellm.cli import show
    from widellm.evaluation.compare import Plan, run
    from widellm.sources.texts import column_of

    set_threads(threads)
    texts = tuple(text or ("python-docs",))
    plan = Plan(
        recipes=tuple(recipe or ("default", "wide", "static-width")),
        texts=texts,
        eval_text=eval_text,
        tokens=tokens,
        window=window,
        batch_tokens=batch_tokens,
        seeds=seeds,
        budgets=numbers(budgets, "--budgets", float) or (),
        max_windows=max_windows,
        config=config,
        column=column_of(column, *texts, eval_text),
        device=device,
    )
    with show.progress() as progress:
        table = run(model, out, plan, progress, measure if speed else None)
    typer.echo(table)

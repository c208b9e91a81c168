"""Commands on routed directories: `export`, `card` and `push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from widellm.cli.options import Base, Column, Dtype, Threads, numbers, set_threads, torch_dtype
from widellm.errors import WidellmError

Directory = Annotated[Path, typer.Argument(help="Routed directory, full or adapter form.")]


def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist.")],
    form: Annotated[
        str,
        typer.Option(
            help="full (with the weights), adapter (routers; the base model by name), or static (smaller and dense: "
            "what --budget leaves, the same for all tokens; no routers)."
        ),
    ] = "full",
    budget: Annotated[
        float | None,
        typer.Option(help="Of static: share of routable work to leave; default: what the model was made for."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Of static: text that tells what is important: FILE, DIR, data set id, or python-docs (default)."
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Of static: tokens of that text; default 16384.")] = None,
    column: Column = None,
    base: Base = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Largest weight file of the full and static form; default 50GB.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing directory.")] = False,
) -> None:
    """Write a routed directory in another form (or again in the same); only the static form cannot be undone."""
    from widellm.modeling import checkpoint

    forms = (*checkpoint.FORMS, "static")
    if form not in forms:
        raise WidellmError(f"--form must be one of {', '.join(forms)}, got {form!r}")
    if shard_size is not None and form == "adapter":
        raise WidellmError("--shard-size is of the full and the static form: leave it out, or ask for one of them")
    options = {"max_shard_size": shard_size or "50GB"} if form != "adapter" else {}
    if form == "static":
        left = _export_static(directory, out, budget, text, tokens, column, base, overwrite, options)
    else:
        of_static = {"--budget": budget, "--text": text, "--tokens": tokens, "--column": column}
        for name, value in of_static.items():
            if value is not None:
                raise WidellmError(f"{name} is of the static form: leave it out, or ask for --form static")
        checkpoint.export(directory, out, form=form, base=base, overwrite=overwrite, **options)
        left = ""
    size = sum(file.stat().st_size for file in out.iterdir())
    typer.echo(f"{out}: {form} form, {size / 1e6:.1f} MB{left}")


def _export_static(
    directory: Path,
    out: Path,
    budget: float | None,
    text: str | None,
    tokens: int | None,
    column: str | None,
    base: str | None,
    overwrite: bool,
    options: dict[str, Any],
) -> str:
    from widellm.cli import show
    from widellm.static_export import export_static

    if tokens is not None and tokens < 2:
        raise WidellmError(f"--tokens must be at least 2, got {tokens}")
    with show.progress() as progress:
        done = export_static(directory, out, budget, text, tokens, column, base, overwrite, progress, **options)
    counts = [f"{n} of {whole} {unit}" for unit, (n, whole) in (("heads", done.heads), ("channels", done.channels))]
    return f", {' and '.join(counts)} left, {done.spent:.1%} of the routable work"


def card(
    directory: Directory,
    text: Annotated[str, typer.Option(help="Text to measure on: FILE, DIR, data set id, or python-docs.")],
    budgets: Annotated[str, typer.Option(help="Budgets to measure, with commas.")] = "0.75,0.5",
    window: Annotated[int, typer.Option(help="Tokens in a window.")] = 1024,
    max_windows: Annotated[int | None, typer.Option(help="Evaluate only the first N windows.")] = None,
    column: Column = None,
    dtype: Dtype = "auto",
    base: Base = None,
    threads: Threads = None,
) -> None:
    """Measure the budget curve and write it into the directory's model card (README.md)."""
    from widellm.cli import show
    from widellm.pipeline import measure_card
    from widellm.sources.texts import column_of

    set_threads(threads)
    wanted = numbers(budgets, "--budgets", float) or ()
    read = column_of(column, text)
    with show.progress() as progress:
        rows = measure_card(
            directory, text, wanted, window, max_windows, torch_dtype(dtype), read, base, progress=progress
        )
    for row in rows:
        both = f"perplexity {row['perplexity']:.2f} (dense {row['dense_perplexity']:.2f})"
        typer.echo(f"budget {row['budget']:g}: {both}")


def push(
    directory: Directory,
    repository: Annotated[str, typer.Argument(help="Hub id to upload to, such as me/my-model.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private when it is created.")] = False,
    message: Annotated[str, typer.Option(help="Commit message.")] = "Upload a width-routed model",
) -> None:
    """Upload a routed directory, model card included, to the Hugging Face hub (log in with `hf auth login` first)."""
    from widellm.modeling import checkpoint

    typer.echo(checkpoint.push(directory, repository, private=private or None, commit_message=message))

"""`widellm report`: parse, call, print."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from widellm.cli.options import (
    Column,
    Dtype,
    JsonFile,
    MaybeBudget,
    Threads,
    check_file,
    set_threads,
    torch_dtype,
    write_json,
)
from widellm.errors import WidellmError


def report(
    directory: Annotated[Path, typer.Argument(help="Routed directory that widellm prune wrote.")],
    out: Annotated[Path, typer.Option(help="HTML file to write; everything is in it.")] = Path("report.html"),
    text: Annotated[
        str | None, typer.Option(help="Text: FILE, DIR, data set id; default: documentation not calibrated on.")
    ] = None,
    budget: MaybeBudget = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of the text to show; default: up to 1024, a longer text is cut.")
    ] = None,
    bench: Annotated[Path | None, typer.Option(help="Speeds to show: a file of widellm bench --json.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Recipes to show: JSON list of recipe, budget, perplexity, std.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="New directory to write each figure to as PNG.")] = None,
    column: Column = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """See it: which token computes what, layer by layer, what that saves, and what it does to the text."""
    from widellm.cli import show
    from widellm.files import atomic_write_text, check_new_directory
    from widellm.optional import require
    from widellm.report.collect import collect
    from widellm.report.figures import export_png
    from widellm.report.page import render
    from widellm.report.summary import summary
    from widellm.sources.texts import PYTHON_DOCS, column_of

    check_file(out)
    if figures is not None:
        if os.path.lexists(figures):
            raise WidellmError(f"{figures} exists: give --figures a new directory")
        check_new_directory(figures)
    require("matplotlib", "report", "drawing a report's figures")
    set_threads(threads)
    read = column_of(column, text or PYTHON_DOCS)
    with show.progress() as progress:
        data = collect(directory, text, budget, tokens, bench, compare, read, torch_dtype(dtype), progress)
        progress("drawing", 0, 1)
        page = render(data)
        progress("drawing", 1, 1)
    if figures is not None:
        export_png(data, figures)
    write_json(json_file, data)
    atomic_write_text(out, page)
    show.console.print(summary(data))
    show.console.print(f"Written to {out}")

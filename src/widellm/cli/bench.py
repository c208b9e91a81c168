"""`widellm bench`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from widellm.cli.options import JsonFile, Threads, numbers, set_threads, write_json
from widellm.errors import WidellmError


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(","))


def bench(
    model: Annotated[
        Path | None, typer.Option(help="Routed directory: its learned masks, and the whole model.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Parts: ops (ffn, projections, attention, int8, layer), models (model, llama-1b)"),
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help="Ops: smollm2-135m, llama-3.2-1b, llama-3.1-8b (default: all).")
    ] = None,
    rows: Annotated[str | None, typer.Option(help="Ops: numbers of rows, as in 1,8,512.")] = None,
    densities: Annotated[str | None, typer.Option(help="Ops: densities, as in 0.5,0.25.")] = None,
    backend: Annotated[str, typer.Option(help="Ops: auto, or one backend by name.")] = "auto",
    engines: Annotated[
        str | None,
        typer.Option(
            help="Models: widellm, transformers, llama.cpp; only when named: torch.compile (takes some minutes more), "
            "widellm-int8, torchao-int8."
        ),
    ] = None,
    phases: Annotated[
        str | None,
        typer.Option(help="Models: prefill, decode, batch, batch_shared (default: all; the first two in llama-1b)."),
    ] = None,
    budget: Annotated[float, typer.Option(help="Models: budget of the routed rows.")] = 0.5,
    prompt: Annotated[int, typer.Option(help="Models: tokens prefilled.")] = 512,
    new_tokens: Annotated[
        int | None, typer.Option(help="Models: tokens decoded (default: 32; 16 in llama-1b).")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds in which everything takes its turn (default: 3, fewer where a part would take long)."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Threads = None,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture per op into this directory.")] = None,
) -> None:
    """Time routed ops and whole models against the fastest dense ones; losing rows are printed too."""
    import torch

    from widellm.bench import plots, run
    from widellm.bench.models import ModelSettings
    from widellm.bench.ops import OpSettings
    from widellm.cli import show
    from widellm.kernels.registry import check_backend

    set_threads(threads)
    if dtype not in ("bfloat16", "float32"):
        raise WidellmError(f"--dtype must be bfloat16 or float32, got {dtype!r}")
    chosen = run.parts(only, model is not None)
    given: dict[str, Any] = {
        "shapes": _names(shapes),
        "rows": numbers(rows, "--rows", int),
        "densities": numbers(densities, "--densities", float),
    }
    ops = OpSettings(
        dtype=getattr(torch, dtype),
        backend=check_backend(backend),
        rounds=3 if rounds is None else rounds,
        **{k: v for k, v in given.items() if v is not None},
    )
    listed: dict[str, Any] = {"engines": _names(engines), "phases": _names(phases), "new_tokens": new_tokens}
    if rounds is not None:
        listed |= {"rounds": rounds, "seconds": float("inf")}

    def settings(name: str) -> ModelSettings:
        brief: dict[str, Any] = {"phases": ("prefill", "decode"), "new_tokens": 16} if name == run.RANDOM_MODEL else {}
        chosen = brief | {k: v for k, v in listed.items() if v is not None}
        return ModelSettings(name, budget=budget, prompt=prompt, dtype=dtype, **chosen)

    for part in chosen:  # what is wrong with the settings is said before minutes of timing
        if part in run.GROUPS["models"]:
            settings(str(model) if part == "model" else run.RANDOM_MODEL)
    if plot is not None and not any(part in run.GROUPS["ops"] for part in chosen):
        raise WidellmError("--plot needs timed ops: leave --only out, or name ops in it")
    with show.progress() as progress:
        result = run.bench(chosen, ops, None if model is None else str(model), settings, progress)
    table(result)
    write_json(json_file, result.to_json())
    if plot is not None:
        for path in plots.write_plots(result.ops, plot):
            show.console.print(f"Wrote {path}")


def table(result: Any) -> None:
    """The rows of a BenchResult, a table per op and shape and per model; slower than dense by over 3 % is red."""
    from widellm.cli.show import console

    for op, shape, sizes in dict.fromkeys((r.op, r.shape, r.sizes) for r in result.ops):
        found = _table(
            f"{op}, {shape} {sizes}, {result.dtype}",
            (*_TEXT, "rows", "density", "ms", "dense ms", "dense by", "speed-up"),
        )
        for r in (r for r in result.ops if (r.op, r.shape, r.sizes) == (op, shape, sizes)):
            speed = f"{r.speedup:.2f}x"
            found.add_row(
                r.masks, r.backend, str(r.rows), f"{r.density:g}", f"{r.ms:.3f}", f"{r.dense_ms:.3f}",
                r.dense_backend, Text(speed, "red" if r.speedup < 0.97 else ""),
            )  # fmt: skip
        console.print(found)
    for model in dict.fromkeys(r.model for r in result.models):
        found = _table(
            f"{model}, {result.dtype}", ("phase", "engine", "tokens/s", "spread", "first ms", "token ms", "peak GB")
        )
        before = None
        for r in (r for r in result.models if r.model == model):
            if before not in (None, r.phase):
                found.add_section()
            before = r.phase
            engine = f"{r.engine} {r.budget:g}" if r.engine == "widellm" else r.engine
            found.add_row(
                r.phase, engine, f"{r.tokens_per_s:.1f}", f"{r.spread:.2f}", _ms(r.first_token_ms), _ms(r.token_ms),
                f"{r.peak_memory_gb:.2f}",
            )  # fmt: skip
        console.print(found)
    machine = result.about()["machine"]
    about = f"{machine['cpu']}, {machine['threads']} threads, {machine['instructions']}; torch {machine['torch']}"
    console.print(f"Medians. {about}; dispatch by {result.about()['dispatch']}.")
    for note in result.notes:
        console.print(f"note: {note}")


_TEXT = ("masks", "backend")


def _table(title: str, columns: tuple[str, ...]) -> Table:
    found = Table(title=title, title_justify="left", pad_edge=False)
    for name in columns:
        left = name in (*_TEXT, "phase", "engine")
        found.add_column(name, justify="left" if left else "right", no_wrap=True)
    return found


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"

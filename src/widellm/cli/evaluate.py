"""Commands that run a model: `eval` on a text or on lm-eval's tasks, `generate`, and lm-eval's own command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from widellm.cli.options import (
    Base,
    Column,
    Device,
    Dtype,
    JsonFile,
    MaybeBudget,
    Threads,
    set_threads,
    torch_dtype,
    write_json,
)
from widellm.errors import WidellmError

PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose arguments are another program's."""


def evaluate(
    model: Annotated[str, typer.Argument(help="Routed directory, or any dense model.")],
    text: Annotated[
        str | None, typer.Option(help="Text for perplexity: FILE, DIR, data set id, or python-docs.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, with commas, instead of a text.")] = None,
    task_data: Annotated[
        Path | None, typer.Option(help="Local data for --tasks: a directory with TASK/SPLIT*.jsonl.")
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Examples in the context of a task; default: the task's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only so many documents of each task.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Requests of a task at once; default 8.")] = None,
    seed: Annotated[int | None, typer.Option(help="Chooses the examples of --shots; default 0.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens in a window; default 1024.")] = None,
    max_windows: Annotated[int | None, typer.Option(help="Evaluate only the first N windows.")] = None,
    budget: MaybeBudget = None,
    column: Column = None,
    dtype: Dtype = "auto",
    base: Base = None,
    device: Device = "cpu",
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Token perplexity on a text (tokenised at once, windows that do not overlap) or tasks of lm-eval, and the work."""
    from widellm import pipeline
    from widellm.cli import show
    from widellm.sources.texts import column_of

    set_threads(threads)
    if (text is None) == (tasks is None):
        raise WidellmError("say what to evaluate on: --text FILE for perplexity, or --tasks NAMES")
    without: dict[str, Any] = {"--limit": limit, "--shots": shots, "--task-data": task_data}
    without |= {"--batch-size": batch_size, "--seed": seed}
    if tasks is not None:
        without = {"--window": window, "--max-windows": max_windows, "--column": column}
    odd = [name for name, value in without.items() if value is not None]
    if odd:
        raise WidellmError(f"{odd[0]} means nothing with {'--text' if tasks is None else '--tasks'}: leave it out")
    if tasks is not None:
        from widellm.integrations.lm_eval import evaluate_tasks

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        batch = 8 if batch_size is None else batch_size
        found = evaluate_tasks(
            model, names, task_data, budget, shots, limit, batch, torch_dtype(dtype), seed or 0, base, device
        )
        show.tasks_table(found)
        write_json(json_file, found)
        return
    assert text is not None
    column = column_of(column, text)
    with show.progress() as progress:
        result = pipeline.evaluate(
            model, text, window or 1024, max_windows, budget, torch_dtype(dtype), column, base, device, progress
        )
    show.eval_table(result)
    write_json(json_file, result.to_json())


def generate(
    model: Annotated[str, typer.Argument(help="Routed directory, or any dense model.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    budget: MaybeBudget = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of taking the likeliest token.")] = False,
    speculative: Annotated[
        bool, typer.Option("--speculative", help="Draft at --budget, verify at 1.0: the dense model's greedy text.")
    ] = False,
    draft_tokens: Annotated[int, typer.Option(help="Most tokens that --speculative drafts at once.")] = 4,
    dtype: Dtype = "auto",
    base: Base = None,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Continue a prompt."""
    from widellm import pipeline
    from widellm.modeling.checkpoint import load_any
    from widellm.sources.models import place

    set_threads(threads)
    if max_new_tokens < 1:
        raise WidellmError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    loaded, tokenizer = load_any(model, budget, torch_dtype(dtype), base)
    place(loaded, device)
    method = None
    if speculative:
        from widellm.modeling.attach import get_budget
        from widellm.modeling.speculative import Speculative

        method = Speculative(draft_budget=get_budget(loaded), draft_tokens=draft_tokens)
    typer.echo(pipeline.generate(loaded, tokenizer, prompt, max_new_tokens, sample, method))
    if method is not None:
        typer.echo(
            f"accepted {method.accepted} of {method.drafted} drafted tokens ({method.acceptance:.0%}) in "
            f"{method.passes} verifications",
            err=True,
        )


def lm_eval(context: typer.Context) -> None:
    """lm-eval's own command, with the model `widellm` registered: --model_args pretrained=DIR,budget=0.5."""
    from widellm.optional import require

    command = require("lm_eval.__main__", "eval", "widellm lm-eval")
    require("lm_eval.models", "eval", "widellm lm-eval")  # registers us, see hooks
    before = sys.argv
    sys.argv = ["lm_eval", *context.args]
    try:
        command.cli_evaluate()
    finally:
        sys.argv = before

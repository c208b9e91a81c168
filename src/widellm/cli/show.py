"""What the commands print: progress bars and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from widellm.pipeline import EvalResult, PruneResult, generate
from widellm.progress import Progress as ProgressCall
from widellm.training.run import TrainResult

console = Console(markup=False)  # paths and messages may hold brackets


@contextmanager
def progress() -> Iterator[ProgressCall]:
    """One bar a stage, with time left, on stderr; the value is what the pipeline calls with (stage, done, total)."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def call(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield call


def prune_table(result: PruneResult) -> None:
    """Dense beside routed, with the ratio; then the work, the cost of the calibration, and what to be wary of."""
    both, work = result.comparison, result.comparison.work
    table = Table(title=f"{result.model} at budget {work.budget:g}", title_justify="left")
    for column in ("", "dense", "routed", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    rows: list[tuple[str, float, float]] = [
        ("perplexity (held-out text)", both.dense_perplexity, both.routed_perplexity),
        ("prefill tokens/s", result.dense_speed.prefill_tokens_per_s, result.routed_speed.prefill_tokens_per_s),
        ("decode tokens/s", result.dense_speed.decode_tokens_per_s, result.routed_speed.decode_tokens_per_s),
    ]
    for name, dense, routed in rows:
        table.add_row(name, f"{dense:.1f}", f"{routed:.1f}", f"{routed / dense:.2f}x")
    table.add_section()
    table.add_row("KL to dense (nats)", "", f"{both.kl_to_dense:.3f}", "")
    table.add_row("top-1 agreement", "", f"{both.top1_agreement:.1%}", "")
    table.add_row("routable work saved", "", f"{work.saved_routable:.1%}", "")
    table.add_row("all layers' work saved", "", f"{work.saved_all_layers:.1%}", "")
    table.add_row("attention sparsity", "", f"{work.attention_sparsity:.1%}", "")
    table.add_row("FFN sparsity", "", f"{work.ffn_sparsity:.1%}", "")
    console.print(table)
    console.print(
        f"Token perplexity, {both.windows} windows of {both.window}; calibrated on {result.calibration.tokens} tokens "
        f"of {result.text['source']} in {result.calibration.seconds:.0f} s, peak memory "
        f"{result.calibration.peak_memory_gb:.1f} GB. The weights in memory are as large as before."
    )
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow")
    if result.saved_to is not None:
        console.print(f"Saved to {result.saved_to}")


def train_table(result: TrainResult) -> None:
    """What a training run did, and what to be wary of."""
    table = Table(title=f"{result.recipe}, stage {result.stage}", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    if result.loss_before is not None and result.loss_after is not None:
        table.add_row("loss on held-out text, before", f"{result.loss_before:.4f}")
        table.add_row("loss on held-out text, best", f"{result.loss_after:.4f}")
    table.add_row("tokens", str(result.tokens))
    table.add_row("steps", str(result.steps))
    table.add_row("tokens/s", f"{result.tokens_per_s:.0f}")
    table.add_row("peak memory", f"{result.peak_memory_gb:.1f} GB")
    console.print(table)
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow")
    console.print(f"Saved to {result.saved_to}; {result.saved_to}.run holds the checkpoints")


def eval_table(result: EvalResult) -> None:
    """Perplexity with all that one must know to compare it."""
    found = result.result
    table = Table(title=result.model, title_justify="left", show_header=False)
    table.add_row("token perplexity", f"{found.perplexity:.3f}")
    table.add_row("text", result.text)
    table.add_row("windows", f"{found.windows} of {found.window} tokens")
    table.add_row("predicted tokens", str(found.tokens))
    if found.work is not None:
        table.add_row("budget", f"{found.work.budget:g}")
        table.add_row("routable work saved", f"{found.work.saved_routable:.1%}")
        table.add_row("all layers' work saved", f"{found.work.saved_all_layers:.1%}")
        table.add_row("attention sparsity", f"{found.work.attention_sparsity:.1%}")
        table.add_row("FFN sparsity", f"{found.work.ffn_sparsity:.1%}")
    console.print(table)


def tasks_table(found: dict[str, Any]) -> None:
    """What `evaluate_tasks` returned: a row a metric, then the work over all requests."""
    table = Table(title=f"{found['model']}, tasks of lm-eval {found['versions']['lm_eval']}", title_justify="left")
    for column in ("task", "metric", "value", "+-", "shots", "documents"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for row in found["tasks"]:
        stderr = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        table.add_row(
            row["task"], row["metric"], f"{row['value']:.4f}", stderr, str(row["shots"]), str(row["documents"])
        )
    console.print(table)
    work = found["work"]
    if work is not None:
        console.print(
            f"Budget {work['budget']:g}: routable work saved {work['saved_routable']:.1%}, all layers' "
            f"{work['saved_all_layers']:.1%}, over all requests. Data: {found['data']}, seed {found['seed']}.",
        )


def generations(model: Any, tokenizer: Any, prompt: str, budgets: Sequence[float]) -> None:
    """The same prompt continued at several budgets."""
    from widellm.modeling.attach import set_budget

    for budget in budgets:
        set_budget(model, budget)
        console.print(f"budget {budget:g}:", end=" ", style="bold")
        console.print(generate(model, tokenizer, prompt, 24))


def doctor_table(found: dict[str, Any]) -> None:
    """What `doctor.diagnose` returned, a row each."""
    table = Table(show_header=False, title="widellm doctor", title_justify="left")
    for section, values in found.items():
        table.add_section()
        if not isinstance(values, dict):
            table.add_row(section, str(values))
            continue
        for name, value in values.items():
            table.add_row(f"{section}: {name}", _plain(value))
    console.print(table)


def explain_table(found: dict[str, Any]) -> None:
    """What `explain` returned: equal layers in one row."""
    console.print(f"Measured costs: {found['table']}")
    table = Table(title=f"What layers use at budget {found['budget']:g}", title_justify="left")
    for column in ("layers", "op", "rows", "uses", "why"):
        table.add_column(column)
    layers = found["layers"]
    start = 0
    for end in range(1, len(layers) + 1):
        same = end < len(layers) and all(layers[end][k] == layers[start][k] for k in ("decode", "ops"))
        if same:
            continue
        name = f"{start}" if end == start + 1 else f"{start}-{end - 1}"
        table.add_row(name, "decode", "few", *layers[start]["decode"])
        for op, choices in layers[start]["ops"].items():
            for rows, (backend, why) in choices.items():
                table.add_row("", op, rows, backend, why)
        table.add_section()
        start = end
    console.print(table)


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], bool):
        return f"{'yes' if value[0] else 'no'} ({value[1]})"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return str(value)

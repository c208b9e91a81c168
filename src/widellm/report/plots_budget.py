"""The figures of batches, budgets and files: draw, describe and tabulate, as in `plots`."""

from __future__ import annotations

from typing import Any

from widellm.report.plots import Colours, Data, Table, label, legend_above, percent, share_axis

_LOOKS = (("o", "-"), ("s", "--"), ("^", "-."), ("v", (0, (1, 1))), ("P", (0, (5, 1, 1, 1, 1, 1))), ("X", (0, (8, 2))))
_LINES = ("attention", "ffn", "third", "ink", "muted")


def _draw_batch(figure: Any, data: Data, colours: Colours) -> None:
    axes = figure.add_subplot()
    rows = data["shared"]
    sizes = [row["tokens"] for row in rows]
    axes.plot(sizes, [row["apart"] for row in rows], "o-", color=colours["attention"], label="unrelated tokens")
    axes.plot(sizes, [row["neighbours"] for row in rows], "s--", color=colours["ffn"], label="neighbouring tokens")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(s) for s in sizes])
    axes.set_xlabel("tokens in the batch")
    axes.set_ylabel("work, if any token's group is computed")
    share_axis(axes, top=1.04)
    legend_above(axes, 2)


def _describe_batch(data: Data) -> str:
    parts = [
        f"{r['tokens']} tokens: {percent(r['apart'])} unrelated, {percent(r['neighbours'])} neighbours"
        for r in data["shared"]
    ]
    return (
        "Lines over the size of a batch: share of routable work when every group that any of its tokens keeps is "
        f"computed. {'; '.join(parts)}."
    )


def _batch_table(data: Data) -> Table:
    rows = [[r["tokens"], percent(r["apart"]), percent(r["neighbours"])] for r in data["shared"]]
    return ["tokens in the batch", "unrelated", "neighbours"], rows


BATCH = (_draw_batch, _describe_batch, _batch_table)


def _routed(data: Data) -> list[Data]:
    return sorted(data["curve"]["points"], key=lambda p: p["saved_all_layers"])


def _saved_axis(axes: Any) -> None:
    axes.xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f}%")
    axes.set_xlabel("work of all layers saved")


def _mark_own(axes: Any, data: Data, field: str, colours: Colours) -> None:
    """A ring around the budget that the rest of the report is about."""
    budget = data["work"]["budget"]
    for point in data["curve"]["points"]:
        if point["budget"] == budget and budget < 1:
            place = ([point["saved_all_layers"]], [point[field]])
            look = {"markersize": 11, "fillstyle": "none", "color": colours["ink"], "linestyle": ""}
            axes.plot(*place, marker="o", label=f"budget {budget:g}", **look)


def _plain_log(axes: Any) -> None:
    """A logarithmic axis with few plain numbers on it."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    marks = (1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [m * 10.0**e for e in range(-1, 300) for m in marks if low <= m * 10.0**e <= high]
    axes.set_yticks(ticks[:: max(1, len(ticks) // 6)])
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}")
    axes.yaxis.set_minor_formatter(lambda v, _: "")
    axes.tick_params(axis="y", which="minor", length=0)


def _draw_perplexity(figure: Any, data: Data, colours: Colours) -> None:
    axes = figure.add_subplot()
    points = _routed(data)
    saved = [p["saved_all_layers"] for p in points]
    axes.plot(saved, [p["perplexity"] for p in points], "o-", color=colours["attention"], label="routed")
    axes.axhline(data["curve"]["dense_perplexity"], color=colours["ink"], linestyle=":", label="dense")
    _mark_own(axes, data, "perplexity", colours)
    _plain_log(axes)
    axes.set_ylabel("token perplexity (log)")
    _saved_axis(axes)
    legend_above(axes)


def _describe_perplexity(data: Data) -> str:
    parts = [
        f"{percent(p['saved_all_layers'])} saved: {p['perplexity']:.1f} (budget {p['budget']:g})" for p in _routed(data)
    ]
    curve = data["curve"]
    return (
        f"Line: token perplexity against the work of all layers saved, {curve['windows']} windows of "
        f"{curve['window']} tokens. Dense: {curve['dense_perplexity']:.1f}. {'; '.join(parts)}."
    )


def _curve_table(data: Data) -> Table:
    header = ["budget", "routable saved", "all layers saved", "attention sparsity", "FFN sparsity", "perplexity"]
    header += ["KL to dense (nats)", "top-1 agreement"]
    rows: list[list[Any]] = []
    for p in _routed(data):
        shares = [percent(p[f]) for f in ("saved_routable", "saved_all_layers", "attention_sparsity", "ffn_sparsity")]
        quality = [f"{p['perplexity']:.2f}", f"{p['kl_to_dense']:.3f}", percent(p["top1_agreement"])]
        rows.append([f"{p['budget']:g}", *shares, *quality])
    return header, rows


PERPLEXITY = (_draw_perplexity, _describe_perplexity, _curve_table)


def _draw_closeness(figure: Any, data: Data, colours: Colours) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True)
    points = _routed(data)
    saved = [p["saved_all_layers"] for p in points]
    upper.plot(saved, [p["top1_agreement"] for p in points], "o-", color=colours["attention"])
    upper.set_ylabel("same top token")
    share_axis(upper, top=1.04)
    lower.plot(saved, [p["kl_to_dense"] for p in points], "s--", color=colours["ffn"])
    lower.set_ylabel("KL (nats)")
    lower.set_ylim(bottom=0)
    for axes, field in ((upper, "top1_agreement"), (lower, "kl_to_dense")):
        _mark_own(axes, data, field, colours)
    _saved_axis(lower)


def _describe_closeness(data: Data) -> str:
    parts = [
        f"{percent(p['saved_all_layers'])} saved: {percent(p['top1_agreement'])}, {p['kl_to_dense']:.2f} nats"
        for p in _routed(data)
    ]
    return (
        "Two lines against the work of all layers saved: how often routed and dense model put the same token first, "
        f"and the mean KL divergence between them. {'; '.join(parts)}."
    )


CLOSENESS = (_draw_closeness, _describe_closeness, _curve_table)


def _look(number: int, colours: Colours) -> dict[str, Any]:
    marker, dash = _LOOKS[number % len(_LOOKS)]
    return {"marker": marker, "linestyle": dash, "color": colours[_LINES[number % len(_LINES)]]}


def saved_at(data: Data, budget: float) -> float:
    """Share of all layers' work saved at `budget`: as measured where the curve has it, else as asked for."""
    for point in data["curve"]["points"]:
        if abs(point["budget"] - budget) < 1e-9:
            return float(point["saved_all_layers"])
    return (1.0 - budget) * float(data["model"]["routable_share"])


def _draw_speed(figure: Any, data: Data, colours: Colours) -> None:
    phases = sorted({row["phase"] for row in data["bench"]}, reverse=True)
    engines = sorted({row["engine"] for row in data["bench"]})
    panels = figure.subplots(1, len(phases), squeeze=False)[0]
    for axes, phase in zip(panels, phases, strict=True):
        rows = [row for row in data["bench"] if row["phase"] == phase]
        widest = max(saved_at(data, row["budget"]) for row in rows)
        for number, engine in enumerate(engines):
            own = sorted((saved_at(data, r["budget"]), r["tokens_per_s"]) for r in rows if r["engine"] == engine)
            if own and all(saved == 0 for saved, _ in own):  # an engine that knows no budget: a line across
                look = {**_look(number, colours), "marker": ""}
                axes.axhline(max(speed for _, speed in own), label=f"{label(engine)} (dense)", **look)
            elif own:
                axes.plot([s for s, _ in own], [v for _, v in own], label=label(engine), **_look(number, colours))
        dense = [row["tokens_per_s"] for row in rows if row["budget"] == 1]
        if dense:
            saved = [widest * i / 20 for i in range(21)]
            ideal = [max(dense) / (1 - s) for s in saved]
            axes.plot(saved, ideal, linestyle=":", linewidth=1.2, color=colours["muted"], label="ideal")
        axes.set_ylim(bottom=0)
        axes.set_title(label(phase), fontsize=9, loc="left")
        axes.set_ylabel("tokens/s")
        _saved_axis(axes)
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    figure.legend(list(found.values()), list(found), loc="outside upper left", ncols=4)


def _describe_speed(data: Data) -> str:
    parts = [
        f"{label(row['phase'])}, {label(row['engine'])} at budget {row['budget']:g}: {row['tokens_per_s']:.1f} tokens/s"
        for row in data["bench"]
    ]
    return (
        "Lines, one an engine: measured tokens per second against the work saved; the ideal divides the fastest dense "
        f"engine's time by what is left of the layers' work. {'; '.join(parts)}."
    )


def _speed_table(data: Data) -> Table:
    rows: list[list[Any]] = [
        [label(row["phase"]), label(row["engine"]), f"{row['budget']:g}", f"{row['tokens_per_s']:.1f}"]
        for row in data["bench"]
    ]
    return ["phase", "engine", "budget", "tokens/s"], rows


SPEED = (_draw_speed, _describe_speed, _speed_table)


def _draw_recipes(figure: Any, data: Data, colours: Colours) -> None:
    axes = figure.add_subplot()
    for number, recipe in enumerate(sorted({row["recipe"] for row in data["compare"]})):
        rows = [row for row in data["compare"] if row["recipe"] == recipe]
        axes.errorbar(
            [row["budget"] for row in rows],
            [row["perplexity"] for row in rows],
            yerr=[row["std"] or 0.0 for row in rows],
            capsize=3,
            label=label(recipe),
            **_look(number, colours),
        )
    values = [row["perplexity"] for row in data["compare"]]
    if max(values) > 4 * min(values):
        _plain_log(axes)
    axes.invert_xaxis()
    axes.set_xlabel("budget (less work to the right)")
    axes.set_ylabel("perplexity")
    legend_above(axes, 2)


def _recipes_table(data: Data) -> Table:
    rows: list[list[Any]] = [
        [
            label(r["recipe"]),
            f"{r['budget']:g}",
            f"{r['perplexity']:.2f}",
            "" if r["std"] is None else f"{r['std']:.2f}",
        ]
        for r in data["compare"]
    ]
    return ["recipe", "budget", "perplexity", "std"], rows


def _describe_recipes(data: Data) -> str:
    parts = [
        f"{label(r['recipe'])} at budget {r['budget']:g}: {r['perplexity']:.1f}"
        + ("" if r["std"] is None else f" (standard deviation {r['std']:.1f})")
        for r in data["compare"]
    ]
    return f"Lines, one a recipe: perplexity against the budget. {'; '.join(parts)}."


RECIPES = (_draw_recipes, _describe_recipes, _recipes_table)

"""How each figure is drawn, told in words, and put into a table: three functions a figure, on the report's data."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

Table = tuple[list[str], list[list[Any]]]
Data = dict[str, Any]
Colours = dict[str, str]

NAMES = {"attention": "attention", "ffn": "FFN"}
_MARKS = {"attention": ("o", "-"), "ffn": ("s", "--")}


def percent(value: float) -> str:
    """0.123 -> 12.3%"""
    return f"{100 * value:.1f}%"


def label(text: str, limit: int = 28) -> str:
    """A name from a file as a label: no control characters, cut to `limit`."""
    clean = "".join(c if unicodedata.category(c)[0] != "C" else "\ufffd" for c in text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "\u2026"


def share_axis(axes: Any, which: str = "y", top: float = 1.0) -> None:
    """An axis of shares, 0 to 100%."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_ylim if which == "y" else axes.set_xlim)(0, top)
    axis.set_major_formatter(lambda v, _: f"{100 * v:.0f}%")


def legend_above(axes: Any, columns: int = 3) -> None:
    """The legend in a row over the plot, where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, handlelength=2.2)


def routed_kinds(data: Data) -> list[str]:
    """The kinds of sub-layer that have routers, in the order in which they are shown."""
    return list(data["model"]["groups"])


def _rows(data: Data, kind: str) -> list[Data]:
    return [row for row in data["layers"] if row["kind"] == kind]


# --- token x layer -----------------------------------------------------------------------------------------------


def _heat(kind: str) -> tuple[Any, Any, Any]:
    def draw(figure: Any, data: Data, colours: Colours) -> None:
        axes = figure.add_subplot()
        groups = data["model"]["groups"][kind]
        counts = data["tokens"][kind]
        by_layer = [[row[i] / groups for row in counts] for i in range(data["model"]["layers"])]
        image = axes.imshow(
            by_layer, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="none", origin="lower"
        )
        axes.grid(False)
        axes.set_xlabel("token (position in the text)")
        axes.set_ylabel("layer")
        bar = figure.colorbar(image, ax=axes, pad=0.01, format=lambda v, _: f"{100 * v:.0f}%")
        bar.outline.set_visible(False)
        bar.set_label("groups kept")

    def describe(data: Data) -> str:
        density = [row["density"] for row in _rows(data, kind)]
        return (
            f"Heat map: {len(data['tokens']['ids'])} tokens across, {len(density)} layers upwards; the colour is the "
            f"share of {NAMES[kind]} groups that the token keeps in the layer, dark for few, bright for many. "
            f"Layer means run from {percent(min(density))} to {percent(max(density))}."
        )

    def table(data: Data) -> Table:
        tokens = len(data["tokens"]["ids"])
        step = math.ceil(tokens / 8)
        parts = [(a, min(a + step, tokens)) for a in range(0, tokens, step)]
        groups = data["model"]["groups"][kind]
        counts = data["tokens"][kind]
        rows = []
        for i in range(data["model"]["layers"]):
            means = [sum(counts[t][i] for t in range(a, b)) / (groups * (b - a)) for a, b in parts]
            rows.append([i, *(percent(m) for m in means)])
        return ["layer", *(f"tokens {a}\u2013{b - 1}" for a, b in parts)], rows

    return draw, describe, table


HEAT_ATTENTION, HEAT_FFN = _heat("attention"), _heat("ffn")


# --- kinds of tokens, positions ----------------------------------------------------------------------------------


def _pairs(figure: Any, rows: list[Data], names: list[str], colours: Colours, mean: float) -> None:
    axes = figure.add_subplot()
    axes.grid(axis="x")
    axes.grid(False, axis="y")
    for offset, kind in zip((-0.2, 0.2), (k for k in NAMES if k in rows[0]), strict=False):
        places = [i + offset for i in range(len(rows))]
        axes.barh(
            places,
            [row[kind] for row in rows],
            0.36,
            color=colours[kind],
            label=NAMES[kind],
            hatch="" if kind == "attention" else "////",
            edgecolor=colours["paper"],
            linewidth=0,
        )
    axes.plot([row["share"] for row in rows], range(len(rows)), "D", color=colours["ink"], label="work", markersize=5)
    axes.axvline(mean, color=colours["muted"], linestyle=":", linewidth=1.2)
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(axis="y", length=0, labelcolor=colours["ink"])
    axes.invert_yaxis()
    share_axis(axes, "x")
    axes.set_xlabel("groups kept; \u25c6 routable work spent (dotted: all tokens)")
    legend_above(axes)


def _pairs_table(rows: list[Data], names: list[str], first: str) -> Table:
    kinds = [kind for kind in NAMES if kind in rows[0]]
    header = [first, "tokens", "work spent", *(f"{NAMES[kind]} kept" for kind in kinds)]
    body = [
        [name, row["tokens"], percent(row["share"]), *(percent(row[kind]) for kind in kinds)]
        for name, row in zip(names, rows, strict=True)
    ]
    return header, body


def _spent(data: Data) -> float:
    return 1.0 - float(data["work"]["saved_routable"])


def _draw_kinds(figure: Any, data: Data, colours: Colours) -> None:
    names = [f"{row['kind'].replace('piece of a rare', 'piece of rare')} ({row['tokens']})" for row in data["kinds"]]
    _pairs(figure, data["kinds"], names, colours, _spent(data))


def _describe_kinds(data: Data) -> str:
    parts = [f"{row['kind']} {percent(row['share'])}" for row in data["kinds"]]
    return f"Bars, one pair a kind of token. Share of routable work spent: {', '.join(parts)}."


def _range(row: Data) -> str:
    return str(row["first"]) if row["first"] == row["last"] else f"{row['first']}\u2013{row['last']}"


def _draw_positions(figure: Any, data: Data, colours: Colours) -> None:
    _pairs(figure, data["positions"], [_range(row) for row in data["positions"]], colours, _spent(data))
    figure.axes[0].set_ylabel("position")


def _describe_positions(data: Data) -> str:
    parts = [f"tokens {_range(row)} {percent(row['share'])}" for row in data["positions"]]
    return f"Bars, one pair a range of positions. Share of routable work spent: {', '.join(parts)}."


KINDS_OF_TOKENS = (
    _draw_kinds,
    _describe_kinds,
    lambda data: _pairs_table(data["kinds"], [row["kind"] for row in data["kinds"]], "kind of token"),
)
POSITIONS = (
    _draw_positions,
    _describe_positions,
    lambda data: _pairs_table(data["positions"], [_range(row) for row in data["positions"]], "positions"),
)


# --- layers ------------------------------------------------------------------------------------------------------


def _per_layer(figure: Any, data: Data, colours: Colours, field: str) -> Any:
    axes = figure.add_subplot()
    for kind in routed_kinds(data):
        rows = _rows(data, kind)
        marker, dash = _MARKS[kind]
        axes.plot(
            [row["layer"] for row in rows],
            [row[field] for row in rows],
            marker=marker,
            linestyle=dash,
            color=colours[kind],
            label=NAMES[kind],
        )
    axes.set_xlabel("layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return axes


def _per_layer_table(data: Data, fields: dict[str, str], shown: Any = percent) -> Table:
    header = ["layer", *(f"{NAMES[kind]}: {title}" for kind in routed_kinds(data) for title in fields.values())]
    rows = []
    for pair in zip(*(_rows(data, kind) for kind in routed_kinds(data)), strict=True):
        rows.append([pair[0]["layer"], *(shown(row[field]) for row in pair for field in fields)])
    return header, rows


def _describe_lines(data: Data, field: str, what: str, shown: Any = percent) -> str:
    parts = []
    for kind in routed_kinds(data):
        values = [row[field] for row in _rows(data, kind)]
        parts.append(f"{NAMES[kind]} from {shown(min(values))} to {shown(max(values))}")
    return f"Lines over the layers: {what}, {'; '.join(parts)}."


def _draw_density(figure: Any, data: Data, colours: Colours) -> None:
    axes = _per_layer(figure, data, colours, "density")
    axes.axhline(data["work"]["budget"], color=colours["ink"], linestyle=":", label="asked of all together")
    share_axis(axes, top=1.04)
    axes.set_ylabel("groups kept")
    legend_above(axes)


DENSITY = (
    _draw_density,
    lambda data: (
        _describe_lines(data, "density", "share of groups kept")
        + f" The dial asks {percent(data['work']['budget'])} of all together; {percent(_spent(data))} were spent."
    ),
    lambda data: _per_layer_table(data, {"density": "kept"}),
)


def _draw_groups(figure: Any, data: Data, colours: Colours) -> None:
    kinds = routed_kinds(data)
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        rows, groups = _rows(data, kind), data["model"]["groups"][kind]
        floor = [0.0] * len(rows)
        looks = (("always", colours[kind], ""), ("selective", colours["grid"], ""), ("never", colours["ink"], "xxxx"))
        for field, colour, hatch in looks:
            height = [row[field] / groups for row in rows]
            axes.bar(
                [row["layer"] for row in rows],
                height,
                0.85,
                bottom=floor,
                color=colour,
                hatch=hatch,
                edgecolor=colours["paper"],
                linewidth=0,
                label={"selective": "by some", "always": "by every token", "never": "by none"}[field],
            )
            floor = [a + b for a, b in zip(floor, height, strict=True)]
        axes.set_title(f"{NAMES[kind]}: {groups} groups a layer", fontsize=9, loc="left")
        axes.set_xlabel("layer")
        share_axis(axes)
    panels[0].set_ylabel("groups kept")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=3)


def _describe_groups(data: Data) -> str:
    parts = []
    for kind in routed_kinds(data):
        rows = _rows(data, kind)
        total = {field: sum(row[field] for row in rows) for field in ("always", "selective", "never")}
        parts.append(
            f"{NAMES[kind]}: {total['always']} groups kept by every token, {total['selective']} by some, "
            f"{total['never']} by none"
        )
    return f"Stacked bars, one a layer. {'; '.join(parts)}."


GROUPS = (
    _draw_groups,
    _describe_groups,
    lambda data: _per_layer_table(data, {"always": "always", "selective": "by some", "never": "never"}, str),
)


def _usage(kind: str) -> tuple[Any, Any, Any]:
    def draw(figure: Any, data: Data, colours: Colours) -> None:
        axes = figure.add_subplot()
        usage = [sorted(row["usage"], reverse=True) for row in _rows(data, kind)]
        image = axes.imshow(usage, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="none", origin="lower")
        axes.grid(False)
        axes.set_xlabel("group, most used first")
        axes.set_ylabel("layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        bar = figure.colorbar(image, ax=axes, pad=0.02, format=lambda v, _: f"{100 * v:.0f}%")
        bar.outline.set_visible(False)
        bar.set_label("tokens that keep it")

    def describe(data: Data) -> str:
        flat = [u for row in _rows(data, kind) for u in row["usage"]]
        middle = sum(0.1 <= u <= 0.9 for u in flat) / len(flat)
        return (
            f"Heat map: layers upwards, the {NAMES[kind]} groups of each from most to least used; the colour is the "
            f"share of tokens that keep the group. {percent(middle)} of the groups are kept by 10 to 90% of tokens."
        )

    def table(data: Data) -> Table:
        rows = _rows(data, kind)
        body = [[row["layer"], *(f"{100 * u:.0f}%" for u in row["usage"])] for row in rows]
        return ["layer", *(f"group {i}" for i in range(len(rows[0]["usage"])))], body

    return draw, describe, table


USAGE_ATTENTION, USAGE_FFN = _usage("attention"), _usage("ffn")


def _bits(value: float) -> str:
    return f"{value:.2f}"


def _draw_entropy(figure: Any, data: Data, colours: Colours) -> None:
    axes = _per_layer(figure, data, colours, "entropy")
    axes.set_ylim(0, 1)
    axes.set_ylabel("bits a decision (1 = even odds)")
    legend_above(axes)


ENTROPY = (
    _draw_entropy,
    lambda data: _describe_lines(data, "entropy", "entropy of a group's decision in bits", _bits),
    lambda data: _per_layer_table(data, {"entropy": "bits"}, _bits),
)


def _draw_agreement(figure: Any, data: Data, colours: Colours) -> None:
    axes = _per_layer(figure, data, colours, "agreement")
    for kind in routed_kinds(data):
        rows = _rows(data, kind)
        layers, chance = [row["layer"] for row in rows], [row["chance"] for row in rows]
        axes.plot(layers, chance, color=colours[kind], linestyle=":", linewidth=1.2, label=f"{NAMES[kind]}, unrelated")
    lowest = min(min(row["agreement"], row["chance"]) for row in data["layers"])
    share_axis(axes)
    axes.set_ylim(max(0.0, math.floor(10 * lowest) / 10), 1.01)
    axes.set_ylabel("same decisions")
    legend_above(axes, columns=2)


AGREEMENT = (
    _draw_agreement,
    lambda data: (
        _describe_lines(data, "agreement", "share of decisions that a token and the next one have in common")
        + " "
        + _describe_lines(data, "chance", "the same for unrelated tokens")
    ),
    lambda data: _per_layer_table(data, {"agreement": "neighbours", "chance": "unrelated"}),
)

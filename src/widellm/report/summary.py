"""The report for a terminal: the findings and two small tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from widellm.report.plots import NAMES, label, percent, routed_kinds

_WIDTH = 20


def summary(data: dict[str, Any]) -> Group:
    """What to print of a report's data; nothing in it is read as markup."""
    parts: list[Any] = [Text(data["findings"]["headline"], style="bold"), Text()]
    if data["text"]["notice"]:
        parts.append(Text(data["text"]["notice"], style="yellow"))
    parts += [Text(sentence) for name, sentence in data["findings"].items() if name != "headline"]
    parts += [Text(), _kinds(data), _curve(data)]
    return Group(*parts)


def _kinds(data: dict[str, Any]) -> Table:
    table = Table(title="which tokens spend more", title_justify="left")
    kinds = routed_kinds(data)
    for column in ("kind of token", "tokens", "work spent", "", *(NAMES[kind] for kind in kinds)):
        table.add_column(column, justify="left" if column in ("kind of token", "") else "right")
    for row in data["kinds"]:
        bar = "\u2588" * round(_WIDTH * row["share"])
        shares = [percent(row[field]) for field in ("share", *kinds)]
        table.add_row(Text(row["kind"]), str(row["tokens"]), shares[0], bar, *shares[1:])
    return table


def _curve(data: dict[str, Any]) -> Table:
    curve = data["curve"]
    name = label(data["model"]["name"])
    table = Table(
        title=Text(f"{name}: token perplexity, {curve['windows']} windows of {curve['window']}"), title_justify="left"
    )
    for column in ("budget", "routable saved", "all layers saved", "perplexity", "KL (nats)", "same top token"):
        table.add_column(column, justify="right")
    for p in curve["points"]:
        table.add_row(
            f"{p['budget']:g}",
            percent(p["saved_routable"]),
            percent(p["saved_all_layers"]),
            f"{p['perplexity']:.1f}",
            f"{p['kl_to_dense']:.3f}",
            percent(p["top1_agreement"]),
            style="bold" if p["budget"] == data["work"]["budget"] else None,
        )
    return table

"""The figures of a report, drawn by matplotlib from the report's data: SVG that follows the page's colours, or PNG.

Colours are safe for colour-blind readers (Okabe and Ito's pairs, cividis), and never the only mark: lines differ in
dashes and markers, bars in hatching.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from widellm.files import atomic_directory
from widellm.optional import require
from widellm.report import plots, plots_budget

_COLOURS = {
    # sentinel in the SVG -> (CSS variable of the page, colour in a PNG)
    "ink": ("#010203", "--ink", "#1b1f24"),
    "muted": ("#010204", "--muted", "#5b6470"),
    "grid": ("#010205", "--grid", "#dde1e6"),
    "attention": ("#010206", "--attention", "#0072b2"),
    "ffn": ("#010207", "--ffn", "#b24a00"),
    "third": ("#010208", "--third", "#00795a"),
    "paper": ("#010209", "--card", "#ffffff"),
}

Draw = Callable[[Any, dict[str, Any], dict[str, str]], None]


@dataclass(frozen=True)
class Figure:
    """One figure: how to draw it on a matplotlib Figure of `size` inches, and what it says in words."""

    name: str
    title: str
    section: str
    size: tuple[float, float]
    draw: Draw
    describe: Callable[[dict[str, Any]], str]
    """Text alternative."""
    table: Callable[[dict[str, Any]], tuple[list[str], list[list[Any]]]]
    """Header and rows: the numbers that are drawn."""


FIGURES: tuple[Figure, ...] = tuple(
    Figure(name, title, section, size, *functions)
    for name, title, section, size, functions in (
        ("heat-attention", "Attention: who computes what", "heat", (9.6, 3.4), plots.HEAT_ATTENTION),
        ("heat-ffn", "FFN: who computes what", "heat", (9.6, 3.4), plots.HEAT_FFN),
        ("kinds", "By kind of token", "kinds", (4.8, 3.3), plots.KINDS_OF_TOKENS),
        ("positions", "By place in the text", "kinds", (4.8, 3.3), plots.POSITIONS),
        ("density", "What each layer keeps", "layers", (4.8, 3.3), plots.DENSITY),
        ("groups", "Groups: always, sometimes, never", "layers", (4.8, 3.3), plots.GROUPS),
        ("usage-ffn", "How often each FFN group is kept", "layers", (4.8, 3.3), plots.USAGE_FFN),
        ("usage-attention", "How often each attention group is kept", "layers", (4.8, 3.3), plots.USAGE_ATTENTION),
        ("entropy", "How much a decision depends on the token", "layers", (4.8, 3.3), plots.ENTROPY),
        ("agreement", "Do neighbouring tokens agree?", "layers", (4.8, 3.3), plots.AGREEMENT),
        ("batch", "What a batch would need together", "batch", (4.8, 3.3), plots_budget.BATCH),
        ("perplexity", "Quality against work saved", "budget", (4.8, 3.3), plots_budget.PERPLEXITY),
        ("closeness", "How close to the dense model", "budget", (4.8, 3.3), plots_budget.CLOSENESS),
        ("speed", "Measured speed", "bench", (9.6, 3.6), plots_budget.SPEED),
        ("recipes", "Recipes compared", "compare", (4.8, 3.3), plots_budget.RECIPES),
    )
)


def figures_for(data: dict[str, Any]) -> list[Figure]:
    """The figures that `data` has numbers for."""
    missing = {section for section in ("bench", "compare") if not data[section]}
    unrouted = [f"-{kind}" for kind in plots.NAMES if kind not in plots.routed_kinds(data)]
    return [f for f in FIGURES if f.section not in missing and not f.name.endswith(tuple(unrouted))]


def to_svg(figure: Figure, data: dict[str, Any]) -> str:
    """The figure as an SVG element to put into HTML; its colours are the CSS variables of the page around it."""
    colours = {role: sentinel for role, (sentinel, _, _) in _COLOURS.items()}
    buffer = io.StringIO()
    with _drawn(figure, data, colours) as drawn:
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for sentinel, variable, _ in _COLOURS.values():
        svg = svg.replace(sentinel, f"var({variable})")
    # one page holds many figures, whose ids must not meet; those that nothing refers to can go
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    svg = re.sub(r' \bid="([^"]+)"', lambda m: f' id="{figure.name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{figure.name}-", svg)
    svg = re.sub(r"(\d\.\d{2})\d+", r"\1", svg)
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg \1aria-hidden="true" focusable="false"', svg)


def to_png(figure: Figure, data: dict[str, Any], dots_per_inch: int = 160) -> bytes:
    """The figure as a PNG on white, for a README or a paper."""
    colours = {role: colour for role, (_, _, colour) in _COLOURS.items()}
    buffer = io.BytesIO()
    with _drawn(figure, data, colours) as drawn:
        drawn.savefig(buffer, format="png", dpi=dots_per_inch, facecolor=colours["paper"], metadata={"Software": None})
    return buffer.getvalue()


def export_png(data: dict[str, Any], folder: str | Path) -> list[Path]:
    """Write each figure as NAME.png into the new directory `folder`, all or none; returns their paths.

    Raises WidellmError when `folder` exists or cannot be made.
    """
    folder = Path(folder)
    figures = figures_for(data)
    with atomic_directory(folder) as temporary:
        for figure in figures:
            (temporary / f"{figure.name}.png").write_bytes(to_png(figure, data))
    return [folder / f"{figure.name}.png" for figure in figures]


@contextmanager
def _drawn(figure: Figure, data: dict[str, Any], colours: dict[str, str]) -> Iterator[Any]:
    matplotlib = require("matplotlib", "report", "drawing a report's figures")
    canvas = require("matplotlib.figure", "report", "drawing a report's figures")
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": figure.name,
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": colours["ink"],
        "axes.labelcolor": colours["muted"],
        "axes.edgecolor": colours["muted"],
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": colours["grid"],
        "grid.linewidth": 0.8,
        "xtick.color": colours["muted"],
        "ytick.color": colours["muted"],
        "hatch.linewidth": 0.6,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 4,
    }
    # matplotlibrc of the user must not change the report; rc_context gives everything back
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        drawn = canvas.Figure(figsize=figure.size, layout="constrained")
        figure.draw(drawn, data, colours)
        yield drawn

"""A picture per op: speed-up over rows, a line per density, with the 1x line and the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from widellm.bench.rows import OpRow
from widellm.errors import ConfigError
from widellm.optional import require


def write_plots(rows: Sequence[OpRow], folder: str | Path) -> list[Path]:
    """Write `OP-SHAPE.png` for each op and shape into `folder` (made where missing); returns the files.

    The ideal of a density is 1 / density: no time but that of what is kept. Raises MissingDependencyError without
    matplotlib, ConfigError when there is nothing to plot or `folder` is a file.
    """
    folder = Path(folder)
    if not rows:
        raise ConfigError("--plot needs timed ops: leave --only out, or name ops in it")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give --plot a directory")
    require("matplotlib", "bench", "--plot")
    figures = require("matplotlib.figure", "bench", "--plot")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for op, shape in dict.fromkeys((r.op, r.shape) for r in rows):
        own = [r for r in rows if (r.op, r.shape) == (op, shape)]
        figure = figures.Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.axhline(1.0, color="black", linewidth=1, label="1x")
        densities = sorted({r.density for r in own}, reverse=True)
        for number, density in enumerate(densities):
            colour = f"C{number}"
            if density < 1:
                axes.axhline(1 / density, color=colour, linewidth=0.8, linestyle=":")
            for masks, style in (("random", "o-"), ("learned", "s--"), ("shared", "^-.")):
                line = sorted((r.rows, r.speedup) for r in own if r.density == density and r.masks == masks)
                if line:
                    label = f"density {density:g}, {masks}"
                    axes.plot(*zip(*line, strict=True), style, color=colour, markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("rows")
        axes.set_ylabel("speed-up over the faster dense")
        axes.set_title(f"{op}, {shape} ({own[0].sizes}); dotted: ideal")
        axes.legend(fontsize=7)
        path = folder / f"{op}-{shape}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written

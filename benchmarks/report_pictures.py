"""Pictures for the documentation, from the report's own code on the embedded model.

    python benchmarks/report_pictures.py DIR [--out docs/images]

DIR is what `widellm demo` or `widellm prune smollm2-135m --out DIR` wrote. Makes OUT/atlas.png (a passage, each token
tinted by the work it spends) and the figures named in PICTURES, which are about Python's own documentation, the part
that calibration did not read. Needs the extra `report`.
"""

from __future__ import annotations

import argparse
import io
import itertools
from pathlib import Path

import torch

from widellm.modeling.attach import get_budget, width_of
from widellm.modeling.checkpoint import load
from widellm.optional import require
from widellm.report import masks
from widellm.report.collect import collect
from widellm.report.figures import FIGURES, to_png
from widellm.report.page import level
from widellm.report.tokens import tokenise

PICTURES = ("heat-ffn", "density", "perplexity")
PASSAGE = """\
The Antarctic krill (Euphausia superba) is about 6 cm long, weighs 2 grams and lives for up to six years. It \
swims in swarms of 10,000 to 30,000 animals per cubic metre, so dense that a ship's echo sounder takes them for \
the sea floor. What they eat is smaller still: diatoms, combed out of the water by a basket of hair-fine legs. \
Nearly everything else down there eats krill: penguins, crabeater seals, squid, and the blue whale, which \
swallows four tonnes of them a day. If you were to weigh all of them, you would find some 379,000,000 tonnes; \
few species on Earth weigh more."""
COLUMNS = 92


def atlas(pieces: list[str], share: list[float], caption: str) -> bytes:
    """PNG: a text, each token (with its share of routable work) on its tint, with the scale under it."""
    figure_module = require("matplotlib.figure", "report", "the README's picture")
    patches = require("matplotlib.patches", "report", "the README's picture")
    colours = require("matplotlib", "report", "the README's picture").colormaps["cividis"]
    order = sorted(share)
    low, high = order[int(0.02 * (len(order) - 1))], order[int(0.98 * (len(order) - 1))]
    wide, tall = 0.0855, 0.21  # inches of a character and of a line at this font size
    placed, lines = wrap(pieces)
    figure = figure_module.Figure(figsize=((COLUMNS + 3) * wide, (lines + 2.6) * tall))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-1.5, COLUMNS + 1.5)
    axes.set_ylim(lines + 1.7, -0.9)
    text = dict(family="monospace", fontsize=10.2, va="center", ha="left")
    for (line, column, piece), value in zip(placed, share, strict=True):
        tint = colours(level(value, low, high) / 9)
        ink = "white" if sum(w * c for w, c in zip((0.3, 0.59, 0.11), tint, strict=False)) < 0.5 else "black"
        axes.add_patch(patches.Rectangle((column, line - 0.44), len(piece) - 0.12, 0.88, color=tint, lw=0))
        for j, character in enumerate(piece):  # one by one, so that they sit on their tints in any font
            axes.text(column + j, line, character, color=ink, parse_math=False, **text)
    for i in range(10):
        axes.add_patch(patches.Rectangle((28 + 2 * i, lines + 0.35), 2, 0.7, color=colours(i / 9), lw=0))
    label = {**text, "family": "sans-serif", "fontsize": 9, "color": "#5b6470"}
    axes.text(27, lines + 0.7, f"share of routable work spent: {low:.0%}", **{**label, "ha": "right"})
    axes.text(49, lines + 0.7, f"{high:.0%}", **label)
    axes.text(COLUMNS, lines + 0.7, caption, **{**label, "ha": "right"})
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=170, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def wrap(pieces: list[str]) -> tuple[list[tuple[int, int, str]], int]:
    """(line, column, piece) of each token in lines of at most COLUMNS that break at spaces, and the number of lines."""
    placed: list[tuple[int, int, str]] = []
    line = column = 0
    for i, piece in enumerate(pieces):
        rest = itertools.takewhile(lambda p: not p.startswith(" "), pieces[i + 1 :])
        if piece.startswith(" ") and column + len(piece) + sum(map(len, rest)) > COLUMNS:
            line, column, piece = line + 1, 0, piece[1:]
        placed.append((line, column, piece))
        column += len(piece)
    return placed, line + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "images")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(arguments.directory)
    tokens = tokenise(tokenizer, PASSAGE, 1024)
    share = masks.token_shares(width_of(model), masks.run(model, torch.tensor(tokens.ids))).tolist()
    caption = f"SmolLM2-135M-Instruct at budget {get_budget(model):g}"
    (arguments.out / "atlas.png").write_bytes(atlas(tokens.pieces, share, caption))
    data = collect(arguments.directory)
    for figure in FIGURES:
        if figure.name in PICTURES:
            (arguments.out / f"{figure.name}.png").write_bytes(to_png(figure, data))
    print(data["findings"]["headline"])


if __name__ == "__main__":
    main()

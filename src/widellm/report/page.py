"""The page: one HTML file with everything in it, made from the report's data alone.

Whatever came from outside (the text, names of models, engines and recipes) is escaped where it is put in; besides, the
page's own policy lets no script run but the one it was made with, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import unicodedata
from importlib.resources import files
from typing import Any

from widellm.report.figures import Figure, figures_for, to_svg
from widellm.report.findings import at_budget
from widellm.report.plots import NAMES, percent, routed_kinds

LEVELS = 10
_UNITS = {"attention": "query head", "ffn": "channel"}
_WEIGHTS = {"attention": "q and o", "ffn": "gate, up and down"}
# cividis at ten even steps, and the ink that reads best on each
_TINTS = ("00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "e1cc55", "fee838")

_SECTIONS = (
    ("heat", "Tokens and layers", "tokens"),
    ("kinds", "Which tokens spend more", "kinds"),
    ("layers", "The layers and their groups", "layers"),
    ("batch", "What a batch could share", "batch"),
    ("budget", "What a budget buys", "budget"),
    ("bench", "Measured speed", "bench"),
    ("compare", "Recipes", "compare"),
)


def render(data: dict[str, Any]) -> str:
    """The whole page as HTML text; `data` is what `collect` returned, and stands in the page as JSON too.

    Raises MissingDependencyError without matplotlib (extra `report`).
    """
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    name = text(data["model"]["name"])
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">',
        f"<title>{name} at budget {data['work']['budget']:g} \u2013 widellm report</title>",
        f"<style>{_asset('page.css')}{_tints()}</style></head>\n<body>",
        _header(data, name),
        "<main>",
        _atlas(data),
        *(_section(data, *section) for section in _SECTIONS),
        "</main>",
        _footer(data),
        f'<script type="application/json" id="data">{embedded_json(data)}</script>\n',
        f"<script>{script}</script></body></html>\n",
    ]
    return "\n".join(parts)


def text(value: Any) -> str:
    """`value` escaped for HTML, with characters that cannot be seen, or that turn the text around, made visible."""
    return html.escape("".join(_visible(c) for c in str(value)), quote=True)


def embedded_json(data: dict[str, Any]) -> str:
    """The data as JSON that is safe inside a script element: ASCII only, without <, > and &."""
    compact = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return compact.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return character
    if code in (0x200C, 0x200D):  # joiners belong to words and emoji
        return character
    return "\\r" if character == "\r" else f"[U+{code:04X}]"


def _asset(name: str) -> str:
    return (files("widellm.report") / name).read_text(encoding="utf-8")


def _tints() -> str:
    rules = []
    for i, colour in enumerate(_TINTS):
        # black or white, whichever has the higher contrast (WCAG's relative luminance)
        channels = [int(colour[j : j + 2], 16) / 255 for j in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        ink = "#000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#fff"
        rules.append(f".q{i}{{background:#{colour};color:{ink}}}")
    return "".join(rules)


def _header(data: dict[str, Any], name: str) -> str:
    model, work, source = data["model"], data["work"], data["text"]
    point = at_budget(data, work["budget"])
    ratio = point["perplexity"] / data["curve"]["dense_perplexity"]
    tiles = (
        (percent(point["saved_all_layers"]), "of all layers' work saved"),
        (f"{ratio:.2f}\u00d7", "the dense model's perplexity"),
        (percent(point["top1_agreement"]), "same next token as the dense model"),
        *((percent(1 - point[f"{k}_sparsity"]), f"of {NAMES[k]} groups kept") for k in routed_kinds(data)),
    )
    held = {True: ", not seen in calibration", None: "", False: ""}[source["held_out"]]
    sections = [("atlas", "The text")] + [(i, title) for i, title, _ in _SECTIONS if _shown(data, i)]
    links = "".join(f'<a href="#{i}">{title}</a>' for i, title in sections)
    notice = f'<p class="note" role="note">{text(source["notice"])}</p>' if source["notice"] else ""
    return (
        f"<header><h1>Who computes what: {name}</h1>"
        f'<p class="sub">{model["layers"]} layers of '
        + " and ".join(
            f"{model['groups'][k]} {NAMES[k]} groups ({_count(model['group_size'][k], _UNITS[k])} each)"
            for k in routed_kinds(data)
        )
        + "; "
        f"{source['tokens']:,} tokens of {text(source['source'])}{held}.</p>"
        f'<p class="headline">{text(data["findings"]["headline"])}</p>{notice}<div class="tiles">'
        + "".join(f'<div class="card"><b>{value}</b><span class="muted">{what}</span></div>' for value, what in tiles)
        + f'</div><nav aria-label="Sections">{links}</nav></header>'
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _shown(data: dict[str, Any], section: str) -> bool:
    return bool(data.get(section)) if section in ("bench", "compare") else True


def level(value: float, low: float, high: float) -> int:
    """Which of the LEVELS tints a share gets between `low` and `high`."""
    place = LEVELS * (value - low) / (high - low) if high > low else LEVELS / 2
    return min(max(math.floor(place), 0), LEVELS - 1)


def _atlas(data: dict[str, Any]) -> str:
    tokens = data["tokens"]
    order = sorted(tokens["share"])
    low, high = order[math.floor(0.02 * (len(order) - 1))], order[math.ceil(0.98 * (len(order) - 1))]
    spans = []
    for i, (piece, share) in enumerate(zip(tokens["text"], tokens["share"], strict=True)):
        look = f'class="t q{level(share, low, high)}" tabindex="{0 if i == 0 else -1}" title="{percent(share)}"'
        spans.append(f'<span role="option" {look}>{_piece(piece)}</span>')
    choices = (("share", "routable work", " checked"), *((k, f"{NAMES[k]} groups", "") for k in routed_kinds(data)))
    radios = "".join(
        f'<label><input type="radio" name="tint" value="{value}"{checked}>{title}</label>'
        for value, title, checked in choices
    )
    scale = "".join(f'<i class="q{i}"></i>' for i in range(LEVELS))
    fields = (
        ("place", "token"),
        ("kind", "kind"),
        ("share", "routable work spent"),
        *((kind, f"{NAMES[kind]} groups kept") for kind in routed_kinds(data)),
    )
    rows = "".join(f'<dt>{title}</dt><dd data-f="{field}"></dd>' for field, title in fields)
    return (
        f'<section id="atlas"><h2>The text</h2><p>{text(data["findings"]["tokens"])} Point at a token, or tab into the '
        "text and use the arrow keys, to see what it computed in each layer.</p>"
        '<div class="atlas"><div class="card"><div class="controls">'
        f'<fieldset id="tint" hidden><legend>Tint by</legend>{radios}</fieldset>'
        '<span class="scale" role="img" aria-label="Dark tokens spend little, bright tokens much; the scale spans all '
        'but the lowest and highest 2% of tokens.">'
        f'<span id="low">{percent(low)}</span><span>{scale}</span><span id="high">{percent(high)}</span></span></div>'
        f'<div id="tokens" class="text" role="listbox" aria-label="The text, token by token" '
        f'aria-describedby="panel">{"".join(spans)}</div></div>'
        '<aside id="panel" class="card panel" aria-live="polite" hidden><h3><code></code></h3>'
        f'<dl>{rows}</dl><div class="chart"></div></aside></div></section>'
    )


def _piece(piece: str) -> str:
    if not piece:
        return '<span class="sign">\u00b7</span>'  # a further byte of the character before
    return text(piece).replace("\n", '<span class="sign">\u21b5</span>\n')


def _section(data: dict[str, Any], section: str, title: str, finding: str) -> str:
    if not _shown(data, section):
        return ""
    figures = [figure for figure in figures_for(data) if figure.section == section]
    said = "" if section == "heat" else f"<p>{text(data['findings'][finding])}</p>"
    body = "".join(_figure(data, figure) for figure in figures)
    return f'<section id="{section}"><h2>{title}</h2>{said}<div class="grid">{body}</div></section>'


def _figure(data: dict[str, Any], figure: Figure) -> str:
    header, rows = figure.table(data)
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    wide = " wide" if figure.size[0] > 6 else ""
    scroll = ' tabindex="0" aria-label="Figure, scrolls sideways"' if wide else ""
    return (
        f'<figure class="card{wide}" id="figure-{figure.name}" aria-labelledby="{figure.name}-title">'
        f'<h3 id="{figure.name}-title">{text(figure.title)}</h3><div class="scroll" role="group"{scroll}>'
        f'<div role="img" aria-label="{text(figure.describe(data))}">{to_svg(figure, data)}</div></div>'
        f"<details><summary>The numbers</summary><div class='table' tabindex='0' role='region' "
        f'aria-label="Numbers of the figure: {text(figure.title)}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details></figure>"
    )


def _footer(data: dict[str, Any]) -> str:
    curve, model = data["curve"], data["model"]
    weights = "q, o, gate, up and down" if len(model["groups"]) > 1 else _WEIGHTS[next(iter(model["groups"]))]
    made = ", ".join(f"{text(name)} {text(version)}" for name, version in data["versions"].items())
    return (
        '<footer class="muted"><p>Routable work is the multiply-adds of the '
        f"{weights} weights "
        f"({percent(model['routable_share'])} of all layer weights here); k and v are always computed. Attention over "
        "the cache is skipped for dropped heads too and is not counted. The weights in memory are as many as before. "
        f"Perplexity is token perplexity over {curve['windows']} window(s) of {curve['window']} tokens of this text "
        f"({curve['tokens']:,} predicted tokens). A rare word is one that the tokenizer writes in several pieces.</p>"
        f"<p>Made with {made}. Base model fingerprint: {text(model['fingerprint']) or 'none'}.</p></footer>"
    )

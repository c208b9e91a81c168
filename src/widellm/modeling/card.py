"""The model card: what a directory's README.md says about a model, all of it from what was recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from widellm.config import WidthConfig
from widellm.routing.budget import Dial

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_UNNAMED = "an unnamed model"
_LOADING = (
    "```python",
    "import widellm",
    "from transformers import AutoModelForCausalLM",
    "",
    'model = AutoModelForCausalLM.from_pretrained("THIS_REPOSITORY")  # no remote code',
)
_SETTINGS = (
    "kinds",
    "head_group_size",
    "ffn_group_size",
    "router_rank",
    "router_input",
    "decision",
    "num_hidden_layers",
)


def model_card(config: WidthConfig, dial: Dial | None) -> str:
    """The card's text: how to load it, the budget curve as far as it was measured, recipe, data and versions."""
    base, made = config.base.get("name", ""), config.provenance
    last = (made.get("training") or [{}])[-1]
    name = base or _UNNAMED
    lines = _head(base, "adaptive-width", "width-routed")
    lines += [
        f"Each token chooses, layer by layer, which query heads and FFN channels of {name} it computes. One number,",
        "the budget, says what share of the routable multiply-adds (q, o, gate, up and down) may be spent.",
        "",
        *_LOADING,
        f"widellm.set_budget(model, {made.get('budget', 1.0)})  # any budget in the table; 1.0 is the dense model",
        "```",
        "",
        "## Budgets",
        "",
        *_curve(dial, made.get("results", [])),
        "",
        "## Recipe",
        "",
        *_bullets({key: getattr(config, key) for key in _SETTINGS}),
        *_bullets({"made for budget": made.get("budget"), **(made.get("settings") or {})}),
        *_bullets({"training": made.get("training")}),
        "",
        *_origin(made.get("text") or last.get("text"), made.get("versions") or last.get("versions")),
        *_bullets({"base fingerprint": config.base.get("fingerprint"), "configuration": config.digest()}),
        "",
    ]
    return "\n".join(lines)


def static_card(layers: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> str:
    """The card of a static form. layers: `static_model.Sizes.to_json` of each; made: its recorded provenance."""
    made = json.loads(json.dumps(made, sort_keys=True))  # config.json, which it may come from, is sorted
    base = str((made.get("base") or {}).get("name", ""))
    lines = _head(base, "pruned", "narrowed")
    lines += [
        f"{base or 'An unnamed model'} with query heads and FFN channels taken out for good, in every layer as many as",
        "the table says. It is a dense model: no routers, no budget, every token computes all that is left.",
        "",
        *_LOADING,
        "```",
        "",
        "## Layers",
        "",
        "| layer | query heads | KV heads | FFN channels |",
        "|---|---|---|---|",
    ]
    for index, layer in enumerate(layers):
        heads, channels = layer["heads_per_kv_head"], layer["channels"]
        counts = ("all", "all") if heads is None else (sum(heads), len(heads))
        lines.append(f"| {index} | {counts[0]} | {counts[1]} | {'all' if channels is None else channels} |")
    shown = {name: value for name, value in made.items() if name not in ("base", "text", "versions")}
    lines += ["", "## Recipe", "", *_bullets(shown)]
    return "\n".join([*lines, "", *_origin(made.get("text"), made.get("versions")), ""])


def _head(base: str, tag: str, form: str) -> list[str]:
    """What the hub reads, and the title."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", f"tags: [widellm, {tag}]"]
    if _HUB_ID.fullmatch(base):
        lines.append(f"base_model: {base}")
    return [*lines, "---", "", f"# {(base or _UNNAMED).rstrip('/').split('/')[-1]}, {form}", ""]


def _origin(text: Any, versions: Any) -> list[str]:
    data, made_with = (_bullets(record or {}) or ["Not recorded."] for record in (text, versions))
    return ["## Data", "", *data, "", "## Versions", "", *made_with]


def _curve(dial: Dial | None, results: list[dict[str, Any]]) -> Iterable[str]:
    if dial is not None:
        low, high = float(dial.budgets[0]), float(dial.budgets[-1])
        yield f"Calibrated from {low:.2f} to {high:.2f}; 1.0 runs no router."
        yield ""
    if not results:
        yield "No quality was measured: `widellm card DIR --text FILE` does it and writes the table."
        return
    yield "| budget | routable work saved | all layers' work saved | token perplexity | against dense | text |"
    yield "|---|---|---|---|---|---|"
    for row in results:
        ratio = row["perplexity"] / row["dense_perplexity"]
        yield (
            f"| {row['budget']:g} | {row['saved_routable']:.1%} | {row['saved_all_layers']:.1%} | "
            f"{row['perplexity']:.2f} | {ratio:.2f}x | {row['text']}, {row['windows']} windows of {row['window']} |"
        )


def _bullets(values: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in values.items():
        if value in (None, "", [], {}):
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        lines.append(f"- {name}: {text if len(text) <= 200 else text[:197] + '...'}")
    return lines

"""Sentences that say what the figures mean for this model; each number in them is taken from the report's data."""

from __future__ import annotations

from typing import Any

from widellm.report.plots import NAMES, routed_kinds

FEW_TOKENS = 200
"""Below so many predicted tokens, differences in perplexity are mostly noise."""
_MIN_OF_KIND = 5


def findings(data: dict[str, Any]) -> dict[str, str]:
    """section -> sentence, for the sections of the page; `data` is the report as JSON would hold it."""
    found = {
        "headline": _headline(data),
        "tokens": _tokens(data),
        "kinds": _kinds(data),
        "layers": _layers(data),
        "groups": _groups(data),
        "batch": _batch(data),
        "budget": _budget(data),
    }
    if data["bench"]:
        found["bench"] = _bench(data)
    if data["compare"]:
        found["compare"] = _compare(data)
    return found


def at_budget(data: dict[str, Any], budget: float) -> dict[str, Any]:
    """The curve's point that is nearest to `budget`."""
    point: dict[str, Any] = min(data["curve"]["points"], key=lambda p: abs(p["budget"] - budget))
    return point


def _headline(data: dict[str, Any]) -> str:
    budget = data["work"]["budget"]
    if budget == 1.0:
        return "At budget 1 every token computes everything: this is the dense model, and there is nothing to see yet."
    point, curve = at_budget(data, budget), data["curve"]
    ratio = point["perplexity"] / curve["dense_perplexity"]
    return (
        f"At budget {budget:g} the model skips {point['saved_routable']:.0%} of its routable work "
        f"({point['saved_all_layers']:.0%} of all its layers' work): perplexity {_change(ratio)}, from "
        f"{curve['dense_perplexity']:.1f} to {point['perplexity']:.1f}, and it picks the dense model's next token "
        f"{point['top1_agreement']:.0%} of the time."
    )


def _change(ratio: float) -> str:
    if abs(ratio - 1) < 0.005:
        return "stays the same"
    if ratio >= 2:
        return f"grows {ratio:.1f}-fold"
    return f"{'grows' if ratio > 1 else 'falls'} by {abs(ratio - 1):.0%}"


def _tokens(data: dict[str, Any]) -> str:
    spread = data["spread"]
    if spread["most"] - spread["least"] < 0.005:
        return "All tokens spend the same here."
    return (
        f"The {len(data['tokens']['ids']):,} tokens shown spend {1 - data['work']['saved_routable']:.0%} of the "
        f"routable work on average, {data['work']['budget']:.0%} being asked for. "
        f"The thriftiest spends {spread['least']:.0%} of the routable work, the hungriest {spread['most']:.0%}; "
        f"eight in ten lie between {spread['p10']:.0%} and {spread['p90']:.0%}."
    )


def _kinds(data: dict[str, Any]) -> str:
    rows = [r for r in data["kinds"] if r["tokens"] >= _MIN_OF_KIND]
    parts = []
    if len(rows) >= 2:
        top, low = max(rows, key=lambda r: r["share"]), min(rows, key=lambda r: r["share"])
        if top["share"] - low["share"] < 0.01:
            parts.append("All kinds of tokens spend about the same.")
        else:
            parts.append(
                f"Of the kinds with at least {_MIN_OF_KIND} tokens, {_plural(top['kind'])} spend most "
                f"({top['share']:.0%}) and {_plural(low['kind'])} least ({low['share']:.0%})."
            )
    first = data["kinds"][0]
    rest = data["positions"][1:]
    if rest:
        mean = sum(r["share"] * r["tokens"] for r in rest) / sum(r["tokens"] for r in rest)
        parts.append(f"The first token spends {first['share']:.0%}, the others {mean:.0%} on average.")
    return " ".join(parts)


def _plural(kind: str) -> str:
    plurals = {"whole word": "whole words", "piece of a rare word": "pieces of rare words", "number": "numbers"}
    return {**plurals, "other": "other tokens"}.get(kind, kind)


def _layers(data: dict[str, Any]) -> str:
    parts = []
    for kind in routed_kinds(data):
        name = NAMES[kind]
        rows = [r for r in data["layers"] if r["kind"] == kind]
        top, low = max(rows, key=lambda r: r["density"]), min(rows, key=lambda r: r["density"])
        if top["density"] - low["density"] < 0.005:
            parts.append(f"every layer's {name} keeps {top['density']:.0%}")
        else:
            parts.append(
                f"{name} is fullest in layer {top['layer']} ({top['density']:.0%} kept) and leanest in layer "
                f"{low['layer']} ({low['density']:.0%})"
            )
    sentence = "; ".join(parts)
    prices = {r["threshold"] for r in data["layers"]}
    shared = " One threshold serves all layers, so these differences are the routers' own." if len(prices) == 1 else ""
    return f"{sentence[0].upper()}{sentence[1:]}.{shared if None not in prices else ''}"


def _groups(data: dict[str, Any]) -> str:
    rows, dead = data["layers"], data["dead"]
    total = sum(len(r["usage"]) for r in rows)
    always, never = sum(r["always"] for r in rows), sum(r["never"] for r in rows)
    same = sum(r["agreement"] * len(r["usage"]) for r in rows) / total
    chance = sum(r["chance"] * len(r["usage"]) for r in rows) / total
    dropped = (
        f"the {never} unused hold {dead['weights'] / 1e6:.1f} M weights ({dead['share']:.1%} of the routable ones), "
        "which could be dropped for good if other text agrees"
        if never
        else "none is dead weight"
    )
    return (
        f"Of {total} groups, {always / total:.0%} were kept by every token and {never / total:.0%} by none: {dropped}. "
        f"Neighbouring tokens make the same choice {same:.0%} of the time; unrelated ones would {chance:.0%}."
    )


def _batch(data: dict[str, Any]) -> str:
    rows = data["shared"]
    last = next((r for r in rows if r["tokens"] == 8), rows[-1])
    if last["tokens"] == 1:
        return "The text is too short to ask what a batch could share."
    return (
        f"One token spends {rows[0]['neighbours']:.0%}. A batch of {last['tokens']} that computes what any of its "
        f"tokens wants spends {last['apart']:.0%} when the tokens are unrelated and {last['neighbours']:.0%} when they "
        f"are neighbours."
    )


def _budget(data: dict[str, Any]) -> str:
    curve = data["curve"]
    dense, parts = curve["dense_perplexity"], []
    for allowed in (0.05, 0.5):
        good = [p for p in curve["points"] if p["perplexity"] <= dense * (1 + allowed) and p["budget"] < 1]
        if not good:
            parts.append(f"no budget below 1 that was measured stays within {allowed:.0%} of the dense perplexity")
        else:
            best = min(good, key=lambda p: p["budget"])
            parts.append(
                f"budget {best['budget']:g} stays within {allowed:.0%} of the dense perplexity and saves "
                f"{best['saved_all_layers']:.0%} of all layers' work"
            )
    sentence = "; ".join(parts)
    noise = (
        f" Only {curve['tokens']} tokens were predicted: give a longer text before trusting these."
        if curve["tokens"] < FEW_TOKENS
        else ""
    )
    return f"{sentence[0].upper()}{sentence[1:]}.{noise}"


def _bench(data: dict[str, Any]) -> str:
    parts = []
    for phase in sorted({r["phase"] for r in data["bench"]}):
        rows = [r for r in data["bench"] if r["phase"] == phase]
        routed = [r for r in rows if r["budget"] < 1]
        dense = [r for r in rows if r["budget"] == 1]
        if not routed or not dense:
            parts.append(f"{phase} was not measured both dense and routed")
            continue
        best, base = max(routed, key=lambda r: r["tokens_per_s"]), max(dense, key=lambda r: r["tokens_per_s"])
        parts.append(
            f"{phase} reaches {best['tokens_per_s']:.0f} tokens/s at budget {best['budget']:g} ({best['engine']}), "
            f"{best['tokens_per_s'] / base['tokens_per_s']:.2f}x the fastest dense engine ({base['engine']})"
        )
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _compare(data: dict[str, Any]) -> str:
    parts = []
    for budget in sorted({r["budget"] for r in data["compare"]}):
        rows = [r for r in data["compare"] if r["budget"] == budget]
        if len({r["recipe"] for r in rows}) > 1:
            best = min(rows, key=lambda r: r["perplexity"])
            worst = max(rows, key=lambda r: r["perplexity"])
            parts.append(
                f"at budget {budget:g}, {best['recipe']} is best ({best['perplexity']:.1f}) and {worst['recipe']} "
                f"worst ({worst['perplexity']:.1f})"
            )
    if not parts:
        return "No two recipes were measured at the same budget."
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."

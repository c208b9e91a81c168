"""A routed directory in, a smaller dense one out: the groups most worth their work stay, for all tokens alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.config import check_budget
from widellm.errors import ConfigError
from widellm.files import atomic_directory, check_new_directory
from widellm.modeling.attach import Width, detach, set_budget, width_of
from widellm.modeling.checkpoint import load
from widellm.modeling.static_model import Kept, take_out
from widellm.progress import Progress, no_progress
from widellm.provenance import versions
from widellm.sources.quiet import quiet
from widellm.sources.texts import column_of, context_of, read_texts, token_windows, window_record
from widellm.training.start import is_static, static_start

TOKENS, WINDOW = 16384, 1024
"""How much text the importance of groups is averaged over, and in windows of how many tokens (or the context)."""


@dataclass(frozen=True)
class StaticExport:
    """What `export_static` wrote."""

    budget: float
    spent: float
    """Share of the routable multiply-adds that is left."""
    heads: tuple[int, int]
    """Query heads (left, before), over all layers."""
    channels: tuple[int, int]
    """FFN channels (left, before); of a family whose FFN cannot be routed (0, 0)."""


def export_static(
    directory: str | Path,
    out: str | Path,
    budget: float | None = None,
    text: str | None = None,
    tokens: int | None = None,
    column: str | None = None,
    base: str | None = None,
    overwrite: bool = False,
    progress: Progress = no_progress,
    **kwargs: Any,
) -> StaticExport:
    """Write a routed directory of either form as a dense model with layers of different widths, to the new `out`.

    budget: share of the routable work that may be left, in (0, 1]; None: what the directory was made for. Routers that
    ignore the token (recipe static-width) say what stays, and the result computes what they computed. Of others, the
    groups with the largest mean importance per work stay, over `tokens` tokens (None: TOKENS) of `text` (None:
    python-docs). Where no text is read, because the routers say it or all groups stay, none of the three may be given.
    base: where an adapter's base model is. kwargs: those of transformers' save_pretrained (max_shard_size).

    Raises UnsupportedModelError, ConfigError, CheckpointError or TextError where a user can mend it; nothing is left at
    `out` then.
    """
    check_new_directory(out, overwrite=overwrite)
    budget = None if budget is None else check_budget(budget)
    progress("loading", 0, 1)
    model, tokenizer = load(directory, base=base)
    progress("loading", 1, 1)
    width = width_of(model)
    budget = width.budget if budget is None else budget
    record: dict[str, Any] = {}
    static = is_static(model)
    given = [name for name, value in (("text", text), ("tokens", tokens), ("column", column)) if value is not None]
    if given and (static or budget == 1.0):
        why = f"{directory} keeps the same groups for all tokens already" if static else "budget 1.0 keeps all groups"
        raise ConfigError(f"{why}: leave the {given[0]} out")
    if static:
        set_budget(model, budget)
        keep = _decided(width)
        chosen = "by the routers, which ignore the token"
    elif budget == 1.0:
        keep, chosen = [torch.ones(sub.groups, dtype=torch.bool) for sub in width.sublayers], "all"
    else:
        tokens, source = TOKENS if tokens is None else tokens, text or "python-docs"
        window = min(WINDOW, context_of(model) or WINDOW, tokens)
        windows = token_windows(tokenizer, read_texts(source, column_of(column, source)), tokens, window)
        progress("importance", 0, 1)
        static_start(model, "calibrated", windows)
        progress("importance", 1, 1)
        keep = most_important(width, budget)
        chosen, record = "largest mean importance per work", {"text": window_record(windows, source, 0)}
    before = {name: value for name, value in width.config.provenance.items() if name != "results"}
    spent = _spent(width, keep)
    provenance = {
        "base": width.config.base,
        "budget": budget,
        "spent_routable": spent,
        "chosen": chosen,
        "made_from": {"configuration": width.config.digest(), **before},
        **record,
        "versions": versions(),
    }
    kept = _per_layer(width, keep)
    layout = width.layout
    take_out(detach(model), kept, provenance)
    with atomic_directory(out, overwrite=overwrite) as folder:
        with quiet():
            model.save_pretrained(folder, **kwargs)
        tokenizer.save_pretrained(folder)
    count = len(layout.layers)
    heads, channels = (count * n for n in (layout.num_attention_heads, layout.intermediate_size))
    return StaticExport(
        budget,
        spent,
        (sum(layout.num_attention_heads if k.heads is None else k.heads.numel() for k in kept), heads),
        (sum(layout.intermediate_size if k.channels is None else k.channels.numel() for k in kept), channels),
    )


def most_important(width: Width, budget: float) -> list[Tensor]:
    """Of routers that ignore the token, the groups of largest bias whose work fits into `budget`: bool [G] each."""
    score = torch.cat([width.router(sub).bias.detach().cpu() for sub in width.sublayers])
    work = torch.cat([torch.full((sub.groups,), sub.group_cost, dtype=torch.float64) for sub in width.sublayers])
    order = score.argsort(descending=True, stable=True)
    share = work[order].cumsum(0) / work.sum()
    keep = torch.zeros(score.numel(), dtype=torch.bool)
    keep[order[share <= budget + 1e-9]] = True
    return list(keep.split([sub.groups for sub in width.sublayers]))


def _decided(width: Width) -> list[Tensor]:
    """What routers that ignore the token keep at the present budget, bool [G] each."""
    found = []
    for sub in width.sublayers:
        bias = width.router(sub if sub.follows is None else sub.follows).bias.detach().cpu()
        found.append(torch.ones_like(bias, dtype=torch.bool) if sub.threshold is None else bias > sub.threshold)
    return found


def _spent(width: Width, keep: Sequence[Tensor]) -> float:
    kept = sum(int(k.sum()) * sub.group_cost for k, sub in zip(keep, width.sublayers, strict=True))
    return kept / sum(sub.groups * sub.group_cost for sub in width.sublayers)


def _per_layer(width: Width, keep: Sequence[Tensor]) -> list[Kept]:
    """The heads and channels, in the dense model's order, that masks of groups bool [G] stand for."""
    found = [Kept(None, None) for _ in width.layout.layers]
    for sub, mask in zip(width.sublayers, keep, strict=True):
        if bool(mask.all()):
            continue
        units = mask.repeat_interleave(sub.group_size).nonzero().flatten()
        layer = found[sub.layer_index]
        if sub.kind == "attention":
            found[sub.layer_index] = Kept(units, layer.channels)
        else:
            # regrouped channels, by the numbers they have in the dense model
            channels = width.permutations[sub.layer_index][units].sort().values
            found[sub.layer_index] = Kept(layer.heads, channels)
    return found

"""What the routers kept on a text, counted: per token, per layer, per group, and for tokens that share a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widellm.modeling.attach import Width, width_of
from widellm.routing.state import SubLayer

BATCHES = (1, 2, 4, 8, 16, 32)
"""Numbers of tokens for which `shared` asks what they need together."""


@dataclass(frozen=True)
class Layer:
    """One sub-layer on the text; shares are in 0..1."""

    layer: int
    kind: str
    density: float
    """Kept over all group decisions."""
    threshold: float | None
    """The dial's setting: a group is kept where its logit exceeds this; None keeps all."""
    always: int
    """Groups that every token kept."""
    selective: int
    """Groups that some tokens kept."""
    never: int
    """Groups that no token kept."""
    entropy: float
    """Bits of one group's decision, mean over groups: 0 = the same for all tokens, 1 = kept by half of them."""
    agreement: float
    """Share of decisions that are the same for a token and the next one."""
    chance: float
    """The agreement that two unrelated tokens would have, given how often each group is kept."""
    usage: list[float]
    """Share of tokens that kept each group, in the model's order of groups."""


@dataclass(frozen=True)
class Shared:
    """Share of routable work that a batch spends when it computes each group that any of its tokens keeps."""

    tokens: int
    neighbours: float
    """Tokens that follow each other in the text."""
    apart: float
    """Tokens spread evenly over the text, which stand for sequences that have nothing to do with each other."""


@torch.inference_mode()
def run(model: Any, ids: Tensor) -> list[Tensor]:
    """Masks of one forward over ids int64 [T], at the present budget: bool [T, G] of each sub-layer, on the CPU."""
    model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    masks = []
    for sub in width_of(model).sublayers:
        keep = torch.ones(len(ids), sub.groups, dtype=torch.bool) if sub.keep is None else sub.keep[0].cpu()
        masks.append(keep.clone())
    return masks


def token_counts(width: Width, masks: list[Tensor], kind: str) -> list[list[int]]:
    """Groups kept by each token in each layer: [T][layers]."""
    counts = [mask.sum(1) for sub, mask in zip(width.sublayers, masks, strict=True) if sub.kind == kind]
    return torch.stack(counts, 1).tolist()


def token_shares(width: Width, masks: list[Tensor]) -> Tensor:
    """float64 [T]: share of the routable work that each token spent."""
    spent = sum(mask.sum(1).double() * sub.group_cost for sub, mask in zip(width.sublayers, masks, strict=True))
    assert isinstance(spent, Tensor)
    return spent / _all_work(width)


def kind_shares(width: Width, masks: list[Tensor]) -> dict[str, Tensor]:
    """kind -> float64 [T]: kept over all groups of that kind, for each token."""
    shares = {}
    for kind in width.config.kinds:
        of_kind = [mask for sub, mask in zip(width.sublayers, masks, strict=True) if sub.kind == kind]
        shares[kind] = torch.cat(of_kind, 1).double().mean(1)
    return shares


def layer(sub: SubLayer, mask: Tensor) -> Layer:
    """The figures of one sub-layer, mask bool [T, G]."""
    usage = mask.double().mean(0)
    kept = mask.sum(0)
    always, never = int((kept == len(mask)).sum()), int((kept == 0).sum())
    entropy = -(torch.xlogy(usage, usage) + torch.xlogy(1 - usage, 1 - usage)) / torch.log(torch.tensor(2.0))
    same = (mask[1:] == mask[:-1]).double().mean() if len(mask) > 1 else torch.tensor(1.0)
    return Layer(
        layer=sub.layer_index,
        kind=sub.kind,
        density=float(usage.mean()),
        threshold=sub.threshold,
        always=always,
        selective=sub.groups - always - never,
        never=never,
        entropy=float(entropy.mean()),
        agreement=float(same),
        chance=float((usage**2 + (1 - usage) ** 2).mean()),
        usage=[round(float(u), 6) for u in usage],
    )


def shared(width: Width, masks: list[Tensor]) -> list[Shared]:
    """What 1, 2, 4, ... tokens need together, as far as the text has so many."""
    tokens = len(masks[0])
    found = []
    for size in BATCHES:
        batches = tokens // size
        if batches == 0:
            break
        near = far = 0.0
        for sub, mask in zip(width.sublayers, masks, strict=True):
            used = mask[: batches * size]
            near += sub.group_cost * float(used.view(batches, size, -1).any(1).sum())
            far += sub.group_cost * float(used.view(size, batches, -1).any(0).sum())
        work = _all_work(width) * batches
        found.append(Shared(size, near / work, far / work))
    return found


def dead_weights(width: Width, layers: list[Layer]) -> int:
    """Weights of the groups that no token kept (a kept group costs one multiply-add for each of its weights)."""
    return sum(found.never * sub.group_cost for sub, found in zip(width.sublayers, layers, strict=True))


def routable_weights(width: Width) -> int:
    """Weights that belong to a group: those of q, o, gate, up and down."""
    return _all_work(width)


def _all_work(width: Width) -> int:
    return sum(sub.groups * sub.group_cost for sub in width.sublayers)

"""Keep masks to time kernels with: random ones, ones all rows share, and ones that a model's routers learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from widellm.modeling.attach import width_of


def random_mask(rows: int, groups: int, density: float) -> Tensor:
    """bool [M, G]: in every row, a random choice of the same number of groups (at least one)."""
    count = max(1, round(groups * density))
    chosen = torch.rand(rows, groups).argsort(1)[:, :count]
    return torch.zeros(rows, groups, dtype=torch.bool).scatter_(1, chosen, True)


def shared_mask(rows: int, groups: int, density: float) -> Tensor:
    """bool [M, G]: one random choice for all rows, as batch-shared routing makes it."""
    return random_mask(1, groups, density).repeat(rows, 1)


class LearnedMasks:
    """Masks with the correlations that learned routers have between rows and between groups, at any density."""

    def __init__(self, logits: dict[str, Tensor]) -> None:
        self.logits = logits
        """"attention" and "ffn" -> float32 [tokens, layers, G]: logits of the routers on a text."""

    def mask(self, kind: str, rows: int, groups: int, density: float) -> Tensor:
        """bool [M, G]: the first `rows` tokens at the middle layer, with the threshold that keeps `density` of them.

        A shape with more groups than the model takes the columns of the layers around as well; rows are repeated
        where the text has fewer.
        """
        seen = self.logits[kind]
        tokens, layers, own = seen.shape
        needed = min(layers, -(-groups // own))
        first = (layers - needed) // 2
        columns = seen[:, first : first + needed].reshape(tokens, -1)
        columns = columns.repeat(-(-rows // tokens), -(-groups // columns.shape[1]))[:rows, :groups]
        if density >= 1.0:
            return torch.ones(rows, groups, dtype=torch.bool)
        count = max(1, round(columns.numel() * density))
        threshold = columns.flatten().kthvalue(columns.numel() - count + 1).values
        return columns >= threshold


@torch.inference_mode()
def learned_masks(model: Any, ids: Tensor) -> LearnedMasks:
    """Router logits of an attached model on tokens int64 [1, T], at the budget it is set to."""
    width = width_of(model)
    found: dict[str, list[Tensor]] = {"attention": [], "ffn": []}
    with width.watch(lambda place, logits: found[width.sublayers[place].kind].append(logits.flatten(0, -2).cpu())):
        model(ids.to(model.device), use_cache=False, logits_to_keep=1)
    return LearnedMasks({kind: torch.stack(seen, 1) for kind, seen in found.items()})

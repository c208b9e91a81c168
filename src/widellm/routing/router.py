"""The router: two small linear maps from a sub-layer's input to one logit per group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def agreed(logits: Tensor, threshold: float) -> Tensor:
    """One choice for a whole batch: bool [M, G], all rows equal, from logits float32 [M, G].

    Kept are as many groups as the rows would keep on average by themselves (halves round up): those with the largest
    sums of logits, of equal ones the first. So the batch spends what its rows would, and reads far fewer weights.
    """
    rows = logits.shape[0]
    count = (2 * int((logits > threshold).sum()) + rows) // (2 * rows)
    best = logits.sum(0).argsort(descending=True, stable=True)[:count]
    keep = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    keep[best] = True
    return keep.expand(rows, -1).contiguous()


class Router(nn.Module):
    """logits = up @ (down @ x) + bias, in float32 whatever the model's dtype.

    x is the very tensor that the sub-layer receives (after the norm), `[..., D]`, or the residual before the norm where
    the configuration says so; logits are float32 `[..., G]`. capped: no wider inside than there are groups.
    A group is kept where its logit exceeds the sub-layer's threshold. Parameters: down [r, D], up [G, r], bias [G].
    """

    def __init__(
        self, hidden_size: int, groups: int, rank: int, device: torch.device | str | None = None, capped: bool = True
    ) -> None:
        super().__init__()
        if capped:
            rank = min(rank, groups)  # a wider inner map has no more functions to offer
        self.down = nn.Parameter(torch.zeros(rank, hidden_size, dtype=torch.float32, device=device))
        self.up = nn.Parameter(torch.zeros(groups, rank, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros(groups, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., D]` of any float dtype -> logits float32 `[..., G]`."""
        with torch.autocast(x.device.type, enabled=False):
            inner = nn.functional.linear(x.float(), self.down)
            return nn.functional.linear(inner, self.up, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # model.to(bfloat16) and model.half() must not round the router: follow the device, keep float32.
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not moved.is_floating_point():
                return moved
            return moved.float() if tensor.is_meta or moved.is_meta else tensor.to(moved.device)

        return super()._apply(keep_float32, recurse)

"""What a budget means while the routers change: the threshold that spends it, and the price of work there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from widellm.calibrate.dial import work_above
from widellm.routing.state import SubLayer
from widellm.training.gate import Key

GRID = tuple(round(0.05 * i, 2) for i in range(3, 21))
"""Budgets at which the table has entries."""
_REACH = 0.06
"""How far (in budget, one standard deviation) an observation moves its neighbours."""


@dataclass
class Prices:
    """Threshold and price at each budget of GRID, float64; both follow what batches show.

    A shared threshold t turns logits into decisions; which t spends a share b of the work drifts as the routers learn.
    And the loss always wants more work: the part of its gradient that only says so would move all logits together, for
    nothing, since t follows. A price p per unit of work added to the loss cancels that part. It is the multiplier of
    the constraint "spend b", found by Newton's method on the gradient with respect to a common shift.
    """

    thresholds: Tensor
    prices: Tensor
    rate: float = 0.3

    @classmethod
    def start(cls, thresholds: Sequence[float]) -> Prices:
        """From the thresholds at GRID's budgets."""
        return cls(torch.tensor(thresholds, dtype=torch.float64), torch.zeros(len(GRID), dtype=torch.float64))

    def at(self, budget: float) -> tuple[float, float]:
        """(threshold, price) at a budget, linearly between GRID's."""
        grid = torch.tensor(GRID, dtype=torch.float64)
        clamped = min(max(budget, GRID[0]), GRID[-1])
        right = int(torch.searchsorted(grid, clamped).clamp(1, len(GRID) - 1))
        share = (clamped - GRID[right - 1]) / (GRID[right] - GRID[right - 1])
        table = torch.stack([self.thresholds, self.prices])
        low, high = table[:, right - 1], table[:, right]
        threshold, price = (low + share * (high - low)).tolist()
        return threshold, price

    def observe(self, budget: float, threshold_error: float, price_error: float) -> None:
        """Move the entries near `budget` by what a batch run at them found lacking."""
        grid = torch.tensor(GRID, dtype=torch.float64)
        near = self.rate * torch.exp(-0.5 * ((grid - budget) / _REACH) ** 2)
        # more work, lower threshold: that order is kept
        self.thresholds = (self.thresholds + near * threshold_error).flip(0).cummax(0).values.flip(0)
        self.prices = (self.prices + near * price_error).clamp_min(0.0)

    def to_list(self) -> list[list[float]]:
        """Both rows as numbers that JSON gives back bit for bit."""
        return [self.thresholds.tolist(), self.prices.tolist()]

    def read(self, rows: list[list[float]]) -> None:
        """Undo `to_list`."""
        self.thresholds, self.prices = (torch.tensor(row, dtype=torch.float64) for row in rows)


def work_quantile(sublayers: Sequence[SubLayer], logits: Mapping[Key, Tensor], budget: float) -> float:
    """The threshold above which exactly the share `budget` of these logits' work lies (one draw of a batch)."""
    leaders = [sub if sub.follows is None else sub.follows for sub in sublayers]
    value, share = work_above(sublayers, [logits[s.layer_index, s.kind].flatten() for s in leaders])
    index = int(torch.searchsorted(share, budget).clamp(max=value.numel() - 2))
    return (float(value[index]) + float(value[index + 1])) / 2

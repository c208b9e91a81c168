"""Accounting of work, and the dial that turns a budget into thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from widellm.config import KINDS, check_budget
from widellm.errors import ConfigError
from widellm.families import Layout
from widellm.routing.state import SubLayer


def group_cost(layout: Layout, kind: str, group_size: int) -> int:
    """Multiply-adds per token of one kept group: q and o rows of its heads, or gate, up and down of its channels."""
    return layout.cost(kind) // layout.groups(kind, group_size)


def routable_share(layout: Layout, kinds: Sequence[str] = KINDS) -> float:
    """Multiply-adds of the kinds that are routed over those of all layer weights (k and v too)."""
    return sum(layout.cost(kind) for kind in kinds) / layout.whole_cost()


@dataclass(frozen=True)
class Work:
    """Shares of work over the real tokens counted; every figure is in 0..1."""

    budget: float
    """What was asked for."""
    saved_routable: float
    """Share of routable multiply-adds not spent."""
    saved_all_layers: float
    """Share of all layer weights' multiply-adds not spent (k and v are always spent)."""
    attention_sparsity: float
    """1 - kept / all attention groups."""
    ffn_sparsity: float
    """1 - kept / all FFN groups."""


@dataclass
class WorkCounter:
    """Adds up what the routers keep, forward after forward. Padding never counts."""

    sublayers: Sequence[SubLayer]
    routable_share: float
    kept: Tensor = field(init=False)
    """float64 [sub-layers]: groups kept so far, summed over real tokens."""
    tokens: int = 0

    def __post_init__(self) -> None:
        self.kept = torch.zeros(len(self.sublayers), dtype=torch.float64)

    def add(self, attention_mask: Tensor | None, shape: tuple[int, int]) -> None:
        """Count the forward that has just run on `shape` = (B, T); attention_mask `[B, T]`, 0 = padding."""
        mask = None if attention_mask is None else attention_mask.bool()
        tokens = shape[0] * shape[1] if mask is None else int(mask.sum())
        for i, sub in enumerate(self.sublayers):
            if sub.keep is None:
                self.kept[i] += tokens * sub.groups
            else:
                keep = sub.keep if mask is None else sub.keep[mask.to(sub.keep.device)]
                self.kept[i] += float(keep.sum())
        self.tokens += tokens

    def density(self) -> Tensor:
        """float64 [sub-layers]: kept over all groups of each."""
        groups = torch.tensor([s.groups for s in self.sublayers], dtype=torch.float64)
        return self.kept / (groups * max(self.tokens, 1))

    def work(self, budget: float) -> Work:
        """The shares of what was counted; `budget` is only copied into the result."""
        if self.tokens == 0:
            raise ConfigError("no tokens were counted, so there is no work to report: run a forward first")
        density = self.density()
        cost = torch.tensor([s.groups * s.group_cost for s in self.sublayers], dtype=torch.float64)
        groups = torch.tensor([s.groups for s in self.sublayers], dtype=torch.float64)
        saved = 1.0 - float((density * cost).sum() / cost.sum())
        sparsity = {}
        for kind in KINDS:
            of_kind = torch.tensor([s.kind == kind for s in self.sublayers])
            sparsity[kind] = 0.0  # a kind that is not routed: nothing of it is dropped
            if bool(of_kind.any()):
                sparsity[kind] = 1.0 - float((density * groups)[of_kind].sum() / groups[of_kind].sum())
        return Work(budget, saved, saved * self.routable_share, sparsity["attention"], sparsity["ffn"])


@dataclass(frozen=True)
class Dial:
    """Thresholds of every sub-layer at some budgets; between them they are interpolated linearly."""

    budgets: Tensor
    """float64 [n], ascending, in (0, 1]: realised share of routable work at each setting."""
    thresholds: Tensor
    """float32 [sub-layers, n]; sub-layers ordered by layer, attention before FFN."""

    def __post_init__(self) -> None:
        n = self.budgets.numel()
        if self.budgets.ndim != 1 or n < 1 or self.thresholds.ndim != 2 or self.thresholds.shape[1] != n:
            raise ConfigError(
                f"dial needs budgets [n] and thresholds [sub-layers, n], got {list(self.budgets.shape)} and "
                f"{list(self.thresholds.shape)}"
            )
        if n > 1 and not bool((self.budgets[1:] > self.budgets[:-1]).all()):
            raise ConfigError(f"dial budgets must ascend, got {self.budgets.tolist()}")
        if not bool(torch.isfinite(self.thresholds).all() and torch.isfinite(self.budgets).all()):
            raise ConfigError("dial holds values that are not finite: calibrate again")

    def thresholds_at(self, budget: float) -> list[float | None]:
        """Threshold of each sub-layer for `budget`; all None at 1.0.

        Above the highest setting (and below 1.0) the highest holds. Raises ConfigError below the lowest one: what the
        model does there was never measured.
        """
        budget = check_budget(budget)
        if budget == 1.0:
            return [None] * self.thresholds.shape[0]
        if budget < float(self.budgets[0]) - 1e-6:
            raise ConfigError(
                f"budget {budget} is below {float(self.budgets[0]):.2f}, the lowest this model was calibrated for: "
                f"ask for more, or calibrate again with a lower one"
            )
        last = self.budgets.numel() - 1
        if last == 0:
            return [float(t) for t in self.thresholds[:, 0]]
        clamped = min(max(budget, float(self.budgets[0])), float(self.budgets[-1]))
        right = int(torch.searchsorted(self.budgets, torch.tensor(clamped, dtype=torch.float64)).clamp(1, last))
        lo, hi = float(self.budgets[right - 1]), float(self.budgets[right])
        share = (clamped - lo) / (hi - lo)
        mixed = torch.lerp(self.thresholds[:, right - 1].double(), self.thresholds[:, right].double(), share)
        return [float(t) for t in mixed]

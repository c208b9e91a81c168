"""What a recipe minimises, batch by batch; knows nothing of optimisers, processes or files."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from widellm.calibrate.dial import router_logits
from widellm.modeling.attach import width_of
from widellm.training.gate import StraightThroughGate
from widellm.training.lora import narrow_products, without_lora
from widellm.training.losses import (
    IGNORED,
    after_head,
    feature_loss,
    head_input,
    head_loss,
    layer_outputs,
    skip_penalty,
    spent_share,
)
from widellm.training.prices import GRID, Prices, work_quantile
from widellm.training.recipes import Recipe

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
Dense = tuple[Tensor, list[Tensor]]
"""[B, T, D] before the head, and the same after each layer where there is a feature loss."""
EVALUATED = (0.5, 0.75)
"""Budgets at which a budget-conditioned model is judged while it trains, where its range holds them."""


class Objective:
    """Loss of an attached model under a recipe. `install` puts the gate in, `remove` takes it out."""

    def __init__(self, model: Any, recipe: Recipe, prices: Prices | None = None, seed: int = 0) -> None:
        self.model, self.recipe, self.seed = model, recipe, seed
        self.width = width_of(model)
        self.prices = prices
        self.gate = StraightThroughGate(seed)
        self.progress = 0.0
        """Share of the training that is done: sets the temperature."""
        self.budget = 0.0
        """Of the last batch; 0 where the recipe has none."""
        self.parts: dict[str, float] = {}
        """Terms of the last loss, unweighted."""

    def install(self) -> None:
        """Decide through the gate from now on."""
        for sub in self.width.sublayers:
            sub.gate = self.gate

    def remove(self) -> None:
        """Decide plainly again, with everything kept until a budget is set."""
        for sub in self.width.sublayers:
            sub.gate = sub.weights = sub.threshold = sub.keep = None
        self.gate.logits.clear()
        self.gate.slope.clear()

    def drawn_budget(self, draw: int) -> float:
        """The budget of batch `draw`: spread evenly over the recipe's range, without rhythm (golden ratio)."""
        assert self.recipe.budgets is not None
        low, high = self.recipe.budgets
        return low + (high - low) * ((self.seed * 0.137 + draw * _GOLDEN) % 1.0)

    def evaluated_budgets(self) -> list[float]:
        """Budgets at which the model is judged; [0] for a recipe without thresholds."""
        if self.recipe.budgets is None:
            return [0.0]
        low, high = self.recipe.budgets
        return [b for b in EVALUATED if low - 1e-6 <= b <= high + 1e-6] or [(low + high) / 2]

    def train_loss(self, call: Callable[..., Any], ids: Tensor, draw: int, noise_draw: int) -> Tensor:
        """Loss of one batch int64 [B, T], float32 []. call: the model, or what wraps it.

        draw: number of the batch, the same on all processes; noise_draw: another one on each of them.
        """
        first, last = self.recipe.temperature
        self.gate.temperature = first + (last - first) * min(max(self.progress, 0.0), 1.0)
        self.gate.noise, self.gate.draw = self.recipe.noise, noise_draw
        self.gate.shift = torch.zeros((), device=ids.device, requires_grad=True)
        budget = 0.0 if self.recipe.budgets is None else self.drawn_budget(draw)
        return self._loss(call, ids, budget, self._dense(call, ids))

    @torch.no_grad()
    def evaluation_loss(self, call: Callable[..., Any], ids: Tensor) -> Tensor:
        """Mean loss over `evaluated_budgets`, without noise, float32 []."""
        self.gate.noise, self.gate.shift = 0.0, None
        dense = self._dense(call, ids)
        return torch.stack([self._loss(call, ids, b, dense) for b in self.evaluated_budgets()]).mean()

    def _loss(self, call: Callable[..., Any], ids: Tensor, budget: float, dense: Dense | None) -> Tensor:
        recipe = self.recipe
        threshold, price = 0.0, 0.0
        if self.prices is not None:
            threshold, price = self.prices.at(budget)
        for sub in self.width.sublayers:
            sub.threshold = threshold
        self.budget = budget
        layers = [m.layer for m in self.width.layout.layers] if recipe.feature_weight else []
        with head_input(self.model) as hidden, layer_outputs(layers) as outputs, narrow_products(self.model):
            result = call(input_ids=ids, use_cache=False)
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED).flatten()
        loss = head_loss(
            hidden[0].flatten(0, 1),
            self.model.get_output_embeddings(),
            None if dense is None else dense[0].flatten(0, 1),
            labels,
            recipe.label_share,
            recipe.kl_temperature,
            *after_head(self.model.config),
        )
        # FSDP gathers its outermost parameters for the backward when the model's own output gets a gradient
        loss = loss + 0.0 * result.logits.float().sum()
        self.parts = {"prediction": float(loss.detach())}
        if recipe.feature_weight and dense is not None:
            feature = feature_loss(outputs, dense[1])
            self.parts["feature"] = float(feature.detach())
            loss = loss + recipe.feature_weight * feature
        spent = spent_share(self.width.sublayers)
        self.parts["spent"] = float(spent.detach())
        # both in evaluation too: a checkpoint that spends more than asked must not look better for it
        if self.prices is not None:
            loss = loss + price * (spent - budget)
        if recipe.penalty:
            distance = skip_penalty(self.width.sublayers, recipe.target, recipe.penalty_unit)
            self.parts["distance"] = float(distance.detach())
            loss = loss + recipe.penalty * distance
        return loss

    @torch.no_grad()
    def _dense(self, call: Callable[..., Any], ids: Tensor) -> Dense | None:
        """What the same weights without routing and adapters give the head, and after each layer; None if unused."""
        if self.recipe.label_share == 1.0 and not self.recipe.feature_weight:
            return None
        training = self.model.training
        for sub in self.width.sublayers:
            sub.threshold = None
        layers = [m.layer for m in self.width.layout.layers] if self.recipe.feature_weight else []
        self.model.eval()
        try:
            with without_lora(self.model), head_input(self.model) as hidden, layer_outputs(layers) as outputs:
                call(input_ids=ids, use_cache=False)
        finally:
            self.model.train(training)
        return hidden[0], outputs

    @torch.no_grad()
    def decisions(self) -> list[Tensor]:
        """What each sub-layer would have kept in the last batch without noise, bool [B, T, G]."""
        found = []
        for sub in self.width.sublayers:
            leader = sub if sub.follows is None else sub.follows
            assert leader.threshold is not None
            found.append(self.gate.logits[leader.layer_index, leader.kind] > leader.threshold)
        return found

    def observed(self) -> tuple[float, float]:
        """(what the threshold, what the price lacked) in the last training batch, after its backward."""
        if self.prices is None or self.gate.shift is None:
            return 0.0, 0.0
        lacked = work_quantile(self.width.sublayers, self.gate.logits, self.budget) - self.prices.at(self.budget)[0]
        cost = sum(s.groups * s.group_cost for s in self.width.sublayers)
        slope = 0.0
        for sub in self.width.sublayers:
            leader = sub if sub.follows is None else sub.follows
            slope += sub.groups * sub.group_cost / cost * float(self.gate.slope[leader.layer_index, leader.kind])
        pull = 0.0 if self.gate.shift.grad is None else float(self.gate.shift.grad)
        return lacked, -pull / max(slope, 1e-4)


def start_prices(model: Any, windows: Tensor) -> Prices:
    """Prices with the thresholds of the model's dial where all sub-layers share it, else from its logits on windows."""
    width = width_of(model)
    dial = width.dial
    if dial is not None and bool((dial.thresholds == dial.thresholds[:1]).all()):
        low, high = float(dial.budgets[0]), float(dial.budgets[-1])
        found = [dial.thresholds_at(min(max(b, low), min(high, 0.999)))[0] for b in GRID]
        return Prices.start([float(t) for t in found if t is not None])
    for sub in width.sublayers:
        sub.threshold = None
    return Prices.start(router_logits(model, windows).quantiles(GRID))

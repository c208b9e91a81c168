"""Quality against work saved, at many budgets from one model; the dense side runs once a window, not once a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widellm.errors import ConfigError, WidellmError
from widellm.modeling.attach import get_budget, set_budget, width_of

LOWEST, HIGHEST, STEPS = 0.2, 0.95, 9
_CHUNK = 128
"""Positions turned into float32 log-probabilities at a time: 128 x vocabulary floats, twice."""


@dataclass(frozen=True)
class Point:
    """The model at one budget against itself dense, on the same windows."""

    budget: float
    saved_routable: float
    saved_all_layers: float
    attention_sparsity: float
    ffn_sparsity: float
    perplexity: float
    kl_to_dense: float
    """Mean KL(dense || routed) in nats."""
    top1_agreement: float
    """Share of positions where both put the same token first."""


@dataclass(frozen=True)
class Curve:
    """Points from the highest budget (1.0, the dense model) to the lowest."""

    windows: int
    window: int
    tokens: int
    """Predicted tokens; the first of a window is context only."""
    dense_perplexity: float
    points: list[Point]


def choose_budgets(model: Any, budget: float) -> list[float]:
    """1.0, `budget`, and nine evenly spaced ones from the lowest that the model was calibrated for (or 0.2) to 0.95."""
    dial = width_of(model).dial
    if dial is None:
        raise ConfigError("this model has no dial: calibrate it (widellm prune) before asking for a report")
    lowest = min(max(LOWEST, math.ceil(float(dial.budgets[0]) * 100) / 100), HIGHEST)
    steps = [lowest + (HIGHEST - lowest) * i / (STEPS - 1) for i in range(STEPS)]
    return sorted({1.0, budget, *(round(s, 3) for s in steps)}, reverse=True)


@torch.inference_mode()
def measure(
    model: Any, windows: Tensor, budgets: Sequence[float], progress: Callable[[int, int], None] | None = None
) -> Curve:
    """Run windows int64 [n, T] dense and at every budget; the model's own budget is left as it was.

    Perplexity is token perplexity over the n * (T - 1) predicted tokens. Raises WidellmError when it is not finite.
    """
    n, length = windows.shape
    tokens = n * (length - 1)
    before = get_budget(model)
    width = width_of(model)
    counters = [width.counter() for _ in budgets]
    sums = torch.zeros(len(budgets), 3, dtype=torch.float64)
    dense_nll = 0.0
    done, total = 0, n * (len(budgets) + 1)
    try:
        for window in windows:
            ids = window[None].to(model.device)
            set_budget(model, 1.0)
            dense = model(ids, use_cache=False).logits[0]
            dense_nll += float(_against(dense, dense, ids[0])[0])
            for i, budget in enumerate(budgets):
                done += 1
                set_budget(model, budget)
                routed = dense if budget == 1.0 else model(ids, use_cache=False).logits[0]
                counters[i].add(None, (1, length))
                sums[i] += _against(dense, routed, ids[0])
                if progress is not None:
                    progress(done + 1, total)
            done += 1
    finally:
        set_budget(model, before)
    points = []
    for budget, counter, (nll, kl, agree) in zip(budgets, counters, (sums / tokens).tolist(), strict=True):
        work = counter.work(budget)
        points.append(
            Point(
                budget=budget,
                saved_routable=work.saved_routable,
                saved_all_layers=work.saved_all_layers,
                attention_sparsity=work.attention_sparsity,
                ffn_sparsity=work.ffn_sparsity,
                perplexity=_exp(nll, budget),
                kl_to_dense=kl,
                top1_agreement=agree,
            )
        )
    return Curve(n, length, tokens, _exp(dense_nll / tokens, 1.0), points)


def _against(dense: Tensor, routed: Tensor, ids: Tensor) -> Tensor:
    """float64 [3]: negative log-likelihood, KL from dense, and agreements, summed over ids[1:]; logits are [T, V]."""
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(ids) - 1, _CHUNK):
        stop = min(start + _CHUNK, len(ids) - 1)
        q = torch.log_softmax(routed[start:stop].float(), -1)
        sums[0] += float(nn.functional.nll_loss(q, ids[start + 1 : stop + 1], reduction="sum"))
        sums[2] += int((dense[start:stop].argmax(-1) == routed[start:stop].argmax(-1)).sum())
        if routed is not dense:
            p = torch.log_softmax(dense[start:stop].float(), -1)
            sums[1] += float(nn.functional.kl_div(q, p, reduction="sum", log_target=True))
    return sums


def _exp(nll: float, budget: float) -> float:
    if not math.isfinite(nll) or nll > 700:
        raise WidellmError(f"at budget {budget:g} the model's loss is {nll}: it is broken, calibrate it again")
    return math.exp(nll)

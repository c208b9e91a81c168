"""Prefill and decode speed of one model at several budgets, measured in turn in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from widellm.modeling.attach import get_budget, set_budget


@dataclass(frozen=True)
class Speed:
    """Medians over the rounds, with their spread (largest over smallest)."""

    budget: float
    prefill_tokens_per_s: float
    prefill_spread: float
    decode_tokens_per_s: float
    decode_spread: float


class Stamp(StoppingCriteria):
    """Notes the time after each token of generate(); never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _wait(device: torch.device) -> None:
    """Until what was asked of an accelerator is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.inference_mode()
def measure(
    model: Any,
    prompt: Tensor,
    budgets: Sequence[float],
    new_tokens: int = 32,
    rounds: int = 5,
    decode_prompt: int = 128,
) -> list[Speed]:
    """Speed at each budget, alternating within every round; one round before them is not counted.

    prompt: int64 [1, T], prefilled whole; decoding continues its first `decode_prompt` tokens greedily through
    generate(), and the time of a token is the median gap between two. The budget is left as it was.
    """
    before = get_budget(model)
    prompt = prompt.to(model.device)
    short = prompt[:, :decode_prompt]
    prefill: dict[float, list[float]] = {b: [] for b in budgets}
    decode: dict[float, list[float]] = {b: [] for b in budgets}
    try:
        for turn in range(rounds + 1):
            for budget in budgets:
                set_budget(model, budget)
                _wait(model.device)
                start = time.perf_counter()
                model(prompt, use_cache=True, logits_to_keep=1)
                _wait(model.device)
                took = time.perf_counter() - start
                stamp = Stamp()
                model.generate(
                    short,
                    attention_mask=torch.ones_like(short),
                    do_sample=False,
                    min_new_tokens=new_tokens,
                    max_new_tokens=new_tokens,
                    stopping_criteria=StoppingCriteriaList([stamp]),
                )
                gaps = [b - a for a, b in zip(stamp.times, stamp.times[1:], strict=False)]
                if turn > 0:
                    prefill[budget].append(took)
                    decode[budget].append(statistics.median(gaps))
    finally:
        set_budget(model, before)
    return [
        Speed(
            budget=b,
            prefill_tokens_per_s=prompt.shape[1] / statistics.median(prefill[b]),
            prefill_spread=max(prefill[b]) / min(prefill[b]),
            decode_tokens_per_s=1.0 / statistics.median(decode[b]),
            decode_spread=max(decode[b]) / min(decode[b]),
        )
        for b in budgets
    ]

"""Token perplexity, and how far a routed model is from the dense one with the same weights.

Token perplexity here: exp of the mean negative log-likelihood over all predicted tokens of non-overlapping windows;
the first token of a window is context only, so a window of n tokens predicts n - 1. It is not word perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widellm.modeling.attach import get_budget, is_attached, set_budget, width_of
from widellm.routing.budget import Work

_CHUNK = 128
"""Positions turned into float32 log-probabilities at a time: 128 x vocabulary floats."""

Done = Callable[[int, int], None]
"""Called with (done, total)."""


@dataclass(frozen=True)
class Perplexity:
    """Result of `perplexity`."""

    perplexity: float
    windows: int
    window: int
    """Tokens in a window."""
    tokens: int
    """Predicted tokens."""
    work: Work | None
    """What the routers saved; None for a dense model."""


@dataclass(frozen=True)
class Comparison:
    """A routed model against its own dense weights on the same windows."""

    dense_perplexity: float
    routed_perplexity: float
    kl_to_dense: float
    """Mean over positions of KL(dense || routed), in nats."""
    top1_agreement: float
    """Share of positions where both give the highest probability to the same token."""
    windows: int
    window: int
    tokens: int
    work: Work


@torch.inference_mode()
def perplexity(model: Any, windows: Tensor, progress: Done | None = None) -> Perplexity:
    """Token perplexity of a causal LM, dense or routed at its present budget; windows int64 [n, length]."""
    counter = width_of(model).counter() if is_attached(model) else None
    total = 0.0
    for i, window in enumerate(windows):
        ids = window.unsqueeze(0).to(model.device)
        logits = model(ids, use_cache=False).logits[0]
        total += _nll(logits, ids[0])
        if counter is not None:
            counter.add(None, (1, ids.shape[1]))
        if progress is not None:
            progress(i + 1, len(windows))
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    work = None if counter is None else counter.work(get_budget(model))
    return Perplexity(math.exp(total / tokens), windows.shape[0], windows.shape[1], tokens, work)


@torch.inference_mode()
def compare_with_dense(model: Any, windows: Tensor, progress: Done | None = None) -> Comparison:
    """Run each window dense and routed at the present budget, which is left as it was; windows int64 [n, length]."""
    budget = get_budget(model)
    counter = width_of(model).counter()
    dense_nll = routed_nll = kl = 0.0
    agree = 0
    for i, window in enumerate(windows):
        ids = window.unsqueeze(0).to(model.device)
        try:
            set_budget(model, 1.0)
            dense = model(ids, use_cache=False).logits[0]
        finally:
            set_budget(model, budget)
        routed = model(ids, use_cache=False).logits[0]
        counter.add(None, (1, ids.shape[1]))
        dense_nll += _nll(dense, ids[0])
        routed_nll += _nll(routed, ids[0])
        kl += kl_divergence(dense[:-1], routed[:-1])
        agree += int((dense[:-1].argmax(-1) == routed[:-1].argmax(-1)).sum())
        if progress is not None:
            progress(i + 1, len(windows))
    n, length = windows.shape
    tokens = n * (length - 1)
    return Comparison(
        dense_perplexity=math.exp(dense_nll / tokens),
        routed_perplexity=math.exp(routed_nll / tokens),
        kl_to_dense=kl / tokens,
        top1_agreement=agree / tokens,
        windows=n,
        window=length,
        tokens=tokens,
        work=counter.work(budget),
    )


def _nll(logits: Tensor, ids: Tensor) -> float:
    """Sum of negative log-likelihoods of ids[1:] under logits [T, V]."""
    total = 0.0
    for start in range(0, ids.numel() - 1, _CHUNK):
        part = logits[start : min(start + _CHUNK, ids.numel() - 1)].float()
        total += float(nn.functional.cross_entropy(part, ids[start + 1 : start + 1 + part.shape[0]], reduction="sum"))
    return total


def kl_divergence(dense: Tensor, routed: Tensor) -> float:
    """Sum over rows of KL(softmax(dense) || softmax(routed)) in nats; both logits [T, V]."""
    total = 0.0
    for start in range(0, dense.shape[0], _CHUNK):
        p = torch.log_softmax(dense[start : start + _CHUNK].float(), -1)
        q = torch.log_softmax(routed[start : start + _CHUNK].float(), -1)
        total += float((p.exp() * (p - q)).sum())
    return total

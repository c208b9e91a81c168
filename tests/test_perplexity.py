"""Perplexity and the comparison with dense, against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from routing_helpers import route
from tiny import tiny_model
from widellm.evaluation.perplexity import compare_with_dense, perplexity
from widellm.modeling.attach import get_budget, set_budget


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(0, 250, (3, 150), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def by_hand(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """float64 log-probabilities [n, T - 1, V] of the next token."""
    return torch.stack([torch.log_softmax(model(w[None]).logits[0, :-1].double(), -1) for w in windows])


@pytest.mark.requirement("R3")
def test_perplexity_is_exp_of_the_mean_over_predicted_tokens(windows: torch.Tensor) -> None:
    model = tiny_model("llama")
    logp = by_hand(model, windows)
    picked = logp.gather(-1, windows[:, 1:, None])
    found = perplexity(model, windows)
    assert found.perplexity == pytest.approx(math.exp(-picked.mean().item()), rel=1e-5)
    assert (found.windows, found.window, found.tokens) == (3, 150, 3 * 149)
    assert found.work is None


@pytest.mark.requirement("R1")
def test_comparison_with_dense_by_hand(windows: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    routed = by_hand(model, windows)
    set_budget(model, 1.0)
    dense = by_hand(model, windows)
    set_budget(model, 0.5)
    found = compare_with_dense(model, windows)
    assert found == compare_with_dense(model, windows)  # evaluation never samples
    assert found.kl_to_dense == pytest.approx((dense.exp() * (dense - routed)).sum(-1).mean().item(), rel=1e-4)
    assert found.top1_agreement == pytest.approx((dense.argmax(-1) == routed.argmax(-1)).double().mean().item())
    ids = windows[:, 1:, None]
    assert found.dense_perplexity == pytest.approx(math.exp(-dense.gather(-1, ids).mean().item()), rel=1e-5)
    assert found.routed_perplexity == pytest.approx(math.exp(-routed.gather(-1, ids).mean().item()), rel=1e-5)
    assert get_budget(model) == 0.5
    assert 0.0 < found.work.saved_routable < 1.0
    assert found.work == perplexity(model, windows).work


def test_at_budget_one_nothing_differs(windows: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    set_budget(model, 1.0)
    found = compare_with_dense(model, windows)
    assert found.kl_to_dense == 0.0 and found.top1_agreement == 1.0 and found.work.saved_routable == 0.0

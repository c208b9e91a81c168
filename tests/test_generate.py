"""transformers' generate() on a routed model: cache, padding, batches, beams, sampling, assisted generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from routing_helpers import route
from tiny import tiny_model
from widellm.modeling.attach import set_budget

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def greedy(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(ids, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=258, **kwargs)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 250, (1, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.requirement("R25")
@pytest.mark.requirement("R21")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cache_gives_the_same_tokens(family: str, cache: str, ids: torch.Tensor) -> None:
    model = tiny_model(family)
    route(model)
    without = greedy(model, ids, use_cache=False)
    assert torch.equal(greedy(model, ids, cache_implementation=cache), without)


@pytest.mark.requirement("R6")
@pytest.mark.requirement("R30")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_in_a_batch_is_what_it_is_alone(family: str, side: str) -> None:
    model = tiny_model(family)
    width = route(model)
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 250, (n,), generator=generator) for n in (3, 11, 7, 1, 9, 4, 10, 5)]
    longest = max(len(s) for s in sequences)
    batch = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, s in enumerate(sequences):
        where = slice(longest - len(s), longest) if side == "left" else slice(0, len(s))
        batch[row, where], mask[row, where] = s, 1
    positions = (mask.cumsum(1) - 1).clamp(0)
    with torch.no_grad():
        together = model(batch, attention_mask=mask, position_ids=positions).logits
    keeps = [sub.keep.clone() for sub in width.sublayers if sub.keep is not None]
    for row, s in enumerate(sequences):
        with torch.no_grad():
            alone = model(s[None]).logits[0]
        torch.testing.assert_close(together[row][mask[row].bool()], alone, atol=2e-5, rtol=2e-4)
        for keep, sub in zip(keeps, width.sublayers, strict=True):
            assert sub.keep is not None and torch.equal(keep[row][mask[row].bool()], sub.keep[0])


def test_padding_never_counts_as_work() -> None:
    model = tiny_model("llama")
    width = route(model)
    generator = torch.Generator().manual_seed(4)
    s = torch.randint(0, 250, (1, 6), generator=generator)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), s], 1)
    mask = (torch.arange(11) >= 5).long()[None]
    alone, together = width.counter(), width.counter()
    with torch.no_grad():
        model(s)
        alone.add(None, (1, 6))
        model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0))
        together.add(mask, (1, 11))
    assert together.tokens == 6 and together.work(0.5) == alone.work(0.5)


def test_left_padded_batch_generates_what_each_would_alone() -> None:
    model = tiny_model("llama")
    route(model)
    a, b = torch.arange(5, 12), torch.arange(20, 23)
    batch = torch.stack([a, torch.cat([torch.zeros(4, dtype=torch.long), b])])
    mask = torch.stack([torch.ones(7), torch.cat([torch.zeros(4), torch.ones(3)])]).long()
    out = greedy(model, batch, attention_mask=mask)
    assert torch.equal(out[0, 7:], greedy(model, a[None])[0, 7:])
    assert torch.equal(out[1, 7:], greedy(model, b[None])[0, 3:])


@pytest.mark.requirement("R29")
def test_beam_search_is_the_same_with_and_without_cache(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    assert torch.equal(greedy(model, ids, num_beams=3), greedy(model, ids, num_beams=3, use_cache=False))


def test_sampling_is_reproducible(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    outs = []
    for _ in range(2):
        torch.manual_seed(7)
        outs.append(model.generate(ids, do_sample=True, max_new_tokens=6, pad_token_id=258))
    assert torch.equal(*outs)


@pytest.mark.requirement("R29")
@pytest.mark.parametrize("role", ["target", "draft"])
def test_assisted_generation_equals_greedy(role: str, ids: torch.Tensor) -> None:
    routed, dense = tiny_model("llama"), tiny_model("llama", seed=5)
    route(routed)
    target, draft = (routed, dense) if role == "target" else (dense, routed)
    assert torch.equal(greedy(target, ids, assistant_model=draft), greedy(target, ids))


@pytest.mark.requirement("R26")
def test_generate_works_before_any_dial(ids: torch.Tensor) -> None:
    dense, model = tiny_model("llama"), tiny_model("llama")
    route(model)
    set_budget(model, 1.0)
    assert torch.equal(greedy(model, ids), greedy(dense, ids))

"""Self-speculative decoding: the dense model's greedy text, token for token, whatever the draft does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from routing_helpers import route
from tiny import tiny_model
from widellm import Speculative
from widellm.errors import ConfigError
from widellm.modeling.attach import get_budget, set_budget, width_of

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def greedy(model: Any, ids: torch.Tensor, method: Any = None, **kwargs: Any) -> torch.Tensor:
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 258, **kwargs}
    return model.generate(ids, custom_generate=method, **settings)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 250, (1, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.requirement("R29")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft_tokens", [1, 3, 8])
def test_equals_dense_greedy(family: str, draft_tokens: int, ids: torch.Tensor) -> None:
    model = tiny_model(family)
    route(model)
    set_budget(model, 1.0)
    expected = greedy(model, ids, min_new_tokens=12)
    for budget in (0.3, 0.5, 0.9):
        set_budget(model, 0.7)
        method = Speculative(budget, draft_tokens, confidence=0.0)
        assert torch.equal(greedy(model, ids, method, min_new_tokens=12), expected)
        assert get_budget(model) == 0.7
        assert method.passes - 1 <= method.drafted <= method.passes * draft_tokens
        assert 0 <= method.accepted <= method.drafted
        assert 1 + method.passes + method.accepted == 12  # nothing is drafted beyond the end


def test_a_perfect_draft_is_accepted_whole(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    width = route(model)
    for sub in width.sublayers:  # everything is kept: the draft is the dense model
        with torch.no_grad():
            width.router(sub).bias.fill_(100.0)
    method = Speculative(0.5, draft_tokens=3, confidence=0.0)
    greedy(model, ids, method, min_new_tokens=13, max_new_tokens=13)
    assert method.acceptance == 1.0 and method.passes == 3 and method.drafted == 9


def test_a_hopeless_draft_costs_only_time(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    width = route(model)
    set_budget(model, 1.0)
    expected = greedy(model, ids, min_new_tokens=12)
    for sub in width.sublayers:  # nothing is kept
        with torch.no_grad():
            width.router(sub).bias.fill_(-100.0)
    method = Speculative(0.5, draft_tokens=3, confidence=0.0)
    assert torch.equal(greedy(model, ids, method, min_new_tokens=12), expected)
    assert method.acceptance < 0.5


def test_an_unsure_draft_stops_early(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    method = Speculative(0.5, draft_tokens=8, confidence=1.0)
    greedy(model, ids, method, min_new_tokens=12)
    assert method.drafted == method.passes - 1  # none before the last token


def test_stops_where_greedy_stops(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    set_budget(model, 1.0)
    text = greedy(model, ids, min_new_tokens=12)[0, 9:].tolist()
    end = text[7]
    expected = greedy(model, ids, eos_token_id=end)
    assert torch.equal(greedy(model, ids, Speculative(0.6, 4, 0.0), eos_token_id=end), expected)


def test_processors_padding_streams_and_output_objects(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    set_budget(model, 1.0)
    expected = greedy(model, ids, repetition_penalty=1.3, no_repeat_ngram_size=2)
    method = Speculative(0.6, 4, 0.0)
    assert torch.equal(greedy(model, ids, method, repetition_penalty=1.3, no_repeat_ngram_size=2), expected)
    padded = torch.cat([torch.full((1, 4), 258), ids], 1)
    mask = (torch.arange(13) >= 4).long()[None]
    expected = greedy(model, padded, attention_mask=mask)
    whole = greedy(model, padded, method, attention_mask=mask, return_dict_in_generate=True)
    assert torch.equal(whole.sequences, expected)

    class Stream:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    stream = Stream()
    out = greedy(model, ids, Speculative(0.6, 4, 0.0, streamer=stream))
    assert stream.ended and stream.seen == out[0].tolist()


def test_a_sliding_window_is_no_obstacle() -> None:
    model = tiny_model("mistral", sliding_window=4)
    route(model)
    set_budget(model, 1.0)
    ids = torch.randint(0, 250, (1, 11), generator=torch.Generator().manual_seed(5))
    expected = greedy(model, ids, min_new_tokens=12)
    assert torch.equal(greedy(model, ids, Speculative(0.6, 3, 0.0), min_new_tokens=12), expected)


def test_nothing_is_read_beyond_the_last_position() -> None:
    """A model with learned positions has no row for a draft beyond its context."""
    model = tiny_model("gpt2", n_positions=20)
    route(model)
    ids = torch.randint(0, 250, (1, 9), generator=torch.Generator().manual_seed(2))
    set_budget(model, 1.0)
    expected = greedy(model, ids, min_new_tokens=11, max_new_tokens=11)
    method = Speculative(0.5, draft_tokens=8, confidence=0.0)
    assert torch.equal(greedy(model, ids, method, min_new_tokens=11, max_new_tokens=11), expected)


def test_bad_input(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="dense"):
        greedy(model, ids, Speculative())
    route(model)
    with pytest.raises(ConfigError, match="one sequence at a time, got 2"):
        greedy(model, ids.repeat(2, 1), Speculative())
    with pytest.raises(ConfigError, match="greedy"):
        greedy(model, ids, Speculative(), do_sample=True)
    with pytest.raises(ConfigError, match="padding on the left"):
        greedy(model, ids, Speculative(), attention_mask=(torch.arange(9) < 6).long()[None])
    with pytest.raises(ConfigError, match="budget must be in"):
        Speculative(draft_budget=0.0)
    with pytest.raises(ConfigError, match="at least 1"):
        Speculative(draft_tokens=0)
    with pytest.raises(ConfigError, match="lowest this model was calibrated for"):
        greedy(model, ids, Speculative(draft_budget=0.05))
    assert get_budget(model) == 0.5 and width_of(model).sublayers[0].threshold is not None

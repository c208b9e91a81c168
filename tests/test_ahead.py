"""Several native layers in one call: the same bits as one at a time, whatever happens between the layers' calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from routing_helpers import WAYS, route
from tiny import tiny_model
from widellm.kernels import cpu, fused_stack
from widellm.modeling import ahead
from widellm.modeling.attach import set_backend, set_batch_shared, set_budget, width_of

pytestmark = pytest.mark.skipif(not cpu.availability()[0], reason=f"native library: {cpu.availability()[1]}")
IDS = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))
LAYERS = 5


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each native call of several has run."""
    seen: list[int] = []
    step = fused_stack.FusedStack.step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(self.layers))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(fused_stack.FusedStack, "step", counted)
    return seen


@pytest.fixture(params=["normed", "residual", "layer-skip"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A routed model, and a copy whose layers always run one at a time: something sees them."""
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    route(model, **WAYS[request.param])
    plain = copy.deepcopy(model)
    for layer in plain.model.layers:
        layer.register_forward_hook(lambda module, args, out: None)
    return model, plain


def decode(model: Any, ids: Tensor, prompt: int, cache: Any = None, **kwargs: Any) -> tuple[list[Tensor], Any]:
    """Logits of each token after the prompt, fed one by one, with the masks of the sub-layers; and the cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config) if cache is None else cache
    found = []
    model(ids[:, :prompt], past_key_values=cache, **kwargs)
    for t in range(prompt, ids.shape[1]):
        found.append(model(ids[:, t : t + 1], past_key_values=cache, **kwargs).logits)
        found += [s.keep.clone() for s in width_of(model).sublayers if s.keep is not None]
    return found, cache


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_one_call_for_all_layers_gives_the_same_bits(
    mode: Any, batch: int, shared: bool, pair: tuple[Any, Any], calls: list[int]
) -> None:
    for m in pair:
        set_batch_shared(m, shared)
    with mode():
        (got, ours), (expected, theirs) = (decode(m, IDS[:batch], 6) for m in pair)
    assert_same(got, expected)
    assert calls == [LAYERS] * 34  # once a token, and the hooked model's layers one at a time
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) and a.keys.shape[2] == 40


@torch.no_grad()
def test_left_padding_and_budgets_between_tokens(pair: tuple[Any, Any], calls: list[int]) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    logits: list[list[Tensor]] = [[], []]
    for m, kept in zip(pair, logits, strict=True):
        cache = None
        for t in range(5, 12):
            set_budget(m, 0.3 if t % 2 else 0.9)
            ids = IDS[:, :t] if cache is None else IDS[:, t - 1 : t]
            out = m(ids, attention_mask=mask[:, :t], past_key_values=cache)
            cache = out.past_key_values
            kept.append(out.logits)
    assert_same(*logits)
    assert calls == [LAYERS] * 6


@torch.no_grad()
def test_hooks_that_see_or_change_what_is_between_the_layers(pair: tuple[Any, Any], calls: list[int]) -> None:
    model, plain = pair

    def stretch(module: Any, args: Any, out: Tensor) -> None:
        out.mul_(1.5)

    for m in pair:  # in place, where nothing but the hook itself could tell
        m.model.layers[2].register_forward_hook(stretch)
        m.model.layers[3].register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:]))
    assert_same(decode(model, IDS, 6)[0], decode(plain, IDS, 6)[0])
    assert set(calls) == {2}  # the first two layers; the others are watched, and the last has none after it


@torch.no_grad()
def test_a_wrong_guess_costs_time_only(
    pair: tuple[Any, Any], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = pair
    monkeypatch.setattr(ahead, "_watched", lambda layer: layer.seen)
    for m in pair:
        for layer in m.model.layers:
            layer.seen = m is plain
        m.model.layers[2].register_forward_hook(lambda module, args, out: out * 1.5)
    got, cache = decode(model, IDS, 6)
    expected, theirs = decode(plain, IDS, 6)
    assert_same(got, expected)
    for a, b in zip(cache.layers, theirs.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
    assert calls[:4] == [5, 2, 5, 2] and calls[-2:] == [3, 2]  # three tokens of patience, then nothing beyond the hook


@torch.no_grad()
def test_layers_left_out_and_weights_moved(pair: tuple[Any, Any], calls: list[int]) -> None:
    model, plain = pair
    first, cache = decode(model, IDS[:, :8], 6)
    for m in pair:
        m.model.layers[3].mlp.up_proj.weight.data = m.model.layers[3].mlp.up_proj.weight.data * 2
    again = model(IDS[:, 8:9], past_key_values=cache).logits
    expected, theirs = decode(plain, IDS[:, :8], 6)
    assert not torch.equal(again, first[-11])
    set_backend(model, "masked")
    set_backend(plain, "masked")
    torch.testing.assert_close(decode(model, IDS, 6)[0][0], decode(plain, IDS, 6)[0][0])
    for m in pair:
        set_backend(m, "auto")
        m.config.num_hidden_layers = 3  # transformers' loop ends early
    calls.clear()
    from transformers import DynamicCache

    caches = [DynamicCache(), DynamicCache()]
    for t in range(10):
        logits = [m(IDS[:, t : t + 1], past_key_values=c).logits for m, c in zip(pair, caches, strict=True)]
        assert torch.equal(*logits)
    assert set(calls) == {3}


@torch.no_grad()
def test_a_copy_of_the_model_looks_after_itself(pair: tuple[Any, Any]) -> None:
    model, plain = pair
    decode(model, IDS, 36)
    twin = copy.deepcopy(model)
    twin.model.layers[4].mlp.up_proj.weight.mul_(2)
    (changed, _), (own, _) = decode(twin, IDS, 20), decode(plain, IDS, 20)
    assert not all(torch.equal(a, b) for a, b in zip(changed, own, strict=True))
    assert_same(decode(model, IDS, 36)[0], decode(plain, IDS, 36)[0])
    layer = twin.model.layers[1]
    assert layer._native[-1].ahead is None and layer._native[-1].misses == 0


def test_a_result_answers_one_call_only() -> None:
    x = torch.ones(1, 1, 4)
    kwargs: dict[str, Any] = {"attention_mask": None, "use_cache": True}
    setting = (0.5, None, False)
    held: Any = None  # never reached in these cases
    kept = ahead.Ahead(x, kwargs, 0, held, setting, x, x, x)
    assert kept.take(x.clone(), (), kwargs, setting) is None
    assert kept.take(x, (1,), kwargs, setting) is None
    assert kept.take(x, (), kwargs, (0.4, None, False)) is None
    assert kept.take(x, (), {**kwargs, "more": 1}, setting) is None
    assert kept.take(x, (), {"attention_mask": None, "use_cache": False}, setting) is None
    assert kept.take(x, (), {"attention_mask": None, "used_cache": True}, setting) is None
    x.mul_(2)
    assert kept.take(x, (), kwargs, setting) is None

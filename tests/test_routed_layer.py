"""The native whole-layer decode against transformers' own modules on the same masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from routing_helpers import route
from tiny import CASES, SHAPES, tiny_model
from widellm.kernels import cpu
from widellm.modeling.attach import set_backend, set_budget, width_of
from widellm.modeling.routed_layer import RoutedLayer

pytestmark = pytest.mark.skipif(not cpu.availability()[0], reason=f"native library: {cpu.availability()[1]}")


@torch.no_grad()
def step(model: Any, prompt: torch.Tensor, more: torch.Tensor, cache: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Prefill `prompt`, then feed `more` through the cache: its logits, and every sub-layer's masks of that step."""
    from transformers import DynamicCache, StaticCache

    filled = DynamicCache(config=model.config)
    if cache == "static":
        filled = StaticCache(config=model.config, max_cache_len=64)
    model(prompt, past_key_values=filled)
    logits = model(more, past_key_values=filled).logits
    return logits, [s.keep.clone() for s in width_of(model).sublayers if s.keep is not None]


def used_natively(model: Any) -> bool:
    layers = model.model.layers
    return all(isinstance(m, RoutedLayer) and m._native[-1].fused is not None for m in layers)


@pytest.mark.requirement("R21")
@pytest.mark.parametrize(("family", "shape"), CASES)
@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_native_layers_compute_what_the_modules_compute(
    family: str, shape: str, rows: tuple[int, int], cache: str
) -> None:
    model = tiny_model(family, **SHAPES[shape])
    route(model, head_group_size=2 if shape == "mha" else 1)
    native = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 250, (rows[0], 9), generator=generator)
    more = torch.randint(0, 250, rows, generator=generator)
    set_backend(model, "masked")
    expected, keeps = step(model, prompt, more, cache)
    got, native_keeps = step(native, prompt, more, cache)
    assert used_natively(native) and not used_natively(model)
    assert all(torch.equal(a, b) for a, b in zip(keeps, native_keeps, strict=True)) and len(keeps) == 4
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_a_moved_weight_is_bound_again() -> None:
    model = tiny_model("llama")
    route(model)
    ids = torch.tensor([[5]])
    with torch.no_grad():
        before = model(ids).logits
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # new memory, same values; the old is freed
        torch.testing.assert_close(model(ids).logits, before)
        model.model.layers[0].mlp.up_proj.weight.mul_(2)  # same memory, new values
        assert not torch.equal(model(ids).logits, before)


def test_what_the_native_layer_cannot_do_goes_the_old_way() -> None:
    model = tiny_model("llama")
    route(model)
    ids = torch.tensor([[5, 6]])
    model(ids).logits.sum().backward()  # gradients are wanted
    assert not used_natively(model)
    seen = []
    hooked = model.model.layers[0].mlp.up_proj
    hooked.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with torch.no_grad():
        model(ids)
    assert model.model.layers[1]._native[-1].fused is not None
    assert model.model.layers[0]._native[-1].fused is None and len(seen) == 1  # somebody looks inside: modules run


@pytest.mark.parametrize("regroup", [True, False])
def test_budget_one_is_dense(regroup: bool) -> None:
    model, dense = tiny_model("llama"), tiny_model("llama")
    route(model, regroup=regroup)
    set_budget(model, 1.0)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        got, expected = model(ids).logits, dense(ids).logits
    if regroup:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)
    else:
        assert torch.equal(got, expected)
    assert all(s.keep is None for s in width_of(model).sublayers)

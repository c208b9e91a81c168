"""Attaching and detaching: the dense function is kept, the masks do what they say, the bits come back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from routing_helpers import oracle_logits, route
from tiny import tiny_model
from widellm.config import WidthConfig
from widellm.errors import ConfigError, UnsupportedModelError
from widellm.kernels.registry import backends
from widellm.modeling.attach import attach, detach, is_attached, set_backend, set_budget, width_of

VARIANTS = {
    "llama-gqa": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {}),
    "mistral-sliding": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3-norms": ("qwen3", {"head_dim": 24}),
}


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 250, (2, 11), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


@pytest.mark.requirement("R17")
@pytest.mark.requirement("R26")
@pytest.mark.requirement("R27")
@pytest.mark.parametrize("variant", VARIANTS)
def test_attached_model_is_dense_at_budget_one(variant: str, ids: torch.Tensor) -> None:
    family, overrides = VARIANTS[variant]
    model = tiny_model(family, **overrides)
    before = logits_of(model, ids)
    route(model, regroup=False)
    set_budget(model, 1.0)
    assert torch.equal(logits_of(model, ids), before)  # no router runs, nothing was reordered: the same bits


@pytest.mark.parametrize("variant", VARIANTS)
def test_regrouping_preserves_the_function(variant: str, ids: torch.Tensor) -> None:
    family, overrides = VARIANTS[variant]
    model = tiny_model(family, **overrides)
    before = logits_of(model, ids)
    route(model, regroup=True)
    set_budget(model, 1.0)
    torch.testing.assert_close(logits_of(model, ids), before, atol=1e-5, rtol=1e-5)


@pytest.mark.requirement("R17")
@pytest.mark.requirement("R35")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_group_size", [1, 2])
def test_masks_do_what_they_say(variant: str, head_group_size: int, ids: torch.Tensor) -> None:
    family, overrides = VARIANTS[variant]
    model = tiny_model(family, **overrides)
    dense = copy.deepcopy(model)
    width = route(model, head_group_size=head_group_size)
    expected, keeps = oracle_logits(dense, width, ids)
    for backend in [name for name, (usable, _) in backends().items() if usable] + ["auto"]:
        set_backend(model, backend)
        got = logits_of(model, ids)
        for sub, keep in zip(width.sublayers, keeps, strict=True):
            assert sub.keep is not None and torch.equal(sub.keep, keep)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-4)
    shares = torch.stack([keep.float().mean() for keep in keeps])
    assert 0.1 < shares.mean() < 0.9  # the test would prove nothing if all were kept or dropped


@pytest.mark.requirement("R46")
@pytest.mark.parametrize("variant", VARIANTS)
def test_detach_gives_back_every_bit(variant: str, ids: torch.Tensor) -> None:
    family, overrides = VARIANTS[variant]
    model = tiny_model(family, **overrides)
    before, weights = logits_of(model, ids), {k: v.clone() for k, v in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    route(model)
    logits_of(model, ids)
    detach(model)
    assert not is_attached(model)
    after = model.state_dict()
    assert list(after) == list(weights) and all(torch.equal(after[k], weights[k]) for k in weights)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(logits_of(model, ids), before)
    leftovers = [n for m in model.modules() for n in vars(m) if n in ("_width", "_parts", "_widellm")]
    assert not leftovers


@pytest.mark.requirement("R20")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
def test_layers_and_attention_run_the_librarys_own_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No modelling code is copied: what transformers defines is called, once per layer, routed as well as dense."""
    model = tiny_model(family)
    route(model)
    layer = width_of(model).layout.layers[1]
    seen: list[str] = []
    for module in (layer.layer, layer.attention, model):
        (own,) = [c for c in type(module).__mro__ if c.__module__.startswith("transformers.models.")][:1]
        forward = own.forward
        assert forward.__module__ == own.__module__

        def noted(self: Any, *args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            seen.append(_forward.__qualname__)
            return _forward(self, *args, **kwargs)

        monkeypatch.setattr(own, "forward", noted)
    set_budget(model, 0.5)
    logits_of(model, torch.randint(0, 250, (2, 33)))  # more rows than one native call takes
    counts = sorted(seen.count(name) for name in set(seen))
    assert counts == [1, model.config.num_hidden_layers, model.config.num_hidden_layers], seen


def test_two_evaluations_are_bit_equal(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    assert torch.equal(logits_of(model, ids), logits_of(model, ids))


def test_a_copy_routes_by_itself(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    twin = copy.deepcopy(model)
    set_budget(model, 1.0)
    assert width_of(twin).budget == 0.5
    assert not torch.equal(logits_of(twin, ids), logits_of(model, ids))


def test_routers_stay_float32_when_the_model_is_cast(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    width = route(model)
    weights = [p.detach().clone() for s in width.sublayers for p in width.router(s).parameters()]
    model.to(torch.bfloat16)
    now = [p for s in width.sublayers for p in width.router(s).parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, now, strict=True))
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert torch.isfinite(logits_of(model, ids)).all()


@pytest.mark.requirement("R11")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_group_size": 3}, "attention group size 3 does not divide the model's 4 query heads"),
        ({"ffn_group_size": 7}, "ffn group size 7 does not divide the model's 48 FFN channels"),
        ({"num_hidden_layers": 5}, "config is for 5 layers, the model has 2"),
    ],
)
def test_a_config_that_does_not_fit_leaves_the_model_untouched(changes: dict[str, int], message: str) -> None:
    model = tiny_model("llama")
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ConfigError, match=message):
        attach(model, WidthConfig("llama", 2, ffn_group_size=8).replace(**changes))
    assert list(model.state_dict()) == keys and [type(m) for m in model.modules()] == classes


@pytest.mark.requirement("R24")
def test_an_unknown_family_names_what_is_missing() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32))
    with pytest.raises(UnsupportedModelError, match="'bloom' is not supported.*lacks model.layers.*supported: .*llama"):
        attach(model, WidthConfig("bloom", 1))


def test_a_moved_attribute_is_named() -> None:
    model = tiny_model("llama")
    del model.model.layers[0].mlp.up_proj
    with pytest.raises(UnsupportedModelError, match=r"lacks model\.layers\.0\.mlp\.up_proj"):
        attach(model, WidthConfig("llama", 2, ffn_group_size=8))


def test_a_replaced_forward_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(UnsupportedModelError, match="mlp of layer 1 has its forward replaced"):
        attach(model, WidthConfig("llama", 2, ffn_group_size=8))


def test_attaching_twice_is_refused() -> None:
    model = tiny_model("llama")
    route(model)
    with pytest.raises(ConfigError, match="routed already"):
        attach(model, WidthConfig("llama", 2, ffn_group_size=8))


def test_bad_permutations_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="must reorder"):
        attach(model, WidthConfig("llama", 2, ffn_group_size=8), torch.zeros(2, 48, dtype=torch.int64))
    with pytest.raises(ConfigError, match="must have shape"):
        attach(model, WidthConfig("llama", 2, ffn_group_size=8), torch.arange(48))


@pytest.mark.requirement("R22")
def test_an_8b_model_attaches_on_the_meta_device() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    width = attach(model, WidthConfig("llama", 32, 4, 128, 32))
    assert len(width.sublayers) == 64 and width.router(width.sublayers[0]).down.is_meta


def test_an_adapter_on_a_projection_is_called_not_skipped(ids: torch.Tensor) -> None:
    """A projection that is more than its weight must be called: reading .weight would lose what was added to it."""

    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model, plain = tiny_model("llama"), tiny_model("llama")
    for m in (model, plain):
        route(m, regroup=False)
        m.model.layers[0].mlp.up_proj.__class__ = torch.nn.Linear
    model.model.layers[0].mlp.up_proj.__class__ = Doubled
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight *= 2
    torch.testing.assert_close(logits_of(model, ids), logits_of(plain, ids), atol=1e-5, rtol=1e-4)

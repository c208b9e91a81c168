"""Training on every kind of family: fused and transposed linears, FFNs without a module, experts, scaled heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from routing_helpers import route
from tiny import CONTRACT, tiny_model
from widellm.config import WidthConfig
from widellm.errors import ConfigError
from widellm.modeling.attach import attach, detach
from widellm.routing.state import SubLayer
from widellm.training.guards import Usage
from widellm.training.losses import skip_penalty
from widellm.training.objective import Objective, start_prices
from widellm.training.recipes import recipe_of
from widellm.training.start import prepare, random_start, static_start

pytest.importorskip("peft", reason="the extra `train` is not installed")

from widellm.training.lora import add_lora, lora_layers, merge_lora  # noqa: E402


def ids_of(batch: int = 2, tokens: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


FUSED_AND_ODD = ("phi3", "gpt2", "opt", "opt-post-norm", "falcon-gqa", "gpt_neox", "gemma2", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("name", FUSED_AND_ODD)
@pytest.mark.parametrize("recipe", ["default", "static-width"])
def test_every_kind_of_family_trains_and_merges(name: str, recipe: str) -> None:
    family, overrides = CONTRACT[name]
    model = tiny_model(family, **overrides)
    width = route(model)
    chosen = recipe_of(recipe)
    chosen = chosen.replace(score="wanda") if recipe == "static-width" else chosen
    prepare(model, chosen, "recover", ids_of(tokens=16))
    add_lora(model, 4, 8.0, 0.0)
    objective = Objective(model, chosen, start_prices(model, ids_of()))
    objective.install()
    objective.train_loss(model, ids_of(), 1, 1).backward()  # type: ignore[no-untyped-call]
    usage = Usage(width)
    usage.add(objective.decisions(), 0.5)
    assert {f"density_{k}" for k in width.config.kinds} <= set(usage.take())
    for layer in lora_layers(model):
        assert layer.lora_B["default"].weight.grad is not None
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    for sub in width.sublayers:
        sub.threshold = 0.0
    objective.gate.noise, objective.gate.shift = 0.0, None
    with torch.no_grad():
        gated = model(ids_of()).logits
        objective.remove()
        for sub in width.sublayers:
            sub.threshold = 0.0
        unmerged = model(ids_of()).logits
        merge_lora(model)
        merged = model(ids_of()).logits
    # an adapter that read a dropped group would be another function once it is folded in
    torch.testing.assert_close(gated, merged, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(unmerged, merged, atol=1e-4, rtol=1e-4)


def test_static_scores_see_q_and_not_k_in_a_fused_linear() -> None:
    # interleaved with two KV heads: [q0 q1 k v | q2 q3 k v]; q2's rows alone are large
    model = tiny_model("falcon", **CONTRACT["falcon-gqa"][1])
    fused = model.transformer.h[0].self_attention.query_key_value.weight
    with torch.no_grad():
        fused[4 * 8 : 5 * 8] *= 100
    width = attach(model, WidthConfig("falcon", 2, 1, 8, 4))
    static_start(model, "magnitude", ids_of())
    assert width.router(width.sublayers[0]).bias.argmax() == 2


@pytest.mark.parametrize("family", ["granite", "gemma2"])
def test_the_loss_is_of_what_the_model_makes_of_its_head(family: str) -> None:
    overrides = {"final_logit_softcapping": 0.5} if family == "gemma2" else {}
    model, ids = tiny_model(family, **overrides), ids_of()
    random_start(model, recipe_of("wide"), ffn_group_size=8)
    recipe = recipe_of("wide").replace(penalty=0.0, noise=0.0)
    objective = Objective(model, recipe)
    objective.install()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    router = objective.width.router(objective.width.sublayers[0])
    router.requires_grad_(True)
    loss = objective.train_loss(model, ids, 0, 0)
    loss.backward()  # type: ignore[no-untyped-call]
    found, router.up.grad = router.up.grad, None
    logits = model(ids, use_cache=False).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, router.up.grad)


def test_routers_cannot_read_a_residual_that_is_normed_afterwards() -> None:
    model = tiny_model("opt", **CONTRACT["opt-post-norm"][1])
    with pytest.raises(ConfigError, match="no norm of its own before"):
        attach(model, WidthConfig("opt", 2, 1, 8, router_input="residual"))


def test_a_random_start_keeps_what_was_routed_and_forgets_the_fingerprint() -> None:
    model = tiny_model()
    base = {"name": "somewhere", "fingerprint": "of regrouped weights"}
    attach(model, WidthConfig("llama", 2, 1, 8, kinds=("attention",), base=base))
    width = prepare(model, recipe_of("wide"), "routers", ids_of())
    assert width.config.kinds == ("attention",) and width.config.base == {"name": "somewhere"}


def test_a_target_per_kind_leaves_out_what_is_not_routed() -> None:
    sub = SubLayer("attention", 0, 3, 1, 10, threshold=0.0, weights=torch.tensor([[[1.0, 0.0, 0.0]]]))
    assert float(skip_penalty([sub], (0.5, 0.9))) == pytest.approx(2 / 3 - 0.5)
    with pytest.raises(ConfigError, match="only attention is routed"):
        WidthConfig("mixtral", 2, decision="layer", kinds=("attention",))


def test_detach_with_adapters_on_regrouped_channels_is_refused() -> None:
    model = tiny_model()
    attach(model, WidthConfig("llama", 2, 1, 8, 4), torch.arange(48).flip(0).repeat(2, 1))
    add_lora(model, 2, 4.0, 0.0)
    with pytest.raises(ConfigError, match="merge or unload"):
        detach(model)
    merge_lora(model)
    assert not hasattr(detach(model), "_widellm")


def test_one_decision_for_a_layer_holds_no_stream_after_a_forward() -> None:
    model = tiny_model()
    width = random_start(model, recipe_of("layer-skip"))
    for sub in width.sublayers:
        sub.threshold = 0.0
    with torch.no_grad():
        model(ids_of())
    assert all(sub.residual is None and sub.keep is not None for sub in width.sublayers)
    detach(model)
    assert type(model.model.layers[0].post_attention_layernorm).__name__ == "LlamaRMSNorm"

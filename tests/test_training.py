"""What is differentiated and minimised: gates, losses, adapters, prices, starts."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from routing_helpers import route
from tiny import tiny_model
from widellm.calibrate.dial import router_logits
from widellm.config import WidthConfig
from widellm.errors import ConfigError
from widellm.modeling.attach import attach, detach, set_budget, width_of
from widellm.modeling.checkpoint import load, save
from widellm.routing.state import SubLayer
from widellm.training.gate import StraightThroughGate
from widellm.training.losses import (
    IGNORED,
    feature_loss,
    head_loss,
    skip_penalty,
    spent_share,
    wanted_share,
)
from widellm.training.objective import Objective, start_prices
from widellm.training.prices import GRID, Prices, work_quantile
from widellm.training.recipes import RECIPES, Optimisation, recipe_of
from widellm.training.run import checkpoint_activations
from widellm.training.start import prepare, random_start, static_start

peft = pytest.importorskip("peft", reason="the extra `train` is not installed")

from widellm.training.lora import add_lora, lora_layers, merge_lora, without_lora  # noqa: E402


def ids_of(batch: int = 2, tokens: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def sub_layer(groups: int = 3) -> SubLayer:
    return SubLayer("ffn", 0, groups, 4, 10, threshold=0.5)


# ---- the gate ----


def test_the_gate_is_hard_forward_and_smooth_backward() -> None:
    """y = sum of weight * value: by hand, d y / d logit = value * s(1 - s) / tau for kept AND dropped groups."""
    gate = StraightThroughGate(temperature=2.0)
    logits = torch.tensor([[[1.5, -0.5, 0.4]]], requires_grad=True)
    value = torch.tensor([[[3.0, 5.0, -7.0]]], requires_grad=True)
    weights = gate(sub_layer(), logits)
    assert weights.tolist() == [[[1.0, 0.0, 0.0]]]
    (weights * value).sum().backward()
    for i, (logit, v) in enumerate(zip([1.5, -0.5, 0.4], [3.0, 5.0, -7.0], strict=True)):
        s = 1 / (1 + math.exp(-(logit - 0.5) / 2.0))
        assert logits.grad is not None and float(logits.grad[0, 0, i]) == pytest.approx(v * s * (1 - s) / 2.0, rel=1e-5)
    assert value.grad is not None and value.grad.tolist() == [[[1.0, 0.0, 0.0]]]


def test_noise_depends_on_the_draw_and_the_sub_layer_only() -> None:
    gate = StraightThroughGate(seed=3, noise=1.0, draw=5)
    logits = torch.zeros(1, 200, 3)
    first = gate(sub_layer(), logits)
    torch.manual_seed(99)
    assert torch.equal(first, gate(sub_layer(), logits))
    gate.draw = 6
    assert not torch.equal(first, gate(sub_layer(), logits))
    other = sub_layer()
    other.layer_index = 1
    gate.draw = 5
    assert not torch.equal(first, gate(other, logits))


def test_noise_one_is_the_two_class_gumbel_softmax() -> None:
    """P(keep) of the straight-through Gumbel-softmax over logits (a, b) is sigmoid(a - b), whatever tau."""
    gate = StraightThroughGate(noise=1.0, temperature=5.0)
    sub = sub_layer(1)
    sub.threshold = 0.0
    kept = gate(sub, torch.full((1, 20000, 1), 0.8)).mean()
    assert float(kept) == pytest.approx(1 / (1 + math.exp(-0.8)), abs=0.01)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_masked_training_forward_is_the_routed_inference_forward(family: str) -> None:
    model = tiny_model(family)
    width = route(model)
    with torch.no_grad():
        expected = model(ids_of()).logits
        keeps = [s.keep for s in width.sublayers]
        for sub in width.sublayers:
            sub.gate = StraightThroughGate()
        found = model(ids_of()).logits
    assert all(torch.equal(a, s.keep) for a, s in zip(keeps, width.sublayers, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_reach_routers_and_backbone_as_the_estimator_says() -> None:
    """One FFN, written by hand: out = down(sum over groups of w_g * h_g)."""
    model = tiny_model()
    width = route(model, regroup=False)
    sub, mlp = width.sublayers[1], width.layout.layers[0].mlp
    sub.gate, sub.threshold = StraightThroughGate(), 0.0
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    mlp(x).square().sum().backward()
    router, found = width.router(sub), {}
    found = {n: p.grad.clone() for n, p in mlp.named_parameters()}

    down, up, bias = (p.detach().clone().requires_grad_() for p in (router.down, router.up, router.bias))
    gate_w, up_w, down_w = (m.weight.detach().clone().requires_grad_() for m in mlp._parts[:3])
    logits = (x @ down.T) @ up.T + bias
    soft = torch.sigmoid(logits)
    weight = (logits > 0).float() + soft - soft.detach()
    h = nn.functional.silu(x @ gate_w.T) * (x @ up_w.T)
    h = torch.cat([h[..., g * 8 : (g + 1) * 8] * weight[..., g : g + 1] for g in range(6)], -1)
    (h @ down_w.T).square().sum().backward()
    by_hand = {
        "router.down": down.grad,
        "router.up": up.grad,
        "router.bias": bias.grad,
        "gate_proj.weight": gate_w.grad,
        "up_proj.weight": up_w.grad,
        "down_proj.weight": down_w.grad,
    }
    assert set(found) == set(by_hand)
    for name, gradient in by_hand.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    # dropped groups teach the router: their rows of `up` have gradients
    dropped = ~(logits.detach() > 0).any(1)[0]
    if bool(dropped.any()):
        assert bool((found["router.bias"][dropped] != 0).all())


@pytest.mark.parametrize("recipe", ["default", "wide"])
def test_activation_checkpointing_gives_identical_gradients(recipe: str) -> None:
    found = []
    for checkpointing in (False, True):
        model = tiny_model(seed=4)
        if recipe == "default":
            route(model)
        else:
            random_start(model, recipe_of("wide"), ffn_group_size=8, router_rank=4)
        add_lora(model, 2, 4.0, 0.0)
        chosen = recipe_of(recipe).replace(noise=1.0, feature_weight=0.5)
        objective = Objective(model, chosen, start_prices(model, ids_of()) if recipe == "default" else None)
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name or ".router." in name)
        objective.install()
        if checkpointing:
            checkpoint_activations(model)
        model.train()
        objective.train_loss(model, ids_of(), 3, 3).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 2 * 7 * 2 + 4 * 3
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


# ---- losses ----


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_head_loss_against_the_whole_array_of_logits(share: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, d, v = 300, 7, 11
    head = nn.Linear(d, v)
    hidden = torch.randn(rows, d, generator=generator, requires_grad=True)
    target = torch.randn(rows, d, generator=generator)
    labels = torch.randint(v, (rows,), generator=generator)
    labels[::50] = IGNORED
    found = head_loss(hidden, head, target, labels, share, temperature)
    (found * 3).backward()
    gradient = hidden.grad
    again = hidden.detach().requires_grad_()
    logits = head(again)
    p = torch.softmax(head(target) / temperature, -1)
    kl = (p * (p.log() - torch.log_softmax(logits / temperature, -1))).sum(-1).mean() * temperature**2
    expected = (1 - share) * kl + share * nn.functional.cross_entropy(logits, labels)
    (expected * 3).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, again.grad)


def test_feature_loss_is_relative_to_each_token() -> None:
    dense = torch.tensor([[[1.0, 0.0], [1000.0, 0.0]]])
    routed = torch.tensor([[[1.0, 1.0], [1000.0, 500.0]]])
    assert float(feature_loss([routed], [dense])) == pytest.approx((1.0 + 0.25) / 2)


def test_work_and_penalty_by_hand() -> None:
    attention, ffn = SubLayer("attention", 0, 2, 1, 10), SubLayer("ffn", 0, 4, 4, 30)
    attention.weights = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    ffn.weights = torch.tensor([[[1.0, 1.0, 1.0, 0.0]]], requires_grad=True)
    subs = [attention, ffn]
    assert spent_share(subs).item() == pytest.approx((10 + 90) / 140)
    assert skip_penalty(subs, 0.5).item() == pytest.approx(0.5 - (0.5 + 0.25) / 2)
    assert skip_penalty(subs, 0.5, unit="work").item() == pytest.approx(0.5 - 40 / 140)
    assert skip_penalty(subs, (0.5, 0.5)).item() == pytest.approx((0.0 + 0.25) / 2)
    assert wanted_share(subs, (0.5, 0.0)) == pytest.approx(130 / 140) and wanted_share(subs, 0.5) == 0.5
    spent_share(subs).backward()
    assert ffn.weights.grad is not None and float(ffn.weights.grad[0, 0, 0]) == pytest.approx(30 / 140)


def test_the_dense_teacher_has_neither_routing_nor_adapters() -> None:
    model = tiny_model()
    dense = copy.deepcopy(model)(ids_of(), output_hidden_states=True).hidden_states[-1]
    route(model, regroup=False)
    add_lora(model, 2, 4.0, 0.5)
    for layer in lora_layers(model):
        nn.init.normal_(layer.lora_B["default"].weight)
    objective = Objective(model, recipe_of("default"), start_prices(model, ids_of()))
    objective.install()
    model.train()
    found = objective._dense(model, ids_of())
    assert found is not None
    hidden = found[0]
    assert model.training
    torch.testing.assert_close(hidden, dense, rtol=1e-5, atol=1e-5)


# ---- prices ----


def test_work_quantile_spends_the_budget() -> None:
    subs = [SubLayer("attention", 0, 4, 1, 7), SubLayer("ffn", 0, 6, 4, 30)]
    logits = {("attention"): torch.randn(1, 50, 4), ("ffn"): torch.randn(1, 50, 6)}
    seen = {(0, kind): value for kind, value in logits.items()}
    for budget in (0.2, 0.5, 0.9):
        threshold = work_quantile(subs, seen, budget)
        kept = sum(s.group_cost * float((seen[0, s.kind] > threshold).sum()) for s in subs)
        assert kept / (50 * (4 * 7 + 6 * 30)) == pytest.approx(budget, abs=0.01)


def test_prices_follow_nearby_observations_and_keep_their_order() -> None:
    prices = Prices.start([1.0 - 2 * b for b in GRID])
    threshold, price = prices.at(0.5)
    assert (threshold, price) == (pytest.approx(0.0), 0.0)
    for _ in range(30):
        threshold, price = prices.at(0.5)
        prices.observe(0.5, 0.3 - threshold, 2.0 - price)
    threshold, price = prices.at(0.5)
    assert threshold == pytest.approx(0.3, abs=0.01) and price == pytest.approx(2.0, abs=0.01)
    assert prices.at(0.95)[0] == pytest.approx(-0.9, abs=0.02)
    assert bool((prices.thresholds[1:] <= prices.thresholds[:-1]).all())
    again = Prices.start([0.0] * len(GRID))
    again.read(prices.to_list())
    assert torch.equal(again.thresholds, prices.thresholds) and torch.equal(again.prices, prices.prices)


def test_the_price_takes_the_common_part_of_the_gradient_out() -> None:
    model = tiny_model()
    width = route(model)
    objective = Objective(model, recipe_of("default"), start_prices(model, ids_of(8, 32)))
    objective.install()
    model.train()
    for step in range(60):
        model.zero_grad()
        objective.drawn_budget = lambda draw: 0.6  # type: ignore[method-assign]
        objective.train_loss(model, ids_of(8, 32), step, step).backward()
        assert objective.prices is not None and objective.gate.shift is not None
        lacked, price = objective.observed()
        objective.prices.observe(0.6, lacked, price)
    pulls = []
    for step in range(60, 80):
        model.zero_grad()
        objective.train_loss(model, ids_of(8, 32), step, step).backward()
        with_price = float(objective.gate.shift.grad)  # type: ignore[union-attr, arg-type]
        kept, objective.prices.prices = objective.prices.prices, torch.zeros(len(GRID), dtype=torch.float64)
        objective.train_loss(model, ids_of(8, 32), step, step).backward()
        pulls.append((with_price, float(objective.gate.shift.grad)))  # type: ignore[union-attr, arg-type]
        objective.prices.prices = kept
    mean = [sum(p[i] for p in pulls) / len(pulls) for i in (0, 1)]
    assert mean[1] < 0  # without a price, more work always looks better
    assert abs(mean[0]) < 0.3 * abs(mean[1])
    assert spent_share(width.sublayers).item() == pytest.approx(0.6, abs=0.1)


# ---- adapters ----


@pytest.mark.requirement("R14")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_folds_lora_in(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    width = route(model)
    add_lora(model, 4, 8.0, 0.0)
    assert len(lora_layers(model)) == 14
    generator = torch.Generator().manual_seed(0)
    for layer in lora_layers(model):
        assert layer.lora_A["default"].weight.dtype == torch.float32
        nn.init.normal_(layer.lora_B["default"].weight, std=0.05, generator=generator)
    for sub in width.sublayers:
        sub.gate = StraightThroughGate()
    with torch.no_grad():
        weighed = model(ids_of()).logits
        strides = [m.down_proj.weight.stride() for m in width.layout.layers]
        base = width.layout.layers[0].down_proj.weight.detach().clone()
        layer = next(x for x in lora_layers(model) if x.get_base_layer() is width.layout.layers[0].down_proj)
        delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        assert merge_lora(model) == 14 and not lora_layers(model)
        assert torch.equal(width.layout.layers[0].down_proj.weight, (base.float() + delta).to(dtype))
        assert strides == [m.down_proj.weight.stride() for m in width.layout.layers]
        for sub in width.sublayers:
            sub.gate = None
        merged = model(ids_of()).logits
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.25}
    torch.testing.assert_close(merged, weighed, **tolerance)


def test_adapters_are_refused_twice_and_switch_off() -> None:
    model = tiny_model()
    route(model)
    set_budget(model, 1.0)
    with torch.no_grad():
        before = model(ids_of()).logits
        add_lora(model, 2, 4.0, 0.0)
        torch.testing.assert_close(model(ids_of()).logits, before)
        for layer in lora_layers(model):
            nn.init.normal_(layer.lora_B["default"].weight)
        assert not torch.allclose(model(ids_of()).logits, before)
        with without_lora(model):
            torch.testing.assert_close(model(ids_of()).logits, before)
    with pytest.raises(ConfigError, match="already"):
        add_lora(model, 2, 4.0, 0.0)


# ---- starts, and routers on the residual ----


def test_routers_on_the_residual_read_what_the_norm_receives(tmp_path: Any) -> None:
    model = tiny_model()
    dense = copy.deepcopy(model)
    width = random_start(model, recipe_of("wide"), ffn_group_size=8, router_rank=6, seed=1)
    assert width.router(width.sublayers[0]).down.shape == (6, 32)  # not capped at 4 heads
    residuals: list[Tensor] = []
    hooks = []
    for modules in width.layout.layers:
        for norm in (modules.attention_norm, modules.ffn_norm):
            hooks.append(norm.register_forward_pre_hook(lambda m, a: residuals.append(a[0])))
    for sub in width.sublayers:
        sub.threshold = 0.1
    with torch.no_grad():
        logits = model(ids_of()).logits
    for hook in hooks:
        hook.remove()
    for sub, residual in zip(width.sublayers, residuals, strict=True):
        assert torch.equal(sub.keep, width.router(sub)(residual) > 0.1)
        assert sub.residual is None
    seen: dict[int, Tensor] = {}
    with width.watch(seen.__setitem__), torch.no_grad():
        model(ids_of())
    for place, (sub, residual) in enumerate(zip(width.sublayers, residuals, strict=True)):
        torch.testing.assert_close(seen[place], width.router(sub)(residual))
    from widellm.calibrate.dial import measure_dial
    from widellm.modeling.attach import set_dial

    set_dial(model, measure_dial(model, ids_of(4, 32), ids_of(2, 32), lambda *a: None))
    save(model, tmp_path / "m", _tokenizer())
    again, _ = load(tmp_path / "m", budget=0.6)
    set_budget(model, 0.6)
    with torch.no_grad():
        assert torch.equal(again(ids_of()).logits, model(ids_of()).logits)
    detach(model)
    with torch.no_grad():
        assert torch.equal(model(ids_of()).logits, dense(ids_of()).logits)
    assert logits.shape == (2, 9, 272)


def _tokenizer() -> Any:
    from tiny import tiny_tokenizer

    return tiny_tokenizer()


def test_one_decision_for_a_layer() -> None:
    model = tiny_model()
    width = random_start(model, recipe_of("layer-skip"))
    for sub in width.sublayers:
        sub.threshold = 0.0
    with torch.no_grad():
        model(ids_of(1, 40))
    for attention, ffn in zip(width.sublayers[::2], width.sublayers[1::2], strict=True):
        assert attention.groups == ffn.groups == 1 and torch.equal(attention.keep, ffn.keep)
    assert any(0 < float(s.keep.float().mean()) < 1 for s in width.sublayers)
    gate = StraightThroughGate()
    for sub in width.sublayers:
        sub.gate = gate
    model(ids_of(1, 40)).logits.sum().backward()
    assert width.router(width.sublayers[0]).up.grad is not None
    assert width.router(width.sublayers[1]).up.grad is None
    with pytest.raises(ConfigError, match="one group"):
        attach(tiny_model(), WidthConfig("llama", 2, 1, 8, decision="layer"))


@pytest.mark.parametrize("score", ["calibrated", "magnitude", "wanda", "flap"])
def test_static_width_keeps_the_same_groups_for_all_tokens(score: str) -> None:
    model = tiny_model()
    width = route(model)
    # a channel group that matters by every score: large weights on both sides, and a router that says so
    mlp = width.layout.layers[0].mlp
    with torch.no_grad():
        mlp.down_proj.weight[:, :8] *= 20
        mlp.up_proj.weight[:8] *= 20
        width.router(width.sublayers[1]).bias[0] += 20
    static_start(model, score, ids_of(3, 40))
    # the dial was of other routers: training starts from thresholds of these
    assert width.dial is None
    first = Prices.start([float(t) for t in router_logits(model, ids_of(3, 40)).quantiles(GRID)])
    assert torch.equal(start_prices(model, ids_of(3, 40)).thresholds, first.thresholds)
    for sub in width.sublayers:
        sub.threshold = float(width.router(sub).bias.detach().median())
    with torch.no_grad():
        model(ids_of(2, 30))
    for sub in width.sublayers:
        assert bool((sub.keep == sub.keep[:1, :1]).all())
    assert int(width.router(width.sublayers[1]).bias.argmax()) == 0


def test_starts_say_what_they_need() -> None:
    dense, routed = tiny_model(), tiny_model()
    route(routed)
    with pytest.raises(ConfigError, match="widellm prune"):
        prepare(dense, recipe_of("default"), "recover", ids_of())
    with pytest.raises(ConfigError, match="--stage routers"):
        prepare(dense, recipe_of("wide"), "recover", ids_of())
    with pytest.raises(ConfigError, match="residual"):
        prepare(routed, recipe_of("wide"), "recover", ids_of())
    width = prepare(routed, recipe_of("wide"), "routers", ids_of())
    assert width.config.router_input == "residual" and width.config.ffn_group_size == 8


def test_recipes_are_checked() -> None:
    assert set(RECIPES) == {"default", "wide", "skipgpt", "layer-skip", "static-width"}
    with pytest.raises(ConfigError, match="default, wide"):
        recipe_of("best")
    with pytest.raises(ConfigError, match="noise"):
        recipe_of("wide").replace(nois=1)
    with pytest.raises(ConfigError, match="routers, recover"):
        recipe_of("wide").stage("third")


def test_one_logit_learns_like_the_two_classes_of_the_published_router() -> None:
    """The published router, Linear, Linear to 2 classes, straight-through Gumbel: same path as ours under AdamW."""
    from widellm.routing.router import Router
    from widellm.training.trainer import parameter_groups

    torch.manual_seed(0)
    d, r, g = 6, 4, 3
    first, second = nn.Linear(d, r).double(), nn.Linear(r, 2 * g).double()
    nn.init.zeros_(first.bias)
    first.bias.requires_grad_(False)  # ours has none inside: it would only add to the second's
    nn.init.zeros_(second.bias)
    ours = nn.ModuleDict({"router": Router(d, g, r, capped=False)})
    router = ours["router"]
    with torch.no_grad():
        router.down.copy_(first.weight)
        by_class = second.weight.view(g, 2, r)
        router.up.copy_(by_class[:, 0] - by_class[:, 1])
    stage = Optimisation(router_lr=1e-2, weight_decay=0.1)
    theirs_optimiser = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2, weight_decay=0.1)
    ours_optimiser = torch.optim.AdamW(parameter_groups(ours, stage, recipe_of("wide")))
    gate, sub = StraightThroughGate(seed=1, noise=1.0, temperature=2.0), sub_layer(g)
    sub.threshold = 0.0
    value = torch.randn(1, 50, g)
    for step in range(20):
        x = torch.randn(1, 50, d)
        gate.draw = step
        theirs = second(first(x.double())).view(1, 50, g, 2)
        noise = gate._logistic((0, "ffn"), torch.empty(1, 50, g)).double()  # difference of two Gumbel draws
        soft = torch.softmax((theirs + torch.stack([noise, torch.zeros_like(noise)], -1)) / 2.0, -1)[..., 0]
        hard = (soft > 0.5).double()
        for optimiser, weight in (
            (theirs_optimiser, hard + soft - soft.detach()),
            (ours_optimiser, gate(sub, router(x)).double()),
        ):
            optimiser.zero_grad()
            ((weight * value).sum(-1) - 1).square().mean().backward()
            optimiser.step()
    by_class = second.weight.view(g, 2, r)
    torch.testing.assert_close(router.up.double(), by_class[:, 0] - by_class[:, 1], rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(router.down.double(), first.weight, rtol=2e-3, atol=2e-4)


def test_training_a_detached_model_leaves_nothing() -> None:
    model = tiny_model()
    route(model)
    objective = Objective(model, recipe_of("default"), start_prices(model, ids_of()))
    objective.install()
    model.train()
    objective.train_loss(model, ids_of(), 0, 0).backward()
    objective.remove()
    width = width_of(model)
    assert all(s.gate is s.weights is s.threshold is None for s in width.sublayers)

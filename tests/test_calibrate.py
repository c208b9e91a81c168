"""Calibration: the walk against plain autograd, the sums against loops, the result against what it promises."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from routing_helpers import route
from tiny import FAMILIES, tiny_model
from widellm.calibrate import calibration as module
from widellm.calibrate.calibration import Settings, calibrate
from widellm.calibrate.dial import spent
from widellm.calibrate.statistics import FLOOR, RIDGE, SENSITIVITY, Curvature, Regression, group_importance
from widellm.calibrate.stream import Sample, sampled_label_gradient, walk_back
from widellm.errors import ConfigError, TextError
from widellm.families import locate
from widellm.modeling.attach import is_attached, set_budget, width_of

SETTINGS = Settings(head_group_size=1, ffn_group_size=8, router_rank=4)


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    # text with some structure: runs of neighbouring ids
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 200, (24, 8, 1), generator=generator)
    return (starts + torch.arange(8)).reshape(24, 64)


def autograd_samples(model: Any, window: torch.Tensor, gradient: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """Gradients of every sub-layer's output by one ordinary backward through the whole model."""
    outputs: dict[tuple[int, str], torch.Tensor] = {}
    handles = []
    for i, layer in enumerate(model.model.layers):
        for kind, part in (("attention", layer.self_attn.o_proj), ("ffn", layer.mlp)):

            def note(m: Any, a: Any, out: torch.Tensor, key: tuple[int, str] = (i, kind)) -> None:
                out.retain_grad()
                outputs[key] = out

            handles.append(part.register_forward_hook(note))
    model(window[None], use_cache=False).logits[0].backward(gradient)
    for handle in handles:
        handle.remove()
    return {key: out.grad[0] for key, out in outputs.items() if out.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routed", [False, True])
def test_the_walk_gives_what_autograd_gives(family: str, routed: bool, windows: torch.Tensor) -> None:
    model = tiny_model(family)
    if routed:
        route(model)
    window, gradient = windows[0], torch.randn(64, 272)
    expected = autograd_samples(model, window, gradient)
    trainable = [p.requires_grad for p in model.parameters()]
    seen = list(walk_back(model, locate(model), window, lambda logits: gradient))
    assert [a.layer_index for a, _ in seen] == [1, 0]  # from the top down
    for sample in (s for pair in seen for s in pair):
        assert all(t.dtype == torch.float32 for t in (sample.x, sample.h, sample.g))
        torch.testing.assert_close(sample.g, expected[sample.layer_index, sample.kind], atol=1e-4, rtol=1e-3)
    assert [p.requires_grad for p in model.parameters()] == trainable
    assert len(list(walk_back(model, locate(model), window, lambda logits: gradient, lowest=1))) == 1


def test_labels_are_drawn_from_the_models_own_prediction() -> None:
    row = torch.tensor([2.0, 0.0, -1.0, 1.0, float("-inf"), -3.0, 0.5])
    gradient = sampled_label_gradient(torch.Generator().manual_seed(3))(row.repeat(20000, 1))
    drawn = torch.softmax(row, -1) - gradient  # one-hot rows
    assert torch.equal(drawn.round().sum(-1), torch.ones(20000)) and float(drawn[:, 4].abs().max()) == 0.0
    torch.testing.assert_close(drawn.mean(0), torch.softmax(row, -1), atol=0.015, rtol=0.0)


def test_the_walk_shows_heads_and_channels_that_were_dropped(windows: torch.Tensor) -> None:
    """A dropped head has no query, so what o receives for it means nothing: importance is not taken from it."""
    model = tiny_model("llama")
    width = route(model)
    for sub in width.sublayers:
        sub.threshold = 1e9 if sub.layer_index == 1 else None  # the last layer drops everything, the first nothing
    routed = {s.kind: s for pair in walk_back(model, locate(model), windows[0], torch.ones_like) for s in pair[:2]
              if s.layer_index == 1}  # fmt: skip
    set_budget(model, 1.0)
    dense = {s.kind: s for pair in walk_back(model, locate(model), windows[0], torch.ones_like) for s in pair[:2]
             if s.layer_index == 1}  # fmt: skip
    torch.testing.assert_close(routed["attention"].h, dense["attention"].h, atol=1e-5, rtol=1e-4)
    assert routed["ffn"].h.abs().max() > 0


def _sample(kind: str = "ffn", tokens: int = 200) -> Sample:
    return Sample(0, kind, torch.randn(tokens, 6), torch.randn(tokens, 12), torch.randn(tokens, 5) * 0.3)


def test_curvature_is_what_a_loop_says() -> None:
    samples, curvature = [_sample(tokens=7), _sample(tokens=5)], Curvature()
    for s in samples:
        curvature.add(s)
    g, h = torch.cat([s.g for s in samples]), torch.cat([s.h for s in samples])
    fisher = sum(torch.outer(row, row) for row in g) / len(g)
    torch.testing.assert_close(curvature.fisher, fisher)
    w = torch.randn(5, 12)
    scores = [h[:, j].square().mean() * (w[:, j] @ fisher @ w[:, j]) for j in range(12)]
    torch.testing.assert_close(curvature.channel_scores(w), torch.stack(scores))
    importance = group_importance(h, curvature.group_forms(w, 3))
    for t in range(len(h)):
        for group in range(3):
            contribution = w[:, group * 4 : group * 4 + 4] @ h[t, group * 4 : group * 4 + 4]
            assert importance[t, group].item() == pytest.approx((contribution @ fisher @ contribution).item(), rel=1e-4)


def test_the_fit_is_ridge_regression_of_the_log_importance() -> None:
    samples, curvature = [_sample() for _ in range(3)], Curvature()
    for s in samples:
        curvature.add(s)
    forms, cost = curvature.group_forms(torch.randn(5, 12), 3), 17
    regression = Regression(forms, 0.5, cost, 6)
    targets, total, count = [], 0.0, 0
    for s in samples:
        importance = group_importance(s.h, forms)
        total, count = total + importance.mean(1).sum().item(), count + len(importance)
        y = torch.log(importance + FLOOR * total / count) - math.log(cost)
        targets.append(y + SENSITIVITY * torch.log(s.g.square().sum(1) / 0.5 + 1e-4)[:, None])
        regression.add(s)
    x, y = torch.cat([s.x for s in samples]).double(), torch.cat(targets).double()
    z = (x - x.mean(0)) / x.std(0, correction=0)
    weights = torch.linalg.solve(z.t() @ z / len(z) + RIDGE * torch.eye(6).double(), z.t() @ (y - y.mean(0)) / len(z))
    solution = regression.solve(rank=3)
    got = (x.float() @ solution.down.t()) @ solution.up.t() + solution.bias
    fitted = z @ weights
    torch.testing.assert_close(got - got.mean(0), (fitted - fitted.mean(0)).float(), atol=2e-3, rtol=2e-3)
    residual = ((y - y.mean(0) - fitted).square().sum() / (y - y.mean(0)).square().sum()).item()
    assert solution.r_squared == pytest.approx(1 - residual, abs=1e-3)
    # the mean predicted importance over cost of each group is the mean true one, over the sampled rows
    taken = torch.cat([group_importance(s.h, forms) for s in samples])
    torch.testing.assert_close(got.exp().mean(0), taken.mean(0) / cost, atol=0.0, rtol=2e-2)


def test_a_low_rank_fit_keeps_what_varies_most() -> None:
    sample, curvature = _sample(tokens=400), Curvature()
    curvature.add(sample)
    regression = Regression(curvature.group_forms(torch.randn(5, 12), 6), 0.5, 1, 6)
    regression.add(sample)
    full, low = regression.solve(rank=6), regression.solve(rank=2)
    assert low.down.shape == (2, 6) and low.up.shape == (6, 2)
    assert 0 <= low.r_squared <= full.r_squared + 1e-6


@pytest.fixture(scope="module")
def calibrated(windows: torch.Tensor) -> Any:
    model = tiny_model("llama")
    calibrate(model, windows, SETTINGS)
    return model


@pytest.mark.parametrize("budget", [0.25, 0.4, 0.5, 0.65, 0.8, 0.9, 0.97])
def test_the_dial_spends_what_was_asked(calibrated: Any, windows: torch.Tensor, budget: float) -> None:
    set_budget(calibrated, budget)
    assert abs(spent(calibrated, windows) - budget) < 0.05  # a tiny random model; the real one is held to 0.02


def test_routers_choose_by_token(calibrated: Any, windows: torch.Tensor) -> None:
    """Logits vary from row to row, and the masks with them."""
    set_budget(calibrated, 0.5)
    with torch.no_grad():
        calibrated(windows[:1], use_cache=False)
    shares = [s.keep[0].float().mean(0) for s in width_of(calibrated).sublayers if s.keep is not None]
    assert sum(int(((x > 0.05) & (x < 0.95)).sum()) for x in shares) >= 5


@pytest.mark.requirement("R5")
@pytest.mark.requirement("R15")
def test_the_same_seed_gives_the_same_routers_and_it_is_recorded(windows: torch.Tensor) -> None:
    models = [tiny_model("llama") for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        calibrate(model, windows, dataclasses.replace(SETTINGS, seed=seed), text={"sha256": "x"}, budget=0.6)
    biases = [width_of(m).router(width_of(m).sublayers[1]).bias for m in models]
    assert torch.equal(biases[0], biases[1]) and not torch.equal(biases[0], biases[2])
    record = width_of(models[0]).config.provenance
    assert record["settings"]["seed"] == 1 and record["text"] == {"sha256": "x"} and record["budget"] == 0.6
    assert "widellm" in record["versions"]


def test_layers_in_blocks_give_the_same_routers(windows: torch.Tensor) -> None:
    whole, blocks = tiny_model("llama"), tiny_model("llama")
    calibrate(whole, windows, SETTINGS)
    calibrate(blocks, windows, dataclasses.replace(SETTINGS, memory_gb=1e-9))  # a layer at a time
    for a, b in zip(width_of(whole).sublayers, width_of(blocks).sublayers, strict=True):
        for name in ("down", "up", "bias"):
            torch.testing.assert_close(
                getattr(width_of(whole).router(a), name), getattr(width_of(blocks).router(b), name)
            )


@pytest.mark.requirement("R46")
def test_calibration_leaves_the_weights_alone(windows: torch.Tensor) -> None:
    from widellm.modeling.attach import detach

    model = tiny_model("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    calibrate(model, windows, SETTINGS)
    detach(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_an_interruption_gives_the_dense_model_back(windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    model = tiny_model("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    monkeypatch.setattr(module, "measure_dial", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, windows, SETTINGS)
    assert not is_attached(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_what_cannot_work_is_said_first(windows: torch.Tensor) -> None:
    model = tiny_model("llama")
    with pytest.raises(TextError, match="at least 8 windows, got 3"):
        calibrate(model, windows[:3], SETTINGS)
    with pytest.raises(ConfigError, match="ffn group size 7 does not divide"):
        calibrate(model, windows, dataclasses.replace(SETTINGS, ffn_group_size=7))
    assert not is_attached(model)


def test_balancing_lowers_the_divergence_and_holds_the_budget(windows: torch.Tensor) -> None:
    from widellm.calibrate.balance import balance
    from widellm.calibrate.dial import router_logits, set_threshold
    from widellm.evaluation.perplexity import kl_divergence

    def divergence(model: Any, threshold: float) -> float:
        with torch.no_grad():
            set_threshold(model, None)
            dense = [model(w[None]).logits[0] for w in windows]
            set_threshold(model, threshold)
            return sum(kl_divergence(a, model(w[None]).logits[0]) for a, w in zip(dense, windows, strict=True))

    model = tiny_model("llama")
    width = route(model)
    bias = [width.router(s).bias.detach().clone() for s in width.sublayers]
    threshold = router_logits(model, windows[:4]).quantiles([0.5])[0]
    before = divergence(model, threshold)
    set_threshold(model, threshold)
    share = spent(model, windows)
    offsets = balance(model, width, windows, threshold, lambda done, total: None)
    assert divergence(model, threshold) < before
    set_threshold(model, threshold)
    assert abs(spent(model, windows) - share) < 0.08
    for i, sub in enumerate(width.sublayers):  # one number for all groups of a sub-layer
        torch.testing.assert_close(width.router(sub).bias, bias[i] + offsets[i], atol=1e-5, rtol=0)


def test_quantiles_and_shares_are_each_others_inverse_in_units_of_work(windows: torch.Tensor) -> None:
    from widellm.calibrate.dial import router_logits

    model = tiny_model("llama")
    width = route(model)
    set_budget(model, 1.0)
    collector = router_logits(model, windows[:3])
    thresholds = collector.quantiles([0.3, 0.6, 0.9])
    assert collector.shares(thresholds) == pytest.approx([0.3, 0.6, 0.9], abs=2e-3)
    assert collector.shares([1e9, -1e9]) == [0.0, 1.0]
    spent_by_loop = total = 0.0
    for sub, seen in zip(width.sublayers, collector.logits, strict=True):
        logits = torch.cat(seen)
        spent_by_loop += sub.groups * sub.group_cost * (logits > thresholds[1]).float().mean().item()
        total += sub.groups * sub.group_cost
    assert spent_by_loop / total == pytest.approx(0.6, abs=2e-3)


def test_a_thinned_sample_holds_every_group(windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once every third group was missed: the stride over logits shared a factor with the number of groups.

    And once the first token of every window, which is unlike any other, stood for six: the dial was off by 0.02.
    """
    from widellm.calibrate import dial

    model = tiny_model("llama")
    width = route(model)
    set_budget(model, 1.0)
    ffn = next(i for i, s in enumerate(width.sublayers) if s.kind == "ffn")  # 6 groups
    full = dial.router_logits(model, windows[:2])
    monkeypatch.setattr(dial.Collector.__init__, "__defaults__", (128,))  # 2 * 64 * 6 / 128: every sixth
    thin = dial.router_logits(model, windows[:2])
    rows = torch.cat(full.logits[ffn]).view(-1, 6)
    assert torch.equal(torch.cat(thin.logits[ffn]).view(-1, 6), torch.cat([rows[:64][3::6], rows[64:][3::6]]))

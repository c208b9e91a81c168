"""The dial and the accounting."""

from __future__ import annotations

import pytest
import torch

from routing_helpers import route
from tiny import tiny_model
from widellm.config import WidthConfig, check_budget
from widellm.errors import CheckpointError, ConfigError
from widellm.modeling.attach import attach, get_budget, set_budget, width_of
from widellm.routing.budget import Dial
from widellm.routing.plan import rows_by_group


@pytest.mark.parametrize("budget", [0.0, -0.1, 1.01, float("nan"), float("inf"), "half", None])
def test_a_budget_outside_its_range_raises(budget: object) -> None:
    with pytest.raises(ConfigError, match="budget must be"):
        check_budget(budget)  # type: ignore[arg-type]


def test_the_dial_interpolates_between_its_settings() -> None:
    dial = Dial(torch.tensor([0.25, 0.75], dtype=torch.float64), torch.tensor([[1.0, -1.0], [4.0, 0.0]]))
    assert dial.thresholds_at(0.25) == [1.0, 4.0]
    assert dial.thresholds_at(0.5) == [0.0, 2.0]
    assert dial.thresholds_at(0.9) == [-1.0, 0.0]  # above the last setting it holds
    assert dial.thresholds_at(1.0) == [None, None]
    with pytest.raises(ConfigError, match="below 0.25"):
        dial.thresholds_at(0.2)


@pytest.mark.parametrize(
    ("budgets", "thresholds", "message"),
    [
        ([0.5, 0.25], [[0.0, 1.0]], "ascend"),
        ([0.5], [[0.0, 1.0]], "needs budgets"),
        ([0.5], [[float("nan")]], "not finite"),
    ],
)
def test_a_broken_dial_raises(budgets: list[float], thresholds: list[list[float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dial(torch.tensor(budgets, dtype=torch.float64), torch.tensor(thresholds))


def test_work_counts_multiply_adds_by_hand() -> None:
    model = tiny_model("llama", num_key_value_heads=2)  # D 32, F 48, 4 heads of 8, 2 layers
    width = route(model, head_group_size=2, ffn_group_size=16)
    counter = width.counter()
    keep = {"attention": torch.tensor([[[1, 0], [1, 1]]]), "ffn": torch.tensor([[[1, 0, 0], [0, 0, 1]]])}
    for sub in width.sublayers:
        sub.keep = keep[sub.kind].bool()
    counter.add(None, (1, 2))
    work = counter.work(0.5)
    d = 32
    head_group, ffn_group = 2 * (2 * 8) * d, 3 * 16 * d  # q and o rows of two heads; gate, up, down of 16 channels
    spent = 2 * (3 * head_group + 2 * ffn_group)
    routable = 2 * 2 * (2 * head_group + 3 * ffn_group)
    every = routable + 2 * 2 * (2 * 16 * d)  # k and v: 2 heads of 8 each
    assert work.saved_routable == pytest.approx(1 - spent / routable)
    assert work.saved_all_layers == pytest.approx((routable - spent) / every)
    assert work.attention_sparsity == pytest.approx(1 / 4)
    assert work.ffn_sparsity == pytest.approx(4 / 6)


def test_a_dense_pass_counts_as_everything_kept() -> None:
    model = tiny_model("llama")
    width = route(model)
    set_budget(model, 1.0)
    counter = width.counter()
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long))
    counter.add(None, (1, 4))
    assert counter.work(1.0).saved_routable == 0.0


def test_no_dial_means_no_budget_below_one() -> None:
    model = tiny_model("llama")
    attach(model, WidthConfig("llama", 2, ffn_group_size=8))
    assert get_budget(model) == 1.0
    with pytest.raises(ConfigError, match="no dial yet"):
        set_budget(model, 0.5)
    with pytest.raises(ConfigError, match="dense"):
        width_of(tiny_model("llama"))


def test_rows_by_group_is_the_mask_read_by_columns() -> None:
    keep = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 0]], dtype=torch.bool)
    assert [r.tolist() for r in rows_by_group(keep)] == [[0, 2], [], [0, 1]]
    assert [r.tolist() for r in rows_by_group(keep[:0])] == [[], [], []]


def test_config_survives_json_and_refuses_what_it_does_not_know() -> None:
    config = WidthConfig("llama", 2, 2, 8, 4, base={"name": "x"}, provenance={"seed": 1})
    assert WidthConfig.from_json(config.to_json()) == config
    for broken, message in [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        (config.to_json().replace('"format_version": 1', '"format_version": 99'), "upgrade widellm"),
        (config.to_json().replace('"router_rank"', '"rank"'), r"unknown fields \['rank'\]"),
        ('{"format_version": 1}', "lacks a field"),
        (config.to_json().replace('"router_rank": 4', '"router_rank": 0'), "router_rank must be"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            WidthConfig.from_json(broken)

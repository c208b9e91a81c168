"""Which backend `auto` takes: rules, measured tables, and tables that must not be believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from routing_helpers import WAYS, route
from tiny import tiny_model
from widellm.bench.explain import explain, op_shapes
from widellm.config import WidthConfig
from widellm.errors import BackendError
from widellm.kernels import cost_table, cpu, dispatch, reference, registry
from widellm.kernels.cost_table import CostTable, OpShape
from widellm.modeling.attach import attach, set_budget

SHAPE = OpShape("routed_ffn", 16, 32, 4, torch.float32)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WIDELLM_CACHE", str(tmp_path / "cache"))
    dispatch.active_table.cache_clear()
    yield
    dispatch.active_table.cache_clear()


def choose(rows: int = 8, density: float = 0.5, dtype: torch.dtype = torch.float32, op: str = "routed_ffn") -> str:
    keep = torch.zeros(rows, 4, dtype=torch.bool)
    keep[:, : round(4 * density)] = True
    return dispatch.choose(op, torch.zeros(rows, 16, dtype=dtype), keep, 32)


def put(costs: dict[str, dict[str, float]], **head: Any) -> Path:
    path = cost_table.default_path()
    cost_table.write(CostTable({**cost_table.machine(), **head}, costs), path)
    dispatch.active_table.cache_clear()
    return path


def name(rows: int = 8, density: float = 0.5) -> str:
    return cost_table.key("routed_ffn", 16, 32, 4, torch.float32, rows, density)


@pytest.mark.requirement("R31")
def test_a_measured_time_decides_and_is_read_from_the_cache() -> None:
    put({name(): {"masked": 1.0, "grouped": 0.5}, name(64): {"masked": 0.5, "grouped": 1.0}})
    assert choose(8) == choose(5) == "grouped"  # 5 rows are of the bucket of 8
    assert choose(64) == "masked"
    assert "measured: grouped 0.5 ms" in dispatch.decide("routed_ffn", 16, 32, 4, torch.float32, 8, 0.5, True)[1]


@pytest.mark.parametrize("field", ["cpu", "threads", "torch", "widellm", "format", "instructions"])
def test_a_table_of_another_machine_is_not_used(field: str) -> None:
    before = choose()
    put({name(): {"masked": 1.0, "grouped": 0.5}}, **{field: "another"})
    assert choose() == before
    assert f"another {field}" in dispatch.table_state()[1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"machine": {}}',
        '{"machine": 3, "costs": {}}',
        "\x00\x01",
        *(json.dumps({"costs": {"x": bad}}) for bad in ({"cpu": -1.0}, {"cpu": "fast"}, {"cpu": True}, [1])),
    ],
)
def test_a_damaged_table_counts_as_none_and_is_replaced(text: str) -> None:
    if text.startswith('{"costs"'):
        text = json.dumps({"machine": cost_table.machine(), **json.loads(text)})
    path = cost_table.default_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    before = choose()
    assert dispatch.active_table(torch.get_num_threads()) is None
    assert "measured again" in dispatch.table_state()[1]
    dispatch.tune([SHAPE], rows=(8,), densities=(0.5,), rounds=1)
    assert dispatch.table_state() == (path, "")
    assert before in ("cpu", "masked")


def test_tune_measures_what_is_missing_only() -> None:
    steps: list[tuple[int, int]] = []
    table = dispatch.tune([SHAPE], rows=(1, 8), densities=(0.5,), rounds=1, progress=lambda d, t: steps.append((d, t)))
    assert steps == [(1, 2), (2, 2)]
    assert set(table.costs) == {name(1), name(8)}
    assert all("masked" in costs for costs in table.costs.values())
    kept = dispatch.tune([SHAPE], rows=(8,), densities=(0.5,), rounds=1, progress=lambda d, t: pytest.fail("measured"))
    assert kept.costs == table.costs
    other = OpShape("routed_out", 16, 32, 4, torch.float32)
    assert set(dispatch.tune([other], rows=(1,), densities=(1.0,), rounds=1).costs) > set(table.costs)


def test_tune_leaves_the_random_state_alone_and_refuses_half_precision() -> None:
    state = torch.random.get_rng_state()
    dispatch.tune([SHAPE], rows=(1,), densities=(0.5,), rounds=1)
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(BackendError, match="float16"):
        dispatch.tune([OpShape("routed_in", 8, 8, 2, torch.float16)])


@pytest.mark.parametrize("op", ["routed_ffn", "routed_in", "routed_out"])
@pytest.mark.parametrize("rows", [0, 1, 32, 33, 64, 128, 512])
@pytest.mark.parametrize("density", [0.25, 0.75, 1.0])
def test_what_cannot_run_is_never_chosen(op: str, rows: int, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(rows, density, torch.float16, op) in ("masked", "grouped")
    monkeypatch.setattr(cpu, "availability", lambda: (False, "not built"))
    put({cost_table.key(op, 16, 32, 4, torch.float32, rows, density): {"masked": 1.0, "cpu": 0.1}})
    assert choose(rows, density, torch.float32, op) in ("masked", "grouped")
    query = torch.zeros(1, 4, 2, 8)
    assert dispatch.choose_attention(query, query) == "masked"
    assert dispatch.choose("routed_attention", query, torch.ones(1, 4, 2, dtype=torch.bool), 2) == "masked"


@pytest.mark.skipif(not cpu.availability()[0], reason="the native library is not built")
def test_native_kernels_are_taken_where_they_win() -> None:
    for rows in (1, 8, 32, 128, 512):
        assert choose(rows, 0.5) == "cpu"
    query = torch.zeros(1, 4, 2, 8)
    assert dispatch.choose_attention(query, query) == "cpu"


@pytest.mark.skipif(not cpu.availability()[0], reason="the native library is not built")
def test_bare_torch_is_taken_where_it_is_faster() -> None:
    for op in ("routed_ffn", "routed_in", "routed_out"):
        assert choose(512, 1.0, op=op) == choose(33, 1.0, op=op) == "cpu"

    def native(op: str, inputs: int, rows: int) -> bool:
        weight = torch.zeros(inputs, 8).t()
        return dispatch.native_when_dense(op, torch.zeros(rows, inputs), weight, inputs, 4)

    many, large = dispatch.DENSE_OUT_ROWS + 1, 2 * dispatch.DENSE_MAX_OUT
    assert not native("routed_out", 32, many) and native("routed_ffn", 32, many)
    assert native("routed_out", large, many) and native("routed_out", 32, many - 1)
    put({cost_table.key("routed_out", 32, 32, 4, torch.float32, many, 1.0): {"masked": 1.0, "cpu": 0.1}})
    assert native("routed_out", 32, many)


@pytest.mark.requirement("R28")
@pytest.mark.parametrize("fastest", ["masked", "grouped", "cpu"])
def test_the_choice_changes_time_not_results(fastest: str) -> None:
    x, up, down = torch.randn(8, 16), torch.randn(32, 16), torch.randn(16, 32)
    keep = torch.rand(8, 4) < 0.5
    density = float(keep.float().mean())
    put({name(8, density): {"masked": 1.0, "grouped": 1.0, "cpu": 1.0, fastest: 0.1}})
    got = registry.routed_ffn(x, up, up, down, keep, "silu")
    torch.testing.assert_close(got, reference.routed_ffn(x, up, up, down, keep, "silu"), atol=1e-3, rtol=1e-3)


def test_the_choice_is_cheap_with_many_rows_too() -> None:
    keep = torch.zeros(4096, 256, dtype=torch.bool)
    keep[::2] = True
    assert dispatch.density_of(keep) == pytest.approx(0.5, abs=0.05)
    assert dispatch.density_of(keep[:0]) == 1.0
    assert dispatch.density_of(torch.ones(3, 5, dtype=torch.bool)) == 1.0


def test_buckets() -> None:
    assert [cost_table.row_bucket(m) for m in (0, 1, 2, 3, 32, 33, 1000)] == [1, 1, 2, 4, 32, 64, 1024]
    assert [cost_table.density_bucket(d) for d in (0.0, 0.3, 0.5, 0.7, 1.0)] == [0.25, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.requirement("R37")
def test_explain_says_what_each_layer_uses_and_why() -> None:
    model = tiny_model()
    route(model)
    found = explain(model, 0.5)
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert "not measured" in found["table"]
    first = found["layers"][0]
    assert set(first["ops"]) == {"routed_in", "routed_out", "routed_ffn", "routed_attention"}
    assert all(len(v) == 2 and set(o) == {"1", "8", "512"} for o in first["ops"].values() for v in o.values())
    if cpu.availability()[0]:
        assert first["decode"][0] == "native layer"
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *a: None)
    assert explain(model)["layers"][1]["decode"][0] == "ops"
    json.dumps(found)


@pytest.mark.skipif(not cpu.availability()[0], reason="the native library is not built")
def test_explain_at_budget_one_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    route(model)
    set_budget(model, 1.0)
    ops = explain(model, 1.0)["layers"][0]["ops"]
    assert {op: ops[op]["512"][0] for op in ("routed_in", "routed_out", "routed_ffn")} == {
        "routed_in": "module",
        "routed_out": "module",
        "routed_ffn": "cpu",
    }
    assert ops["routed_ffn"]["8"][0] == "module"
    ran: list[str] = []
    for op in ("routed_in", "routed_out", "routed_ffn"):
        run = getattr(cpu, op)
        monkeypatch.setattr(cpu, op, lambda *a, op=op, run=run: ran.append(op) or run(*a))  # type: ignore[misc]
    with torch.no_grad():
        model(torch.zeros(1, 512, dtype=torch.long))
    assert ran == ["routed_ffn"] * 2


def test_explain_shows_measured_times_once_tuned() -> None:
    model = tiny_model()
    route(model)
    dispatch.tune(op_shapes(model), rows=(1, 8, 512), densities=(0.5,), rounds=1)
    found = explain(model, 0.5)
    assert found["layers"][0]["ops"]["routed_ffn"]["512"][1].startswith("measured: ")
    assert str(cost_table.default_path()) in found["table"]


@pytest.mark.skipif(not cpu.availability()[0], reason="the native library is not built")
def test_explain_says_why_attention_only_models_decode_by_ops() -> None:
    model = tiny_model()
    attach(model, WidthConfig("llama", 2, 1, 8, kinds=("attention",)))
    form, why = explain(model)["layers"][0]["decode"]
    assert form == "ops" and "native layer has attention and FFN routed" in why


@pytest.mark.skipif(not cpu.availability()[0], reason="the native library is not built")
@pytest.mark.parametrize("way", WAYS)
def test_explain_has_native_layers_whatever_routers_read_and_decide(way: str) -> None:
    model = tiny_model()
    route(model, **WAYS[way])
    assert [layer["decode"][0] for layer in explain(model)["layers"]] == ["native layer"] * 2

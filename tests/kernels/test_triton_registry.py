"""The Triton backend through the public ops and through routed models, and which backend `auto` takes on a GPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from routing_helpers import route
from tiny import tiny_model
from widellm import doctor
from widellm.bench import explain
from widellm.errors import BackendError
from widellm.kernels import dispatch, gpu, reference, registry
from widellm.modeling.attach import set_backend, set_budget

AVAILABLE, WHY = gpu.availability()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=WHY)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(m: int = 5) -> dict[str, Any]:
    made = {
        "x": torch.randn(m, 20),
        "gate": torch.randn(48, 20),
        "up": torch.randn(48, 20),
        "down": torch.randn(20, 48),
        "q": torch.randn(1, m, 4, 8),
        "k": torch.randn(1, m, 2, 8),
        "keep": torch.rand(m, 4) < 0.5,
        "router": [torch.randn(3, 20), torch.randn(4, 3), torch.randn(4)],
    }
    return {n: [p.to(DEVICE) for p in t] if isinstance(t, list) else t.to(DEVICE) for n, t in made.items()}


def everything(t: dict[str, Any]) -> list[torch.Tensor]:
    keep = registry.routed_keep(t["x"], *t["router"], 0.1, "triton")
    assert keep is not None
    h = registry.routed_in(t["x"], t["up"], keep, backend="triton")
    return [
        registry.routed_ffn(t["x"], t["gate"], t["up"], t["down"], keep, "silu", backend="triton"),
        registry.routed_out(h, t["down"], keep, backend="triton"),
        registry.routed_attention(t["q"], t["k"], t["k"], keep.unsqueeze(0), backend="triton"),
    ]


def test_the_public_ops_run_it_and_compile_without_graph_breaks() -> None:
    t = tensors()
    keep = t["router"][1] @ (t["router"][0] @ t["x"].t()) + t["router"][2].unsqueeze(1) > 0.1
    with torch.no_grad():
        plain = everything(t)
        want = reference.routed_ffn(t["x"], t["gate"], t["up"], t["down"], keep.t(), "silu")
        torch.testing.assert_close(plain[0], want, atol=1e-3, rtol=1e-4)
        compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")(t)
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a, b)


def test_fake_kernels_agree_with_the_real_ones() -> None:
    t, tests = tensors(), ("test_schema", "test_faketensor")
    none = (None, None, None)
    torch.library.opcheck(
        torch.ops.widellm.routed_ffn.default,
        (t["x"], t["gate"], t["up"], t["down"], t["keep"], "silu", *none, "triton"),
        test_utils=tests,
    )
    torch.library.opcheck(
        torch.ops.widellm.routed_in.default, (t["x"], t["up"], t["keep"], None, "triton"), test_utils=tests
    )
    torch.library.opcheck(
        torch.ops.widellm.routed_attention.default,
        (t["q"], t["k"], t["k"], t["keep"].unsqueeze(0), None, None, "triton"),
        test_utils=tests,
    )
    torch.library.opcheck(torch.ops.widellm.routed_keep.default, (t["x"], *t["router"], 0.1), test_utils=tests)


@pytest.mark.parametrize("m", [1, 17, 300])
def test_nothing_waits_for_the_device(m: int) -> None:
    """Tensors on the meta device have no values: an op that read one on the host, which no CUDA graph allows, fails."""
    from widellm.kernels import triton_ops as ops
    from widellm.kernels.triton_launch import recording

    def on_meta(value: Any) -> Any:
        return [v.to("meta") for v in value] if isinstance(value, list) else value.to("meta")

    t = {name: on_meta(value) for name, value in tensors(m).items()}
    lengths, table = (torch.empty(*s, dtype=torch.int32, device="meta") for s in ((1,), (1, 30)))
    pages = torch.empty(40, 16, 2, 8, device="meta")
    with recording("sm90") as launches:
        keep = ops.routed_keep(t["x"], *t["router"], 0.1)
        ops.routed_ffn(t["x"], t["gate"], t["up"], t["down"], keep, "silu")
        ops.routed_out(ops.routed_in(t["x"], t["up"], keep), t["down"], keep)
        for extra in ({}, {"start": lengths, "window": 4}, {"mask": torch.empty(1, 1, m, m, device="meta")}):
            ops.routed_attention(t["q"], t["k"], t["k"], keep.unsqueeze(0), **extra)
        ops.routed_attention(t["q"], pages, pages, keep.unsqueeze(0), table=table, lengths=lengths)
    grids = [launch.grid for launch in launches]
    assert all(isinstance(n, int) and n > 0 for grid in grids for n in grid)


@pytest.mark.requirement("R35")
def test_a_routed_model_says_the_same_in_triton_and_masked() -> None:
    model = tiny_model("qwen3").to(DEVICE)
    route(model)
    set_budget(model, 0.6)
    ids = torch.randint(0, 256, (2, 9), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding
    found = {}
    with torch.no_grad():
        for name in ("masked", "triton"):
            set_backend(model, name)
            logits = model(ids, attention_mask=mask).logits
            text = model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
            found[name] = (logits[mask.bool()], text)
    torch.testing.assert_close(found["triton"][0], found["masked"][0], atol=2e-3, rtol=1e-3)
    assert torch.equal(found["triton"][1], found["masked"][1])


def test_routers_that_learn_run_in_torch() -> None:
    t = tensors()
    t["router"][0].requires_grad_()
    assert registry.routed_keep(t["x"], *t["router"], 0.1, "triton") is None
    with torch.no_grad():
        assert registry.routed_keep(t["x"].cpu(), *(p.cpu() for p in t["router"]), 0.1, "auto") is None


@pytest.mark.requirement("R31")
def test_rules_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for op, rows, channels in itertools.product(("routed_ffn", "routed_out"), (1, 4, 5, 64, 511, 512, 8192), (32, 128)):
        name, why = dispatch.choose_on_gpu(op, rows, channels)
        wins = rows <= 4 or (rows >= 512 and op == "routed_ffn")
        assert name == ("triton" if channels == 128 and wins else "masked")
        assert "not measured" in why
    monkeypatch.setattr(gpu, "availability", lambda: (False, "not here"))
    assert dispatch.choose_on_gpu("routed_ffn", 1, 128) == ("masked", "rule: dense, then drop: not here")


@pytest.mark.requirement("R37")
def test_explain_says_what_a_gpu_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(intermediate_size=256)
    route(model, ffn_group_size=64)
    monkeypatch.setattr(explain, "_device", lambda width, index: "cuda")
    ops = explain.explain(model, 0.5)["layers"][0]["ops"]
    assert [ops["routed_ffn"][rows][0] for rows in ("1", "8", "512")] == ["triton", "masked", "triton"]
    assert ops["routed_in"]["1"][0] == "masked"  # heads of 8 are too narrow
    assert ops["routed_attention"]["1"] == ["triton", "rule, not measured: over 1024 keys or more, else dense"]


@pytest.mark.requirement("R44")
def test_doctor_and_errors_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.diagnose()["backends"]["triton"][0] is True
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    gpu._state.cache_clear()
    if not torch.cuda.is_available():
        assert "no GPU" in doctor.diagnose()["backends"]["triton"][1]
        with pytest.raises(BackendError, match="'triton' cannot run here: no GPU"):
            registry.check_backend("triton")
        with pytest.raises(BackendError, match="no GPU"):
            registry.routed_in(
                torch.randn(2, 4), torch.randn(6, 4), torch.ones(2, 3, dtype=torch.bool), backend="triton"
            )
    gpu._state.cache_clear()
    monkeypatch.setattr(gpu, "available", lambda name: False)
    assert 'pip install "widellm[triton]"' in gpu.availability()[1]
    gpu._state.cache_clear()


def test_tables_of_block_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from widellm.kernels import triton_tuning as tuning
    from widellm.kernels.triton_launch import Device

    monkeypatch.setenv("WIDELLM_CACHE", str(tmp_path))
    tuning.active_table.cache_clear()
    device, case = Device("sm90", 132), tuning.key("ffn_in", 3000, 128, 2)
    assert case == "ffn_in rows 4096 size 128 bytes 2" == tuning.key("ffn_in", 4096, 128, 2)
    default = tuning.choose("ffn_in", device, 3000, 128, 4096, 2)
    options = tuning.candidates("ffn_in", device, 3000)
    assert options[0] == default and 1 < len(options) <= 6
    steps: list[tuple[int, int]] = []

    def measure(config: tuning.Config) -> float:
        if config == options[2]:
            raise RuntimeError("too much shared memory")
        return 1.0 if config == options[1] else 2.0

    tuning.tune({case: (options, measure)}, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (len(options), len(options))
    assert tuning.choose("ffn_in", device, 2100, 128, 4096, 2) == options[1]  # the same bucket
    assert tuning.choose("ffn_in", device, 1024, 128, 4096, 2) == default  # another one
    path = tuning.default_path()
    stored = json.loads(path.read_text())
    assert {"device", "torch", "triton", "widellm"} <= set(stored["machine"])
    bad: list[Any] = ["", "[]", {**stored, "machine": {}}, {"machine": stored["machine"]}]
    bad += [{**stored, "configs": {case: value}} for value in ([1], "x", [128, 96, 64, 4, 3, 1], [0, 0, 0, 0, 0, 1])]
    bad += [{**stored, "configs": {"nonsense": list(default)}}]
    for text in bad:
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        tuning.active_table.cache_clear()
        assert tuning.choose("ffn_in", device, 3000, 128, 4096, 2) == default
        assert "defaults are used" in tuning.read(path)[1]
    tuning.active_table.cache_clear()


def test_block_sizes_fit_every_group_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from widellm.kernels import triton_tuning as tuning
    from widellm.kernels.triton_launch import TARGETS, Device

    monkeypatch.setenv("WIDELLM_CACHE", str(tmp_path))
    tuning.active_table.cache_clear()
    hopper = Device("sm90", 132)
    assert (
        tuning.choose("out", hopper, 4096, 128, 128, 2)
        == tuning.DENSE
        not in (
            tuning.candidates("out", hopper, 4096)[0],
            tuning.choose("out", hopper, 512, 128, 128, 2),
        )
    )
    sizes = (1, 12, 16, 32, 48, 64, 96, 100, 128, 512)
    for target, kind, rows, size, itemsize in itertools.product(
        TARGETS, tuning.KINDS, (1, 64, 200, 9000), sizes, (2, 4)
    ):
        if kind != "decode" or rows <= 64:
            config = tuning.choose(kind, Device(target, 100), rows, size, 4096, itemsize)
            if config != tuning.DENSE:
                tuning.check(config, kind, size)
    for target, kind, rows in itertools.product(TARGETS, tuning.KINDS, (64, 2048)):
        found = tuning.candidates(kind, Device(target, 100), rows)
        assert len(found) <= 6 and len(set(found)) == len(found)

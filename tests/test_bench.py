"""`widellm bench` as a library and as a command, on tiny shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

from routing_helpers import route
from tiny import tiny_model, tiny_tokenizer
from widellm.bench import cases, masks, models, ops, plots, run, worker, zoo
from widellm.bench.cases import ModelShape
from widellm.bench.engines import EngineSpec, Transformers, _plain_strides
from widellm.bench.int8_cases import OPS as INT8_OPS
from widellm.bench.llama_cpp import interleaved, write_gguf
from widellm.bench.rows import ModelRow, OpRow
from widellm.cli.main import app
from widellm.errors import MissingDependencyError, UnsupportedModelError, WidellmError
from widellm.kernels import cpu
from widellm.kernels.timing import alternate
from widellm.modeling.attach import get_budget
from widellm.modeling.checkpoint import read_width, save
from widellm.optional import available

TINY = ModelShape("tiny", 32, 64, 4, 2, 8, 16, 2, 272)
OP_KEYS = {"kind", "op", "shape", "rows", "density", "masks", "backend", "dense_backend", "ms", "dense_ms", "speedup"}
MODEL_KEYS = {"kind", "model", "phase", "budget", "engine", "tokens_per_s", "peak_memory_gb"}


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_MEMORY", 1)
    monkeypatch.setitem(cases.SHAPES, "tiny", TINY)


@pytest.fixture
def routed_directory(tmp_path: Path) -> Path:
    model = tiny_model(max_position_embeddings=1024)
    route(model)
    save(model, tmp_path / "routed", tiny_tokenizer())
    return tmp_path / "routed"


def settings(**changes: Any) -> ops.OpSettings:
    chosen: dict[str, Any] = {"shapes": ("tiny",), "rows": (1, 8, 64), "densities": (1.0, 0.5), "rounds": 1, **changes}
    return ops.OpSettings(**chosen)


@pytest.mark.requirement("R33")
@pytest.mark.requirement("R34")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_op_gives_rows_with_the_promised_keys(tiny_shape: None, dtype: torch.dtype) -> None:
    rows = ops.time_ops(settings(dtype=dtype))
    found = [r.to_json() for r in rows]
    assert all(set(row) >= OP_KEYS for row in found)
    assert {row["kind"] for row in found} == {"op"}
    assert all(row["speedup"] == pytest.approx(row["dense_ms"] / row["ms"], rel=1e-2) for row in found)
    assert {r.dense_backend for r in rows} <= {"torch", "cpu"}
    native = {"layer", "attention_step", "interleaved", *INT8_OPS} if cpu.availability()[0] else set()
    assert {r.op for r in rows} == {*cases.CASES, "router"} | native
    assert {(r.rows, r.masks) for r in rows if r.op == "routed_ffn"} >= {(1, "random"), (8, "shared"), (64, "random")}
    json.dumps(found, allow_nan=False)


def test_a_wrong_result_stops_the_bench(tiny_shape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, w: Tensor, keep: Tensor, bias: Any = None, backend: str = "auto") -> Tensor:
        return torch.ones(x.shape[0], w.shape[0])

    monkeypatch.setattr(cases.registry, "routed_in", wrong)
    with pytest.raises(WidellmError, match="routed_in .* is wrong by .*: nothing was timed"):
        ops.time_ops(settings(ops=("routed_in",), dtype=torch.float32))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("density", [0.25, 0.5, 1.0])
def test_masks_have_the_density_asked_for(rows: int, density: float) -> None:
    learned = masks.LearnedMasks({"ffn": torch.randn(16, 3, 4), "attention": torch.randn(16, 3, 2)})
    for groups in (4, 12, 20):
        for keep in (masks.random_mask(rows, groups, density), masks.shared_mask(rows, groups, density)):
            assert keep.shape == (rows, groups) and float(keep.float().mean()) == pytest.approx(density)
        keep = learned.mask("ffn", rows, groups, density)
        assert keep.shape == (rows, groups)
        # rows and columns that are repeated have equal logits, and a threshold takes equal ones together
        assert density - 0.02 <= float(keep.float().mean()) <= density + 0.25
    assert bool((masks.shared_mask(rows, 8, 0.5).float().std(0, correction=0) == 0).all())


def test_learned_masks_come_from_the_routers() -> None:
    model = tiny_model()
    width = route(model)
    found = masks.learned_masks(model, torch.randint(256, (1, 10)))
    assert {k: tuple(v.shape) for k, v in found.logits.items()} == {"attention": (10, 2, 4), "ffn": (10, 2, 6)}
    torch.testing.assert_close(
        (found.logits["ffn"][:, 0] > width.sublayers[1].threshold)[None], width.sublayers[1].keep
    )


def test_alternating_takes_medians_and_runs_all() -> None:
    count = {"a": 0, "b": 0}

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            count[name] += 1

        return run

    times = alternate({name: call(name) for name in count}, rounds=3, seconds=0.0)
    assert count == {"a": 4, "b": 4}
    assert all(t.ms >= 0 and t.spread >= 1 for t in times.values())


def op_row(**changes: Any) -> OpRow:
    values: dict[str, Any] = {
        "op": "routed_ffn", "shape": "tiny", "sizes": "32x64", "rows": 1, "density": 0.5, "kept": 0.5,
        "masks": "random", "backend": "cpu", "dense_backend": "torch", "ms": 1.0, "dense_ms": 1.5, "spread": 1.0,
        "dense_spread": 1.0,
    }  # fmt: skip
    return OpRow(**{**values, **changes})


@pytest.mark.skipif(not available("matplotlib"), reason="needs the extra bench")
def test_a_plot_per_op_and_shape_is_written(tmp_path: Path) -> None:
    rows = [op_row(rows=m, masks=k) for m in (1, 8) for k in ("random", "learned")] + [op_row(op="routed_in")]
    written = plots.write_plots(rows, tmp_path / "plots")
    assert sorted(p.name for p in written) == ["routed_ffn-tiny.png", "routed_in-tiny.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)


def test_plotting_without_matplotlib_or_without_ops_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, extra: str, purpose: str) -> Any:
        raise MissingDependencyError(f"{purpose} needs the package {name}: pip install 'widellm[{extra}]'")

    monkeypatch.setattr(plots, "require", missing)
    with pytest.raises(MissingDependencyError, match=r"--plot needs .*widellm\[bench\]"):
        plots.write_plots([op_row()], tmp_path)
    with pytest.raises(WidellmError, match="needs timed ops"):
        plots.write_plots([], tmp_path)


class InThisProcess:
    """A Worker without a process, for speed."""

    def __init__(self, spec: EngineSpec) -> None:
        self.engine = worker.build(EngineSpec(**{**spec.__dict__, "threads": torch.get_num_threads()}))

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *arguments: Any) -> None:
        pass

    def ready(self) -> None:
        pass

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.engine, method)(*arguments)

    def peak_memory_gb(self) -> float:
        return worker._peak_memory()


def model_settings(name: str, **changes: Any) -> models.ModelSettings:
    chosen: dict[str, Any] = {
        "engines": ("widellm", "transformers"), "prompt": 24, "decode_prompt": 8, "new_tokens": 3, "rounds": 1,
        "dtype": "float32", **changes,
    }  # fmt: skip
    return models.ModelSettings(name, **chosen)


@pytest.mark.requirement("R31")
@pytest.mark.requirement("R32")
def test_a_routed_directory_is_timed_under_every_engine(
    routed_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "Worker", InThisProcess)
    monkeypatch.setattr(models, "BATCH_LENGTHS", (8, 5, 3))
    rows, notes = models.time_model(model_settings(str(routed_directory)))
    found = [r.to_json() for r in rows]
    assert all(set(row) >= MODEL_KEYS for row in found) and notes == []
    expected = {(e, b) for e, b in (("widellm", 1.0), ("widellm", 0.5), ("transformers", 1.0))}
    for phase in models.PHASES:
        wanted = {("widellm", 0.5)} if phase == "batch_shared" else expected
        assert {(r["engine"], r["budget"]) for r in found if r["phase"] == phase} == wanted
    assert all(r["tokens_per_s"] > 0 and r["peak_memory_gb"] > 0 for r in found)
    assert all((r["token_ms"] is None) == (r["phase"] == "prefill") for r in found)


@pytest.mark.requirement("R31")
def test_a_slow_model_ends_after_one_counted_round(routed_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "Worker", InThisProcess)
    stages: list[tuple[int, int]] = []
    settings = model_settings(str(routed_directory), engines=("transformers",), phases=("decode",), rounds=3, seconds=0)
    models.time_model(settings, lambda stage, done, total: stages.append((done, total)))
    assert [s for s in stages if s[1] == 4] == [(0, 4), (1, 4), (4, 4)]  # the first, one that counts, the end


def test_the_head_of_the_dense_engine_gets_plain_strides() -> None:
    # torch 2.13 copies the whole matrix when a bf16 linear is given the slice that transformers takes
    x = torch.randn(1, 7, 16)[:, -1:]
    (plain,) = _plain_strides(None, (x,))
    assert x.stride() == (112, 16, 1) and plain.stride() == (16, 16, 1) and torch.equal(plain, x)


def test_int8_weights_are_timed_where_torchao_is(routed_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "Worker", InThisProcess)
    engines = ("widellm-int8", "torchao-int8", "widellm")
    chosen = model_settings(str(routed_directory), engines=engines, phases=("decode",))
    monkeypatch.setattr(models, "available", lambda name: False)
    rows, notes = models.time_model(chosen)
    assert {r.engine for r in rows} == {"widellm"} and len(notes) == 2 and "widellm[quant]" in notes[0]
    pytest.importorskip("torchao")
    monkeypatch.setattr(models, "available", available)
    rows, notes = models.time_model(chosen)
    assert {(r.engine, r.budget) for r in rows} == {
        ("widellm-int8", 1.0), ("widellm-int8", 0.5), ("torchao-int8", 1.0), ("widellm", 1.0), ("widellm", 0.5)
    } and not notes  # fmt: skip


def test_a_random_model_gets_routers_that_meet_the_budget(tiny_shape: None) -> None:
    model = zoo.routed_model("random:tiny", torch.float32)
    assert get_budget(model) == 1.0
    engine = Transformers(model, 2, routed=True)
    assert engine.prefill(torch.randint(272, (1, 9)), 0.5) > 0
    assert get_budget(model) == 0.5
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.requirement("R23")
def test_the_1b_example_is_a_transformers_model_of_that_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part llama-1b: no model code of ours, 1.24 billion weights; every engine is timed on it (as on `tiny`, above)."""
    shape = cases.SHAPES[run.RANDOM_MODEL.removeprefix(zoo.RANDOM)]
    monkeypatch.setattr(zoo, "noise", lambda *size, dtype, scale: torch.empty(size, dtype=dtype, device="meta"))
    model = zoo.random_model(shape, torch.bfloat16)
    assert type(model) is LlamaForCausalLM and model.num_parameters() == 1_235_814_400
    assert "llama-1b" in run.parts(None, has_model=False)


def test_engines_that_disagree_stop_the_bench() -> None:
    class Fake:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

        def call(self, method: str, *arguments: Any) -> Tensor:
            return self.logits

    logits = torch.randn(20)
    workers: dict[str, Any] = {"transformers": Fake(logits), "llama.cpp": Fake(logits + 1e-4)}
    models.check_parity(workers, torch.zeros(1, 4), "float32")
    for bad in (logits.flip(0), logits * float("nan")):
        with pytest.raises(WidellmError, match="llama.cpp and transformers differ by"):
            models.check_parity({**workers, "llama.cpp": Fake(bad)}, torch.zeros(1, 4), "float32")


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    with worker.Worker(EngineSpec("widellm", str(tmp_path))) as started:
        with pytest.raises(WidellmError, match="widellm on .*not a routed directory"):
            started.ready()


@pytest.mark.skipif(not available("gguf"), reason="needs the package gguf")
def test_the_gguf_file_holds_the_same_weights(tmp_path: Path) -> None:
    import gguf

    model = tiny_model(dtype=torch.bfloat16)
    write_gguf(model, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {t.name: t for t in reader.tensors}
    layer = model.model.layers[1]
    raw = torch.from_numpy(tensors["blk.1.ffn_up.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(raw, layer.mlp.up_proj.weight)
    assert len(tensors) == 2 * 9 + 3
    q = torch.from_numpy(tensors["blk.1.attn_q.weight"].data.copy()).view(torch.bfloat16)
    head = layer.self_attn.q_proj.weight[:8]  # halves 0-3 and 4-7 become pairs
    assert torch.equal(q[:8], head[[0, 4, 1, 5, 2, 6, 3, 7]])
    assert torch.equal(interleaved(layer.self_attn.q_proj.weight, 4), q)
    with pytest.raises(UnsupportedModelError, match="qwen2"):
        write_gguf(tiny_model("qwen2"), tmp_path / "q.gguf")


@pytest.mark.skipif(not (available("gguf") and available("accelerate")), reason="needs the extra gguf")
def test_another_reader_of_the_gguf_file_computes_the_same_logits(tmp_path: Path) -> None:
    model = tiny_model()
    write_gguf(model, tmp_path / "m.gguf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ids = torch.randint(256, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_parts() -> None:
    assert run.parts(None, False) == ("ffn", "projections", "attention", "int8", "layer", "llama-1b")
    assert run.parts("ops,model", True) == ("ffn", "projections", "attention", "int8", "layer", "model")
    assert run.parts("models", False) == ("llama-1b",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "kernels"], "'kernels' is not a part"),
        (["--only", "model"], "pass --model DIR"),
        (["--only", "ffn", "--rows", "0"], "--rows must be at least 1"),
        (["--only", "ffn", "--rows", "one"], "--rows must be numbers"),
        (["--only", "ffn", "--densities", "1.5"], "--densities must be in"),
        (["--only", "ffn", "--shapes", "gpt-9"], "shape 'gpt-9' is not known"),
        (["--only", "ffn", "--dtype", "int8"], "--dtype must be"),
        (["--only", "ffn", "--threads", "0"], "--threads must be at least 1"),
        (["--only", "ffn", "--backend", "fast"], "backend 'fast' is not known"),
        (["--only", "llama-1b", "--engines", "vllm"], "engine 'vllm' is not known"),
        (["--only", "llama-1b", "--budget", "0"], "budget must be in"),
        (["--only", "llama-1b", "--plot", "x"], "--plot needs timed ops"),
        (["--only", "model", "--model", "nowhere"], "nowhere is not a routed directory"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, WidellmError)
    assert message in str(result.exception) and "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], (("prefill", "decode"), 16, 3, 20.0)),
        (["--phases", "batch", "--new-tokens", "9", "--rounds", "5"], (("batch",), 9, 5, float("inf"))),
    ],
)
def test_llama_1b_is_brief_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], wanted: tuple[Any, ...]
) -> None:
    made: list[models.ModelSettings] = []

    def bench(chosen: Any, ops: Any, model: Any, settings: Any, progress: Any) -> run.BenchResult:
        made.append(settings(run.RANDOM_MODEL))
        return run.BenchResult()

    monkeypatch.setattr(run, "bench", bench)
    result = CliRunner().invoke(app, ["bench", "--only", "llama-1b", *arguments])
    assert result.exception is None, result.output
    assert [(m.phases, m.new_tokens, m.rounds, m.seconds) for m in made] == [wanted]


@pytest.mark.requirement("R8")
def test_the_command_writes_its_rows(tiny_shape: None, tmp_path: Path, routed_directory: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["bench", "--only", "projections", "--shapes", "tiny", "--rows", "1,8", "--rounds", "1"]
    arguments += ["--model", str(routed_directory), "--dtype", "float32", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None, result.output
    written = json.loads(file.read_text())
    about, *rows = written
    assert {r["masks"] for r in rows} == {"random", "shared", "learned"}
    assert {"kind", "notes", "dtype", "config", "threads", "machine", "dispatch", "versions"} == set(about)
    assert about["config"] == read_width(routed_directory).config.digest()
    assert about["kind"] == "run" and about["machine"]["cpu"] and about["versions"]["torch"]


def test_doctor_explains_a_directory(routed_directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    result = CliRunner().invoke(app, ["doctor", "--explain", str(routed_directory), "--json", str(file)])
    assert result.exception is None, result.output
    assert len(json.loads(file.read_text())["model"]["layers"]) == 2
    result = CliRunner().invoke(app, ["doctor", "--explain", str(tmp_path)])
    assert isinstance(result.exception, WidellmError) and "not a routed directory" in str(result.exception)


def test_model_rows_have_the_promised_keys() -> None:
    row = ModelRow("m", "prefill", 1.0, "transformers", 10.0, 1.0, 0.5).to_json()
    assert set(row) >= MODEL_KEYS and row["kind"] == "model"


def test_attention_only_models_lend_no_masks(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    route(model)
    save(model, tmp_path / "experts", tiny_tokenizer())
    assert run._learned(str(tmp_path / "experts"), 8, lambda *a: None) is None

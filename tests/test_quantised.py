"""Quantised bases: routers attach and stay float32, the model runs, and an adapter holds what there is to save."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, DynamicCache

import widellm
from routing_helpers import WAYS, oracle_logits, route
from test_checkpoint import logits_of
from tiny import tiny_model
from tiny import tiny_tokenizer as make_tokenizer
from widellm.bench.explain import explain
from widellm.errors import CheckpointError, ConfigError, MissingDependencyError, UnsupportedModelError
from widellm.evaluation.perplexity import perplexity
from widellm.kernels import cpu
from widellm.modeling import linears
from widellm.modeling.attach import set_backend, set_budget, width_of
from widellm.modeling.checkpoint import FORMS, export, save
from widellm.optional import available
from widellm.sources.models import QUANTISERS, load_dense

Build = Callable[..., Path]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(1))


def torchao_config() -> Any:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes_config() -> Any:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)


CONFIGS = {"torchao": torchao_config, "bitsandbytes": bitsandbytes_config}


def quantised(method: str, build: Build, tmp_path: Path) -> Path:
    """A directory with the tiny model's weights quantised by `method`, written by transformers."""
    plain = build("llama", "plain", hidden_size=64, intermediate_size=128, head_dim=16)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=CONFIGS[method](), device_map="cpu")
    model.save_pretrained(tmp_path / method)
    make_tokenizer().save_pretrained(tmp_path / method)
    return tmp_path / method


@pytest.mark.requirement("R45")
@pytest.mark.parametrize("method", CONFIGS)
def test_attach_evaluate_save_load(method: str, tiny_checkpoint: Build, tmp_path: Path, ids: torch.Tensor) -> None:
    folder = quantised(method, tiny_checkpoint, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    dense = logits_of(model, ids)
    width = route(model, ffn_group_size=16, regroup=False)
    width.config = width.config.replace(base={"name": str(folder)})
    assert all(p.dtype == torch.float32 for s in width.sublayers for p in width.router(s).parameters())
    set_budget(model, 1.0)
    assert torch.equal(logits_of(model, ids), dense)
    set_budget(model, 0.5)
    routed = logits_of(model, ids)
    expected, _ = oracle_logits(AutoModelForCausalLM.from_pretrained(folder), width, ids)
    torch.testing.assert_close(routed, expected, atol=2e-4, rtol=2e-4)
    found = perplexity(model, ids)
    assert found.work is not None and 0.2 < found.work.saved_routable < 0.8
    decided = explain(model)["layers"][0]
    native = method == "torchao" and cpu.availability()[0]
    assert decided["ops"]["routed_ffn"]["8"][0] == ("cpu" if native else "whole")
    assert decided["ops"]["routed_ffn"]["512"][0] == ("cpu" if native else "whole")
    assert ("int8 weights" if native else "their own library") in decided["decode"][1]
    assert model.generate(ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=258).shape == (1, 13)
    with pytest.raises(ConfigError, match='form="adapter"'):
        save(model, tmp_path / "full", make_tokenizer())
    save(model, tmp_path / "adapter", make_tokenizer(), form="adapter")
    for load in (lambda p: widellm.load(p)[0], AutoModelForCausalLM.from_pretrained):
        again = load(tmp_path / "adapter")
        set_budget(again, 0.5)
        assert torch.equal(logits_of(again, ids), routed)


def compressed_tensors(folder: Path) -> Path:
    """A directory as llm-compressor writes it: int4 weights in groups of 32 with zero points, packed."""
    pytest.importorskip("compressed_tensors")
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("this transformers leaves compressed-tensors' forward in place")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = tiny_model("llama", hidden_size=64, head_dim=32, intermediate_size=96)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, symmetric=False, group_size=32)
    )
    config = QuantizationConfig(config_groups={"all": scheme}, format="pack-quantized", ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.detach().unflatten(1, (-1, 32))
            scale = (groups.amax(-1) - groups.amin(-1)) / 15
            module.weight_scale.data.copy_(scale)
            module.weight_zero_point.data.copy_((-8 - groups.amin(-1) / scale).round().clamp(-8, 7))
    ModelCompressor(quantization_config=config).compress_model(model)
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, folder / "model.safetensors")
    asked = {**config.model_dump(mode="json", exclude_none=True), "quant_method": "compressed-tensors"}
    described = {**model.config.to_diff_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": asked}
    (folder / "config.json").write_text(json.dumps(described))
    make_tokenizer().save_pretrained(folder)
    return folder


def test_compressed_tensors_become_floats(tmp_path: Path, ids: torch.Tensor) -> None:
    """They load as plain linears, so everything works: regrouping, evaluation, both forms."""
    folder = compressed_tensors(tmp_path / "base")
    dense = load_dense(str(folder)).model
    exact = tiny_model("llama", hidden_size=64, head_dim=32, intermediate_size=96)
    weight = exact.model.layers[0].mlp.up_proj.weight
    error = (dense.model.layers[0].mlp.up_proj.weight - weight).norm() / weight.norm()
    assert 0.02 < error < 0.15, "int4: neither exact nor far off"
    by_hand = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
    torch.testing.assert_close(logits_of(dense, ids), logits_of(by_hand, ids))

    model = load_dense(str(folder)).model
    width = route(model)
    width.config = width.config.replace(base={"name": str(folder)})
    routed = logits_of(model, ids)
    expected, _ = oracle_logits(dense, width, ids)
    torch.testing.assert_close(routed, expected, atol=2e-4, rtol=2e-4)
    found = perplexity(model, ids)
    assert found.work is not None and 0.2 < found.work.saved_routable < 0.8
    for form in FORMS:
        save(model, tmp_path / form, make_tokenizer(), form=form)
        for load in (lambda p: widellm.load(p)[0], AutoModelForCausalLM.from_pretrained):
            again = load(tmp_path / form)
            set_budget(again, 0.5)
            assert torch.equal(logits_of(again, ids), routed)


def test_compressed_tensors_left_packed_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    projection = model.model.layers[0].self_attn.q_proj
    projection.quantization_scheme, projection.forward = None, projection.forward
    with pytest.raises(UnsupportedModelError, match=r"CompressedTensorsConfig\(dequantize=True\)"):
        route(model)


def test_quantise_while_loading(tiny_checkpoint: Build, tmp_path: Path, ids: torch.Tensor) -> None:
    """Routers made on float weights, channels regrouped, weights quantised afterwards."""
    config = torchao_config()
    base = tiny_checkpoint("llama", "plain")
    model = AutoModelForCausalLM.from_pretrained(base)
    width = route(model)
    width.config = width.config.replace(base={"name": str(base)})
    save(model, tmp_path / "full", make_tokenizer())
    loaded, _ = widellm.load(tmp_path / "full", budget=0.5, quantization_config=config)
    assert "Int8" in type(loaded.model.layers[0].mlp.up_proj.weight).__name__
    set_budget(model, 1.0)
    set_budget(loaded, 1.0)
    float_logits = logits_of(model, ids)
    assert (logits_of(loaded, ids) - float_logits).norm() / float_logits.norm() < 0.05
    set_budget(loaded, 0.5)
    assert torch.isfinite(logits_of(loaded, ids)).all()
    with pytest.raises(ConfigError, match="load that directory again"):
        save(loaded, tmp_path / "no", form="adapter")
    set_budget(loaded, 1.0)
    dense = logits_of(loaded, ids)
    widellm.detach(loaded)
    torch.testing.assert_close(logits_of(loaded, ids), dense, atol=1e-5, rtol=1e-5)
    export(tmp_path / "full", tmp_path / "adapter", form="adapter")
    with pytest.raises(ConfigError, match="widellm export"):
        widellm.load(tmp_path / "adapter", quantization_config=config)
    with pytest.raises(CheckpointError, match="widellm export"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", quantization_config=config)


def int8_model(family: str = "llama", config: Any = None, way: str = "normed", **sizes: Any) -> Any:
    """A tiny model with int8 weights inside and routers on them."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tiny_model(family, **sizes)
    body = model.gpt_neox if family == "gpt_neox" else model.model
    quantize_(body, config or Int8WeightOnlyConfig())
    route(model, regroup=False, **WAYS[way])
    return model


needs_native = pytest.mark.skipif(not cpu.availability()[0], reason=f"native library: {cpu.availability()[1]}")


@torch.no_grad()
def decoded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of two tokens, one at a time, after a prompt for the kernels of many rows."""
    cache = DynamicCache(config=model.config)
    model(ids.repeat(1, 3), past_key_values=cache)
    return torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in (0, 1)], 1)


@needs_native
@pytest.mark.parametrize(
    ("family", "way"),
    [*((family, "normed") for family in ("llama", "qwen3", "phi3", "gemma2", "gpt_neox"))]
    + [("llama", "residual"), ("qwen3", "one-decision"), ("phi3", "layer-skip")],
)
def test_int8_decodes_natively_as_its_own_library_does(family: str, way: str, ids: torch.Tensor) -> None:
    """Whole layers where the family's block is the plain one, else op by op."""
    model = int8_model(family, way=way)
    dropped = copy.deepcopy(model)
    set_backend(dropped, "masked")
    torch.testing.assert_close(decoded(model, ids), decoded(dropped, ids), atol=2e-4, rtol=1e-3)
    for modules in width_of(model).layout.layers:
        native = getattr(modules.layer, "_native", None)
        assert (native is not None and native[-1].fused is not None) == (family not in ("gemma2", "gpt_neox"))
        for part in (modules.o_proj, modules.down_proj):  # stored anew, once, by what one group multiplies
            weight = linears.int8(part)
            assert weight is not None and weight.q.stride(0) == 1 and weight.q is part.weight.qdata
    for modules in width_of(dropped).layout.layers:
        assert modules.down_proj.weight.qdata.stride(1) == 1


@needs_native
def test_int8_layers_are_bound_again_and_given_back(ids: torch.Tensor) -> None:
    model = int8_model()
    dense = copy.deepcopy(model)
    widellm.detach(dense)
    before = decoded(model, ids)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.qdata = module.weight.qdata.clone()  # new memory; the old is freed
    assert torch.equal(decoded(model, ids), before)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.qdata.neg_()
        assert not torch.equal(decoded(model, ids), before)
        model.model.layers[1].mlp.up_proj.weight.qdata.neg_()
    widellm.detach(model)
    assert all(m.weight.qdata.is_contiguous() for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear))
    assert torch.equal(decoded(model, ids), decoded(dense, ids))


@needs_native
def test_other_int8_weights_stay_with_their_library(ids: torch.Tensor) -> None:
    ao = pytest.importorskip("torchao.quantization")
    for config in (ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(16)), ao.Int8DynamicActivationInt8WeightConfig()):
        model = int8_model(config=config, hidden_size=64, intermediate_size=128, head_dim=16)
        assert "their own library" in explain(model)["layers"][0]["decode"][1]
        assert torch.isfinite(decoded(model, ids)).all()
    model = int8_model()
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.dequantize(), requires_grad=False)
    form = explain(model)["layers"]
    assert "some of its weights are int8" in form[0]["decode"][1] and "int8" in form[1]["decode"][1]
    assert torch.isfinite(decoded(model, ids)).all() and layer._native[-1].fused is None


@needs_native
def test_an_int8_head_is_read_natively(ids: torch.Tensor) -> None:
    ao = pytest.importorskip("torchao.quantization")
    model = tiny_model("llama", tie_word_embeddings=False)
    route(model)
    with torch.no_grad():
        before = model(ids).logits
    ao.quantize_(model.lm_head, ao.Int8WeightOnlyConfig())
    with torch.no_grad():
        after, want = model(ids).logits, model.lm_head.weight.dequantize()
    assert (after - before).norm() / before.norm() < 0.02
    x = torch.randn(3, want.shape[1])
    torch.testing.assert_close(model.lm_head(x), x @ want.t(), atol=1e-4, rtol=1e-4)


def test_regrouping_needs_plain_weights(ids: torch.Tensor) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tiny_model("llama")
    quantize_(model.model, Int8WeightOnlyConfig())
    with pytest.raises(UnsupportedModelError, match="cannot be regrouped"):
        route(model)
    route(model, regroup=False)
    assert torch.isfinite(logits_of(model, ids)).all() and width_of(model).budget == 0.5


def test_a_method_without_its_package_says_what_to_install(tiny_checkpoint: Build) -> None:
    folder = tiny_checkpoint("llama")
    for method, error, message in (
        ("gptq", UnsupportedModelError, r"quantised \(gptq\): give the unquantised model, or one by torchao, bits"),
        ("compressed-tensors", MissingDependencyError, r'pip install "widellm\[quant\]"'),
        ("torchao", MissingDependencyError, r'pip install "widellm\[quant\]"'),
    ):
        if available(QUANTISERS.get(method, method)):
            continue
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(error, match=message):
            load_dense(str(folder))

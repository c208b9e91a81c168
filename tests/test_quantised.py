"""Quantised bases: routers attach and stay float32, the model runs, and an adapter holds what there is to save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import widellm
from routing_helpers import oracle_logits, route
from test_checkpoint import logits_of
from tiny import tiny_model
from tiny import tiny_tokenizer as make_tokenizer
from widellm.bench.explain import explain
from widellm.errors import CheckpointError, ConfigError, UnsupportedModelError
from widellm.evaluation.perplexity import perplexity
from widellm.modeling.attach import set_budget, width_of
from widellm.modeling.checkpoint import export, save
from widellm.optional import available

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
    assert decided["ops"]["routed_ffn"]["8"][0] == "whole" and "their own library" in decided["decode"][1]
    assert model.generate(ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=258).shape == (1, 13)
    with pytest.raises(ConfigError, match='form="adapter"'):
        save(model, tmp_path / "full", make_tokenizer())
    save(model, tmp_path / "adapter", make_tokenizer(), form="adapter")
    for load in (lambda p: widellm.load(p)[0], AutoModelForCausalLM.from_pretrained):
        again = load(tmp_path / "adapter")
        set_budget(again, 0.5)
        assert torch.equal(logits_of(again, ids), routed)


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
    import json

    from widellm.errors import MissingDependencyError
    from widellm.sources.models import load_dense

    folder = tiny_checkpoint("llama")
    for method, error, message in (
        ("gptq", UnsupportedModelError, r"quantised \(gptq\): give the unquantised model, or one by torchao, bits"),
        ("compressed-tensors", UnsupportedModelError, r"quantised \(compressed-tensors\): give the unquantised"),
        ("torchao", MissingDependencyError, r'pip install "widellm\[quant\]"'),
    ):
        if available(method):
            continue
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(error, match=message):
            load_dense(str(folder))

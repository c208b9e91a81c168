"""transformers' own ways in and out: Auto classes, pipeline, device maps, shards, save_pretrained, the hub."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

import widellm
from routing_helpers import route
from test_checkpoint import logits_of
from tiny import tiny_model
from tiny import tiny_tokenizer as make_tokenizer
from widellm import hooks
from widellm.errors import CheckpointError, ConfigError, WidellmError
from widellm.modeling.attach import attach, is_attached, set_budget, width_of
from widellm.modeling.checkpoint import export, push, read_width, save

Build = Callable[..., Path]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def base(tiny_checkpoint: Build) -> Path:
    return tiny_checkpoint("llama", "base")


def route_base(base: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a directory with random routers that name it as their base."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    width = route(model)
    width.config = width.config.replace(base={"name": str(base)}, provenance={"budget": 0.5})
    return model


@pytest.fixture
def forms(base: Path, tmp_path: Path) -> dict[str, Path]:
    model = route_base(base)
    for form in ("full", "adapter"):
        save(model, tmp_path / form, make_tokenizer(), form=form)
    return {form: tmp_path / form for form in ("full", "adapter")}


@pytest.fixture
def expected(base: Path, ids: torch.Tensor) -> torch.Tensor:
    return logits_of(route_base(base), ids)


@pytest.mark.requirement("R10")
@pytest.mark.parametrize("form", ["full", "adapter"])
def test_auto_classes_load_both_forms(
    form: str, forms: dict[str, Path], ids: torch.Tensor, expected: torch.Tensor
) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(forms[form], output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits_of(model, ids), expected)
    assert type(model).__name__ == "LlamaForCausalLM" and not getattr(model, "hf_quantizer", None)
    assert not hasattr(model.config, "quantization_config")
    assert AutoTokenizer.from_pretrained(forms[form])("hi").input_ids == make_tokenizer()("hi").input_ids
    assert AutoConfig.from_pretrained(forms[form]).model_type == {"full": "llama", "adapter": "widellm"}[form]


@pytest.mark.requirement("R10")
@pytest.mark.parametrize("order", ["before", "after"])
def test_importing_widellm_is_enough_in_a_new_process(
    order: str, forms: dict[str, Path], ids: torch.Tensor, expected: torch.Tensor
) -> None:
    imports = ["import widellm", "import torch, transformers; from transformers import AutoModelForCausalLM"]
    script = "\n".join(imports if order == "before" else imports[::-1])
    script += f"""
for folder in {[str(p) for p in forms.values()]!r}:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        total = model(torch.tensor({ids.tolist()})).logits.sum().item()
    assert abs(total - {float(expected.sum())}) < 1e-3, total
    assert widellm.get_budget(model) == 0.5
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_widellm_it_is_the_dense_model(forms: dict[str, Path], ids: torch.Tensor, base: Path) -> None:
    script = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(forms["full"])!r})
with torch.no_grad():
    print(model(torch.tensor({ids.tolist()})).logits.sum().item())
assert "widellm" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Unknown quantization type, got widellm" in done.stderr
    dense = logits_of(AutoModelForCausalLM.from_pretrained(base), ids)
    assert float(done.stdout) == pytest.approx(float(dense.sum()), abs=1e-2)


def test_registering_again_changes_nothing(forms: dict[str, Path]) -> None:
    for _ in range(2):
        hooks.install()
    assert sum(type(f).__name__ == "_Watcher" for f in sys.meta_path) == 1
    assert is_attached(AutoModelForCausalLM.from_pretrained(forms["full"]))


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_pipeline(form: str, forms: dict[str, Path]) -> None:
    generate = pipeline("text-generation", model=str(forms[form]))
    assert is_attached(generate.model)
    out = generate("hi there", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert out.startswith("hi there")


@pytest.mark.requirement("R43")
@pytest.mark.parametrize("form", ["full", "adapter"])
@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_device_map(
    device_map: Any, form: str, forms: dict[str, Path], ids: torch.Tensor, expected: torch.Tensor
) -> None:
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(forms[form], device_map=device_map)
    assert torch.equal(logits_of(model, ids), expected)
    loaded, _ = widellm.load(forms[form], device_map=device_map)
    assert torch.equal(logits_of(loaded, ids), expected)


@pytest.mark.requirement("R43")
def test_layers_on_the_disk(forms: dict[str, Path], ids: torch.Tensor, expected: torch.Tensor, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    parts |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(forms["full"], device_map=parts, offload_folder=tmp_path / "offload")
    assert any(p.is_meta for p in model.parameters())
    torch.testing.assert_close(logits_of(model, ids), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(CheckpointError, match="widellm export"):
        AutoModelForCausalLM.from_pretrained(forms["adapter"], device_map=parts, offload_folder=tmp_path / "more")


@pytest.mark.requirement("R22")
def test_construction_on_the_meta_device(forms: dict[str, Path]) -> None:
    config = AutoConfig.from_pretrained(forms["full"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    read = read_width(forms["full"])
    attach(model, read.config, read.tensors["permutations"], in_order=True)
    loaded = AutoModelForCausalLM.from_pretrained(forms["full"])
    shapes = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    assert shapes == {name: (t.shape, t.dtype) for name, t in loaded.state_dict().items()}
    assert all(p.is_meta for p in model.parameters())


def test_sharded_weights(base: Path, ids: torch.Tensor, expected: torch.Tensor, tmp_path: Path) -> None:
    save(route_base(base), tmp_path / "shards", make_tokenizer(), max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "shards"), ids), expected)
    assert torch.equal(logits_of(widellm.load(tmp_path / "shards")[0], ids), expected)


@pytest.mark.requirement("R10")
def test_save_pretrained(base: Path, ids: torch.Tensor, expected: torch.Tensor, tmp_path: Path) -> None:
    model = route_base(base)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not any(".router." in key for key in load_file(tmp_path / "saved" / "model.safetensors"))
    assert torch.equal(logits_of(model, ids), expected) and not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "trainer", state_dict=model.state_dict())  # as transformers' Trainer calls it
    for name in ("model.safetensors", "width.safetensors"):
        assert (tmp_path / "trainer" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(again, ids), expected)
    widellm.detach(again)
    again.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert not (tmp_path / "dense" / "width_config.json").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_are_lossless(dtype: torch.dtype, base: Path, tmp_path: Path) -> None:
    save(route_base(base, dtype), tmp_path / "full", make_tokenizer())
    export(tmp_path / "full", tmp_path / "adapter", form="adapter")
    export(tmp_path / "adapter", tmp_path / "again")
    export(tmp_path / "again", tmp_path / "adapter2", form="adapter")
    for one, other in (("full", "again"), ("adapter", "adapter2")):
        names = sorted(p.name for p in (tmp_path / one).iterdir())
        assert names == sorted(p.name for p in (tmp_path / other).iterdir())
        for name in names:
            if name.startswith("tokenizer"):
                continue  # transformers notes there how it was loaded
            assert (tmp_path / one / name).read_bytes() == (tmp_path / other / name).read_bytes(), (one, name)
    assert not list((tmp_path / "adapter").glob("model*"))
    small, large = (sum(p.stat().st_size for p in (tmp_path / n).glob("*.safetensors")) for n in ("adapter", "full"))
    assert small < large / 2


def test_the_base_gets_its_channels_back(forms: dict[str, Path], base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(forms["adapter"])
    widellm.detach(model)
    for name, weight in AutoModelForCausalLM.from_pretrained(base).state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)


def test_an_adapter_finds_a_base_that_has_moved(
    forms: dict[str, Path], base: Path, tmp_path: Path, ids: torch.Tensor, expected: torch.Tensor
) -> None:
    moved = tmp_path / "moved"
    base.rename(moved)
    for call in (AutoModelForCausalLM.from_pretrained, widellm.load):
        with pytest.raises(CheckpointError, match="is an adapter of .* say where it is with base="):
            call(forms["adapter"])
    assert torch.equal(
        logits_of(AutoModelForCausalLM.from_pretrained(forms["adapter"], base=str(moved)), ids), expected
    )
    assert torch.equal(logits_of(widellm.load(forms["adapter"], base=moved)[0], ids), expected)
    export(forms["adapter"], tmp_path / "found", base=moved, form="adapter")
    assert torch.equal(logits_of(widellm.load(tmp_path / "found")[0], ids), expected)
    config = json.loads((forms["adapter"] / "width_config.json").read_text())
    config["base"]["name"] = "../moved"  # relative to the adapter
    (forms["adapter"] / "width_config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(widellm.load(forms["adapter"])[0], ids), expected)


def test_a_wrong_base_is_refused(forms: dict[str, Path], tiny_checkpoint: Build) -> None:
    other = tiny_checkpoint("llama", "other", seed=3)
    narrow = tiny_checkpoint("llama", "narrow", intermediate_size=24)
    for call in (AutoModelForCausalLM.from_pretrained, widellm.load):
        with pytest.raises(CheckpointError, match="wrong base model"):
            call(forms["adapter"], base=str(other))
        with pytest.raises(CheckpointError, match="does not fit the model"):
            call(forms["adapter"], base=str(narrow))
    with pytest.raises(ConfigError, match="leave base out"):
        widellm.load(forms["full"], base=other)


def test_an_adapter_does_not_hide_trained_weights(base: Path, tmp_path: Path) -> None:
    model = route_base(base)
    save(model, tmp_path / "one", make_tokenizer())
    trained, tokenizer = widellm.load(tmp_path / "one")
    with torch.no_grad():
        trained.model.layers[0].mlp.up_proj.weight.add_(0.1)
    with pytest.raises(ConfigError, match='save with form="full"'):
        save(trained, tmp_path / "two", tokenizer, form="adapter")
    save(trained, tmp_path / "two", tokenizer)
    with pytest.raises(ConfigError, match='save with form="full"'):  # nor later on
        export(tmp_path / "two", tmp_path / "three", form="adapter")
    assert not (tmp_path / "three").exists()


def test_an_adapter_needs_a_name(tmp_path: Path) -> None:
    model = tiny_model("llama")
    route(model)
    with pytest.raises(ConfigError, match="name of its base"):
        save(model, tmp_path / "a", form="adapter")
    with pytest.raises(ConfigError, match="form must be one of full, adapter"):
        save(model, tmp_path / "a", form="both")


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_damage_is_named_by_from_pretrained_too(form: str, forms: dict[str, Path]) -> None:
    folder = forms[form]
    config = json.loads((folder / "width_config.json").read_text())
    (folder / "width_config.json").write_text(json.dumps({**config, "format_version": 9}))
    with pytest.raises(CheckpointError, match="upgrade widellm"):
        AutoModelForCausalLM.from_pretrained(folder)
    (folder / "width_config.json").write_text(json.dumps(config))
    (folder / "width.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(CheckpointError, match="width.safetensors cannot be read"):
        AutoModelForCausalLM.from_pretrained(folder)
    (folder / "width.safetensors").unlink()
    with pytest.raises(CheckpointError, match="width.safetensors is missing"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_directories_from_before_the_marker_still_load(
    forms: dict[str, Path], ids: torch.Tensor, expected: torch.Tensor, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(forms["full"], old)
    config = json.loads((old / "config.json").read_text())
    del config["quantization_config"]
    (old / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(widellm.load(old)[0], ids), expected)
    export(old, tmp_path / "new")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "new"), ids), expected)


def test_dtype(forms: dict[str, Path], ids: torch.Tensor) -> None:
    for form in forms.values():
        model = AutoModelForCausalLM.from_pretrained(form, dtype=torch.bfloat16)
        width = width_of(model)
        assert model.dtype == torch.bfloat16
        assert all(p.dtype == torch.float32 for s in width.sublayers for p in width.router(s).parameters())
        assert torch.isfinite(logits_of(model, ids)).all()


class FakeHub:
    """Stands for huggingface_hub.HfApi: keeps what would be uploaded."""

    def __init__(self, token: str | None = None) -> None:
        pass

    def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
        return type("Repo", (), {"repo_id": repo_id})

    def upload_folder(self, repo_id: str, folder_path: Path, **kwargs: Any) -> str:
        FakeHub.files = {p.name: p.read_bytes() for p in Path(folder_path).iterdir()}
        return f"https://hub/{repo_id}/commit/1"


def test_save_pretrained_passes_on_what_an_upload_is_told(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = route_base(base)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(type(model), "push_to_hub", lambda self, name, **kwargs: seen.update({"name": name, **kwargs}))
    told = {"private": True, "revision": "next", "commit_message": "one more", "create_pr": True}
    model.save_pretrained(tmp_path / "mine", push_to_hub=True, token="secret", **told)
    assert seen == {"name": "mine", "token": "secret", **told}
    seen.clear()
    model.save_pretrained(tmp_path / "second", push_to_hub=True, is_main_process=False, state_dict={})
    assert not (tmp_path / "second").exists() and not seen  # of several processes one writes


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_push_to_hub_uploads_a_card(form: str, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    model = route_base(base)
    row = {"budget": 0.5, "saved_routable": 0.5, "saved_all_layers": 0.4, "perplexity": 30.0, "dense_perplexity": 20.0}
    row |= {"text": "wiki.txt", "windows": 8, "window": 128}
    made = {"results": [row], "text": {"source": "c4.jsonl", "sha256": "ab"}, "versions": {"widellm": "1.2.3"}}
    model._widellm.config = model._widellm.config.replace(provenance=made)
    assert "commit" in model.push_to_hub("me/routed", tokenizer=make_tokenizer(), form=form)
    card = FakeHub.files["README.md"].decode()
    for part in ("from_pretrained", "| 0.5 | 50.0% | 40.0% | 30.00 | 1.50x |", "c4.jsonl", "widellm: 1.2.3", "Recipe"):
        assert part in card, part
    names = {"width_config.json", "width.safetensors", "config.json", "tokenizer.json", "README.md"}
    assert names <= set(FakeHub.files) and ("model.safetensors" in FakeHub.files) == (form == "full")
    save(model, tmp_path / "saved", form=form)
    push(tmp_path / "saved", "me/routed")
    assert "width.safetensors" in FakeHub.files
    with pytest.raises(WidellmError, match="no width_config.json"):
        push(base, "me/routed")


@pytest.mark.parametrize("target", [["q_proj", "v_proj", "down_proj"], "all-linear"])
def test_peft_adapters_on_top(target: Any, forms: dict[str, Path], ids: torch.Tensor, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(forms["full"])
    set_budget(model, 1.0)
    dense = logits_of(model, ids)
    set_budget(model, 0.5)
    routed = logits_of(model, ids)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=target)
    lora = peft.get_peft_model(model, config)
    torch.testing.assert_close(logits_of(lora, ids), routed, atol=1e-5, rtol=1e-5)  # B starts at 0
    loss = lora(ids, labels=ids).loss
    loss.backward()
    grads = {n: p.grad for n, p in lora.named_parameters() if p.requires_grad and "lora_B" in n}
    assert grads and all(g is not None and bool(g.any()) for g in grads.values())
    with torch.no_grad():
        for name, p in lora.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    tuned = logits_of(lora, ids)
    assert not torch.allclose(tuned, routed, atol=1e-3)
    lora.save_pretrained(tmp_path / "lora")
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(forms["full"]), tmp_path / "lora")
    torch.testing.assert_close(logits_of(again, ids), tuned, atol=1e-6, rtol=1e-6)
    with pytest.raises(ConfigError, match="merge_and_unload"):
        save(again, tmp_path / "unmerged")
    with pytest.raises(ConfigError, match="merge_and_unload"):
        save(again.base_model.model, tmp_path / "unmerged")
    merged = again.merge_and_unload()
    assert is_attached(merged)
    torch.testing.assert_close(logits_of(merged, ids), tuned, atol=1e-4, rtol=1e-4)
    save(merged, tmp_path / "merged", make_tokenizer())
    torch.testing.assert_close(
        logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids), tuned, atol=1e-4, rtol=1e-4
    )
    set_budget(merged, 1.0)
    assert not torch.allclose(logits_of(merged, ids), dense, atol=1e-3)

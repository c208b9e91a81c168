"""The parts of the vLLM plugin that need no vLLM: reading, sharding, names, versions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import widellm
from routing_helpers import route
from tiny import tiny_model
from widellm.errors import BackendError, CheckpointError, ConfigError, MissingDependencyError
from widellm.integrations import vllm
from widellm.kernels import masked
from widellm.modeling.attach import Width
from widellm.optional import available


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Width]:
    """A tiny routed directory, and what was saved in it."""
    model = tiny_model("llama")
    width = route(model)
    widellm.save(model, tmp_path / "routed")
    return tmp_path / "routed", width


def change(folder: Path, edit: Callable[[dict[str, Any]], None], file: str = "width.safetensors") -> None:
    if file.endswith(".json"):
        content = json.loads((folder / file).read_text())
        edit(content)
        (folder / file).write_text(json.dumps(content))
    else:
        tensors = load_file(folder / file)
        edit(tensors)
        save_file(tensors, folder / file)


def test_modules_are_recognised_by_where_they_are() -> None:
    assert vllm.place_of("model.layers.12.self_attn.qkv_proj") == (12, "self_attn.qkv_proj")
    assert vllm.place_of("layers.0.mlp.down_proj") == (0, "mlp.down_proj")
    assert vllm.place_of("model.embed_tokens") is None
    assert vllm.place_of("model.my_layers_0.mlp") is None
    assert vllm.PLACES.get("block_sparse_moe.experts") is None


def test_vllm_passes_over_our_names_and_no_others(saved: tuple[Path, Width]) -> None:
    folder, _ = saved
    for file, ours in (("width.safetensors", True), ("model.safetensors", False)):
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():
                assert bool(re.search(vllm.NOT_VLLMS, name)) == ours, name


def test_a_plan_says_what_was_saved(saved: tuple[Path, Width]) -> None:
    folder, width = saved
    plan = vllm.read_plan(folder, {"budget": 0.4})
    assert list(plan.groups) == [(s.kind, s.layer_index) for s in width.sublayers]
    assert list(plan.groups.values()) == [s.groups for s in width.sublayers]
    assert width.dial is not None
    assert list(plan.thresholds(0.4).values()) == width.dial.thresholds_at(0.4)
    assert set(plan.thresholds(1.0).values()) == {None}
    assert vllm.read_plan(folder).budget == 1.0  # what the directory was made for


@pytest.mark.parametrize("ranks", (1, 2))
def test_the_shards_of_all_ranks_are_the_router(saved: tuple[Path, Width], ranks: int) -> None:
    folder, width = saved
    plan = vllm.read_plan(folder)
    for sub in width.sublayers:
        shards = [plan.router(sub.kind, sub.layer_index, 32, rank, ranks) for rank in range(ranks)]
        router = width.router(sub)
        assert all(torch.equal(s.down, router.down) for s in shards)
        assert torch.equal(torch.cat([s.up for s in shards]), router.up)
        assert torch.equal(torch.cat([s.bias for s in shards]), router.bias)


def test_ranks_that_do_not_divide_the_groups_are_refused(saved: tuple[Path, Width]) -> None:
    folder, _ = saved
    with pytest.raises(ConfigError, match="ffn of layer 0 has 6 groups, .*size 4 does not divide: use one of 1, 2, 3"):
        vllm.read_plan(folder).router("ffn", 0, 32, 0, 4)


def test_ranks_add_up_to_the_whole_layer() -> None:
    """Each rank decides about its own groups from the same input, and the outputs are summed: as one rank would."""
    torch.manual_seed(0)
    groups, size, ranks = 6, 4, 3
    x, w_in, w_out = torch.randn(5, 8), torch.randn(groups * size, 8), torch.randn(8, groups * size)
    keep = torch.rand(5, groups) > 0.5
    whole = masked.routed_out(masked.routed_in(x, w_in, keep).relu(), w_out, keep)
    total = torch.zeros_like(whole)
    for rank in range(ranks):
        per = vllm.split(groups, ranks, "it")
        own, rows = slice(rank * per, (rank + 1) * per), slice(rank * per * size, (rank + 1) * per * size)
        h = masked.routed_in(x, w_in[rows], keep[:, own]).relu()
        total += masked.routed_out(h, w_out[:, rows], keep[:, own])
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("rest, fits", [(0, True), (4, True), (8, True), (6, False)])
def test_a_mask_is_widened_over_a_fused_projection(rest: int, fits: bool) -> None:
    keep = torch.tensor([[True, False, True], [False, False, False]])
    wide = vllm.widen(keep, 4, 12 + rest)
    if not fits:
        assert wide is None
        return
    assert wide is not None and wide.shape[1] * 4 == 12 + rest
    assert torch.equal(wide[:, :3], keep) and bool(wide[:, 3:].all())


def test_attention_alone_may_be_routed(saved: tuple[Path, Width]) -> None:
    folder, width = saved

    def drop_ffn(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".ffn." in n]:
            del tensors[name]
        tensors["dial.thresholds"] = tensors["dial.thresholds"][::2].contiguous()

    change(folder, drop_ffn)
    plan = vllm.read_plan(folder)
    assert list(plan.groups) == [(s.kind, s.layer_index) for s in width.sublayers[::2]]
    assert len(plan.thresholds(0.5)) == 2


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"budget": 0}, r"budget must be in \(0, 1\]"),
        ({"budget": 1.5}, r"budget must be in \(0, 1\]"),
        ({"budget": "half"}, "must be a number"),
        ({"budget": 0.1}, "the lowest this model was calibrated for"),
        ({"bugdet": 0.5}, r'takes \{"budget": number\}'),
        (0.5, r'takes \{"budget": number\}'),
    ],
)
def test_settings_that_mean_nothing_are_refused(saved: tuple[Path, Width], settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm.read_plan(saved[0], settings)


def test_directories_that_cannot_be_served_are_named(saved: tuple[Path, Width], tmp_path: Path) -> None:
    folder, _ = saved
    with pytest.raises(CheckpointError, match=r"has no width_config.json: give a directory that widellm prune wrote"):
        vllm.read_plan(tmp_path)
    change(folder, lambda t: t.pop("layers.1.ffn.router.up"))
    with pytest.raises(CheckpointError, match=r"missing routers .*layers.1.ffn.router.up"):
        vllm.read_plan(folder)
    (folder / "width.safetensors").write_bytes(b"1234567890")
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        vllm.read_plan(folder)
    (folder / "width.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        vllm.read_plan(folder)
    change(folder, lambda c: c.update(format_version=99), "width_config.json")
    with pytest.raises(CheckpointError, match="upgrade widellm"):
        vllm.read_plan(folder)


def test_an_adapter_is_to_be_exported(saved: tuple[Path, Width], tiny_checkpoint: Callable[..., Path]) -> None:
    base = tiny_checkpoint("llama")
    model = AutoModelForCausalLM.from_pretrained(base)
    width = route(model)
    width.config = width.config.replace(base={"name": str(base)})
    adapter = saved[0].with_name("adapter")
    widellm.save(model, adapter, form="adapter")
    with pytest.raises(CheckpointError, match=f"widellm export {re.escape(str(adapter))} OUT, then serve OUT"):
        vllm.read_plan(adapter)
    # vLLM asks the plugin only where a configuration says so
    change(adapter, lambda c: c.pop("quantization_config"), "config.json")  # as in directories made before
    assert AutoConfig.from_pretrained(adapter).quantization_config["quant_method"] == vllm.METHOD


def test_routers_that_vllm_cannot_feed_are_refused(saved: tuple[Path, Width]) -> None:
    folder, width = saved
    config = width.config.replace(router_input="residual")
    (folder / "width_config.json").write_text(config.to_json())
    with pytest.raises(ConfigError, match="router_input=residual"):
        vllm.read_plan(folder)


def test_no_dial_means_dense_only(saved: tuple[Path, Width]) -> None:
    folder, _ = saved
    change(folder, lambda t: [t.pop("dial.budgets"), t.pop("dial.thresholds")])
    assert set(vllm.read_plan(folder).thresholds(1.0).values()) == {None}
    with pytest.raises(ConfigError, match="has no dial"):
        vllm.read_plan(folder, {"budget": 0.5})


def test_a_router_that_does_not_fit_is_named(saved: tuple[Path, Width]) -> None:
    folder, _ = saved
    with pytest.raises(CheckpointError, match=r"ffn.router.down is .*\[4, 32\], expected torch.float32 \[4, 64\]"):
        vllm.read_plan(folder).router("ffn", 0, 64, 0, 1)
    change(folder, lambda t: t["layers.0.ffn.router.bias"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match="layers.0.ffn.router.bias is damaged"):
        vllm.read_plan(folder).router("ffn", 0, 32, 0, 1)


@pytest.mark.parametrize("version", ("0.31.9", "0.8.5.post1", "0.9"))
def test_an_old_vllm_is_refused(version: str) -> None:
    with pytest.raises(BackendError, match=f"vLLM {version} is too old, widellm serves with 0.32 or newer"):
        vllm.check_version(version)


@pytest.mark.parametrize("version", ("0.32.0", "0.33.1rc0", "1.0", "dev", "0.1.dev12+g1234"))
def test_newer_ones_and_builds_of_ones_own_are_not(version: str) -> None:
    vllm.check_version(version)


@pytest.mark.skipif(available("vllm"), reason="vLLM is installed")
def test_without_vllm_the_extra_is_named() -> None:
    with pytest.raises(MissingDependencyError, match=re.escape('pip install "widellm[vllm]"')):
        vllm.register()


@pytest.mark.requirement("R50")
def test_the_entry_point_leads_to_the_plugin() -> None:
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    found = re.search(r'\[project.entry-points."vllm.general_plugins"\]\nwidellm = "([\w.]+):(\w+)"', text)
    assert found is not None
    assert (found[1], found[2]) == (vllm.__name__, vllm.register.__name__)

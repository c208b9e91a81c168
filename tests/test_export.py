"""The static form: layers of different widths, which one call loads and which compute what the routers decided."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import widellm
from family_contract import greedy, logits_of, tokens
from routing_helpers import oracle_logits, route
from test_cli import run  # noqa: F401  (a fixture)
from tiny import tiny_model, tiny_tokenizer
from widellm.errors import CheckpointError, ConfigError, UnsupportedModelError, WidellmError
from widellm.families import locate
from widellm.modeling.attach import Width, set_budget, set_dial, width_of
from widellm.modeling.checkpoint import load_any, save
from widellm.modeling.quantizer import digest_of
from widellm.modeling.static_model import UNEVEN, Kept, take_out
from widellm.routing.budget import Dial
from widellm.static_export import export_static, most_important
from widellm.training.recipes import recipe_of
from widellm.training.start import random_start

Run = Callable[..., tuple[int, str, str]]
Masks = dict[tuple[int, str], list[int]]
"""(layer, kind) -> the groups that are kept; of the others all."""

ODD: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 6,
    "hidden_size": 36,
    "intermediate_size": 45,
}
"""Three query heads on each of two KV heads, nine groups of five channels."""
UNEQUAL: Masks = {
    (0, "ffn"): [],
    (1, "attention"): [1, 3, 4, 5],
    (1, "ffn"): [0, 3, 8],
    (2, "attention"): [],
}
"""Layer 0 keeps all heads and no channel; 1 one head of the first KV head, all of the second; 2 only channels."""
FIRST_EMPTY: Masks = {(0, "attention"): [], (1, "attention"): [3, 4], (1, "ffn"): [2], (2, "attention"): [0, 5]}
"""Nothing of the attention of layer 0, which a cache's length is read from; a KV head goes, and is shared by one."""
GQA = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "granite")
NEEDS: dict[str, dict[str, Any]] = {
    "qwen2": {"head_dim": None},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "opt": {"ffn_dim": 45, "head_dim": None, "word_embed_proj_dim": 36},
    "mixtral": {"intermediate_size": 48},  # torch multiplies experts of whole 16 bytes only
}


def ignoring_tokens(model: Any, masks: Masks, ffn_group_size: int = 5) -> Width:
    """Routers as recipe static-width makes them: whatever they read, they keep what `masks` say."""
    width = route(model, ffn_group_size=ffn_group_size)
    for sub in width.sublayers:
        router, kept = width.router(sub), masks.get((sub.layer_index, sub.kind), range(sub.groups))
        with torch.no_grad():
            router.up.zero_()
            router.bias.fill_(-1.0)
            router.bias[list(kept)] = 1.0
    width.config = width.config.replace(provenance={"budget": 0.5}, base={"name": "me/base"})
    return width


def make(family: str, **overrides: Any) -> Any:
    return tiny_model(family, **(ODD | NEEDS.get(family, {}) | overrides))


def exported(model: Any, folder: Path, budget: float = 0.5) -> Path:
    """The model, routed, saved to folder/routed, and its static form's directory."""
    save(model, folder / "routed", tiny_tokenizer())
    export_static(folder / "routed", folder / "static", budget)
    return folder / "static"


def shapes(folder: Path) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.requirement("R12")
@pytest.mark.parametrize("masks", [UNEQUAL, FIRST_EMPTY], ids=["unequal", "first-empty"])
@pytest.mark.parametrize("family", [*GQA, "opt", "mixtral"])
def test_one_call_loads_layers_of_different_widths(family: str, masks: Masks, tmp_path: Path) -> None:
    model, ids = make(family), tokens(2, 11)
    dense = make(family)
    width = ignoring_tokens(model, masks)
    expected = logits_of(model, ids)
    torch.testing.assert_close(expected, oracle_logits(dense, width, ids)[0], atol=1e-4, rtol=1e-3)
    loaded = AutoModelForCausalLM.from_pretrained(exported(model, tmp_path))
    torch.testing.assert_close(logits_of(loaded, ids), expected, atol=2e-5, rtol=2e-5)
    assert loaded.config.architectures == [type(dense).__name__] and not loaded.training
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in dense.parameters())

    # with a cache as without, of either kind, and a batch that is padded on the left
    without = greedy(loaded, ids, use_cache=False)
    assert torch.equal(without, greedy(model, ids, use_cache=False))
    assert torch.equal(greedy(loaded, ids), without)
    assert torch.equal(greedy(loaded, ids, cache_implementation="static"), without)
    padded = torch.cat([torch.full((2, 3), 258), ids], 1)
    mask = (padded != 258).long()
    assert torch.equal(greedy(loaded, padded, attention_mask=mask)[:, 3:], without)
    beams = {"num_beams": 3}
    assert torch.equal(greedy(loaded, ids, **beams), greedy(loaded, ids, use_cache=False, **beams))


def test_what_is_dropped_is_gone_from_the_file(tmp_path: Path) -> None:
    model = make("llama", attention_bias=True, mlp_bias=True)
    ignoring_tokens(model, UNEQUAL)
    folder = exported(model, tmp_path)
    found = shapes(folder)
    layer = "model.layers.{}.".format
    assert found[layer(0) + "self_attn.q_proj.weight"] == [36, 36]
    assert found[layer(1) + "self_attn.q_proj.weight"] == [24, 36] and found[layer(1) + "self_attn.q_proj.bias"] == [24]
    assert found[layer(1) + "self_attn.k_proj.weight"] == [12, 36]
    assert found[layer(1) + "self_attn.o_proj.weight"] == [36, 24] and found[layer(1) + "self_attn.o_proj.bias"] == [36]
    assert found[layer(1) + "mlp.gate_proj.weight"] == [15, 36] and found[layer(1) + "mlp.down_proj.weight"] == [36, 15]
    empty = [name for name in found if name.startswith((layer(0) + "mlp", layer(2) + "self_attn"))]
    assert empty == [layer(0) + "mlp.down_proj.bias", layer(2) + "self_attn.o_proj.bias"]
    assert found[layer(2) + "mlp.up_proj.weight"] == [45, 36]
    assert not [name for name in found if "router" in name]
    assert {p.suffix for p in folder.iterdir()} <= {".safetensors", ".json", ".md", ".jinja"}
    sizes = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert sizes["quant_method"] == "widellm-static" and sizes["layers"] == [
        {"heads_per_kv_head": None, "channels": 0},
        {"heads_per_kv_head": [1, 3], "channels": 15},
        {"heads_per_kv_head": [], "channels": None},
    ]
    made = sizes["provenance"]
    assert made["base"]["name"] == "me/base" and made["budget"] == 0.5 and made["versions"]["widellm"]
    card = (folder / "README.md").read_text()
    assert "| 1 | 4 | 2 | 15 |" in card and "| 2 | 0 | 0 | all |" in card and "base_model: me/base" in card
    # the KV cache is as narrow as the layer
    loaded, _ = widellm.load(folder)
    cache = logits_and_cache(loaded)
    assert [cache.layers[i].keys.shape[1] for i in range(3)] == [2, 2, 1]


@torch.no_grad()
def logits_and_cache(model: Any) -> Any:
    return model(tokens(1, 5), use_cache=True).past_key_values


def test_kv_heads_are_repeated_where_attention_cannot_share_them_unevenly(tmp_path: Path) -> None:
    model, ids = make("llama"), tokens(2, 11)
    width = ignoring_tokens(model, {(1, "attention"): [1, 3, 4, 5]})
    expected = logits_of(model, ids)
    widellm.detach(model).set_attn_implementation("eager")  # as soft-capped Gemma 2 runs
    kept = [Kept(torch.tensor([1, 3, 4, 5]) if i == 1 else None, None) for i in range(len(width.layout.layers))]
    sizes = take_out(model, kept, {})
    assert sizes[1].heads_per_kv_head == (1, 1, 1, 1) and model.config._attn_implementation == "eager"
    torch.testing.assert_close(logits_of(model, ids), expected, atol=2e-5, rtol=2e-5)
    model.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits_of(loaded, ids), expected, atol=2e-5, rtol=2e-5)


def test_other_attention_runs_even_layers_and_is_refused_for_uneven_ones(tmp_path: Path) -> None:
    ids, folders = tokens(2, 11), []
    for name, masks in (("even", {(1, "attention"): [0, 1, 4, 5]}), ("uneven", UNEQUAL)):
        model = make("llama")
        ignoring_tokens(model, masks)
        folders.append(exported(model, tmp_path / name))
    even, uneven = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    assert even.config._attn_implementation == "sdpa" and uneven.config._attn_implementation == UNEVEN
    eager = AutoModelForCausalLM.from_pretrained(folders[0], attn_implementation="eager")
    torch.testing.assert_close(logits_of(eager, ids), logits_of(even, ids), atol=1e-5, rtol=1e-5)
    even.set_attn_implementation("eager")
    assert torch.equal(logits_of(even, ids), logits_of(eager, ids))
    with pytest.raises(ConfigError, match="use attn_implementation='sdpa'"):
        AutoModelForCausalLM.from_pretrained(folders[1], attn_implementation="eager")
    before = logits_of(uneven, ids)
    with pytest.raises(ConfigError, match="unequal numbers of query heads"):
        uneven.set_attn_implementation("eager")
    uneven.set_attn_implementation("sdpa")
    assert torch.equal(logits_of(uneven, ids), before)


def test_saving_again_gives_the_same_directory(tmp_path: Path) -> None:
    model, ids = make("qwen3", tie_word_embeddings=True), tokens(2, 11)
    ignoring_tokens(model, UNEQUAL)
    folder = exported(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    again, _ = load_any(str(folder))
    assert not hasattr(again.config, "quantization_config") and not getattr(again, "is_quantized", False)
    third = AutoModelForCausalLM.from_pretrained(tmp_path / "again", device_map={"": "cpu"})
    for other in (again, third):
        assert torch.equal(logits_of(other, ids), logits_of(loaded, ids))
    both = [json.loads((f / "config.json").read_text())["quantization_config"] for f in (folder, tmp_path / "again")]
    assert both[0] == both[1] and "quantization_config" in AutoConfig.from_pretrained(tmp_path / "again").to_dict()
    assert (tmp_path / "again" / "README.md").read_text() == (folder / "README.md").read_text()
    half, _ = widellm.load(folder, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and logits_of(half, ids).isfinite().all()
    third.train()
    third(ids, labels=ids).loss.backward()  # plain linears: any trainer goes on from here
    idle = [name for name, p in third.named_parameters() if p.grad is None]
    assert idle and all("norm" in name for name in idle)  # those that only emptied sub-layers read


def test_what_is_worth_its_work_stays_and_fits_the_budget(tmp_path: Path) -> None:
    model = make("llama")
    width = route(model, head_group_size=2, ffn_group_size=15)
    for sub in width.sublayers:
        with torch.no_grad():
            width.router(sub).bias.copy_(torch.randn(sub.groups, generator=torch.Generator().manual_seed(sub.groups)))
    scores = torch.cat([width.router(sub).bias.detach() for sub in width.sublayers])
    costs = torch.cat([torch.full((sub.groups,), float(sub.group_cost)) for sub in width.sublayers])
    for budget in (0.01, 0.3, 0.5, 0.77, 1.0):
        keep = torch.cat(most_important(width, budget))
        spent = float(costs[keep].sum() / costs.sum())
        assert spent <= budget + 1e-9 and spent > budget - 2 * float(costs.max() / costs.sum())
        if 0 < int(keep.sum()) < keep.numel():
            assert scores[keep].min() >= scores[~keep].max()


def test_routers_that_look_at_tokens_are_averaged_over_a_text(tmp_path: Path) -> None:
    model, ids = make("llama"), tokens(2, 11)
    route(model, ffn_group_size=5)
    width_of(model).config = width_of(model).config.replace(provenance={"budget": 0.5})
    save(model, tmp_path / "routed", tiny_tokenizer())
    text = tmp_path / "some.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    done = export_static(tmp_path / "routed", tmp_path / "out", 0.6, str(text), tokens=512)
    assert 0.5 < done.spent <= 0.6 and done.heads[0] < done.heads[1] and done.channels[0] < done.channels[1]
    loaded, tokenizer = widellm.load(tmp_path / "out")
    made = loaded._widellm_static.provenance
    assert made["text"]["tokens"] == 512 and made["chosen"] == "largest mean importance per work"
    assert len(tokenizer("ab").input_ids) == 2
    # everything is left: the dense model
    export_static(tmp_path / "routed", tmp_path / "all", 1.0)
    torch.testing.assert_close(
        logits_of(widellm.load(tmp_path / "all")[0], ids), logits_of(make("llama"), ids), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("recipe", ["wide", "layer-skip"])
def test_routers_of_other_methods(recipe: str, tmp_path: Path) -> None:
    model = make("llama")
    width = random_start(model, recipe_of(recipe), ffn_group_size=5)
    set_dial(model, Dial(torch.tensor([0.5], dtype=torch.float64), torch.zeros(len(width.sublayers), 1)))
    width.config = width.config.replace(provenance={"budget": 0.5})
    save(model, tmp_path / "routed", tiny_tokenizer())
    done = export_static(tmp_path / "routed", tmp_path / "out", tokens=512)
    assert 0.25 < done.spent <= 0.5
    loaded, _ = widellm.load(tmp_path / "out")
    ids = tokens(2, 11)
    assert torch.equal(greedy(loaded, ids), greedy(loaded, ids, use_cache=False))


def test_an_adapter_gives_the_same_static_form(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    width = ignoring_tokens(model, UNEQUAL)
    width.config = width.config.replace(base={"name": str(tmp_path / "base")})
    save(model, tmp_path / "adapter", tiny_tokenizer(), form="adapter")
    export_static(tmp_path / "adapter", tmp_path / "from-adapter", 0.5)
    first, second = (load_file(f / "model.safetensors") for f in (exported(model, tmp_path), tmp_path / "from-adapter"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_fused_ffn_loses_channels(tmp_path: Path) -> None:
    model, ids = tiny_model("phi3"), tokens(2, 11)
    ignoring_tokens(model, {(0, "ffn"): [0, 4], (1, "ffn"): []}, ffn_group_size=8)
    expected = logits_of(model, ids)
    folder = exported(model, tmp_path)
    assert shapes(folder)["model.layers.0.mlp.gate_up_proj.weight"] == [32, 32]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits_of(loaded, ids), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("phi3", "its q, k and v are one fused linear"),
        ("gpt_neox", "its q, k and v are one fused linear"),
        ("falcon", "its q, k and v are one fused linear"),
        ("olmo2", "it norms q and k across heads"),
    ],
)
def test_heads_that_cannot_be_taken_out(family: str, reason: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    ignoring_tokens(model, {(1, "attention"): [0, 1]}, ffn_group_size=8)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        exported(model, tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "static").exists()


def test_channels_that_cannot_be_taken_out(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    ignoring_tokens(model, {(1, "ffn"): [0, 1]}, ffn_group_size=8)
    with pytest.raises(UnsupportedModelError, match="its projections are Conv1D"):
        exported(model, tmp_path)


def test_quantised_weights_are_refused_with_nothing_changed() -> None:
    class Packed(torch.nn.Parameter):
        pass

    model = make("llama")
    before = dict(model.named_parameters())
    up = locate(model).layers[1].up_proj
    up.weight = Packed(up.weight.detach(), requires_grad=False)
    kept = [Kept(torch.tensor([0]), torch.tensor([1, 2])) for _ in range(3)]
    with pytest.raises(UnsupportedModelError, match=r"quantised \(Packed\)"):
        take_out(model, kept, {})
    assert dict(model.named_parameters()).keys() == before.keys() and type(model).__module__.startswith("transformers")


def refused(load: Any, folder: Path, message: str) -> None:
    """Loading a directory fails, and says why in one line."""
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def damaged(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


BOTH_WAYS = (AutoModelForCausalLM.from_pretrained, widellm.load)


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("load", BOTH_WAYS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q.update(format_version=99), "format_version 99 of the static form"),
        (lambda q: q.update(surprise=1), "surprise"),
        (lambda q: q["layers"].pop(), "sizes of 2 layers, the model has 3"),
        (lambda q: q["layers"][1].pop("channels"), "for layer 1, expected heads_per_kv_head"),
        (lambda q: q["layers"][1].update(channels=-1), "for layer 1, expected heads_per_kv_head"),
        (lambda q: q["layers"][1].update(heads_per_kv_head=[9, 9]), "18 heads and 15 channels for layer 1"),
        (lambda q: q["layers"][1].update(channels=20), "digest"),
        (lambda q: q["layers"][1].update(heads_per_kv_head=[3, 1]), "digest"),  # the weights would fit
        (lambda q: q["layers"][1].update(heads_per_kv_head=[2, 2]), "digest"),
        (lambda q: q.pop("digest"), "digest"),
        (lambda q: q.update(digest=7), "digest"),
    ],
)
def test_a_damaged_directory_says_what_is_wrong(load: Any, change: Any, message: str, tmp_path: Path) -> None:
    model = make("llama")
    ignoring_tokens(model, UNEQUAL)
    folder = exported(model, tmp_path)
    damaged(folder, change)
    refused(load, folder, message)


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("load", BOTH_WAYS)
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    ("layer", "sizes", "problem"),
    [
        (0, {"channels": 5}, r"layers.0.mlp.\w+.weight is missing"),
        (1, {"channels": 0}, r"layers.1.mlp.\w+.weight is unexpected"),
        (1, {"channels": 20}, "has shape"),
        (1, {"heads_per_kv_head": []}, r"layers.1.self_attn.\w+.weight is unexpected"),
        (1, {"heads_per_kv_head": [1, 1]}, "has shape"),
        (2, {"heads_per_kv_head": [1, 3]}, r"layers.2.self_attn.\w+.weight is missing"),
    ],
)
def test_weights_of_other_sizes_are_refused(
    load: Any, shards: bool, layer: int, sizes: Any, problem: str, tmp_path: Path
) -> None:
    """As when files of two exports are mixed: each is whole, and they do not belong together."""
    model = make("llama", tie_word_embeddings=shards)
    ignoring_tokens(model, UNEQUAL)
    folder = exported(model, tmp_path)
    if shards:
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
        tiny_tokenizer().save_pretrained(tmp_path / "shards")
        folder = tmp_path / "shards"

    def change(found: dict[str, Any]) -> None:
        found["layers"][layer].update(sizes)
        found["digest"] = digest_of(found["layers"])

    damaged(folder, change)
    refused(load, folder, problem)


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("load", BOTH_WAYS)
def test_missing_misshapen_and_unexpected_weights_are_refused(load: Any, tmp_path: Path) -> None:
    model = make("mixtral")  # transformers joins its experts while they load
    ignoring_tokens(model, {(1, "attention"): [1, 3, 4, 5]})
    folder = exported(model, tmp_path)
    weights = load_file(folder / "model.safetensors")
    for name, given, problem in (
        ("model.norm.weight", None, "is missing"),
        ("lm_head.weight", None, "is missing"),
        ("model.norm.weight", torch.ones(1), "has shape"),  # which would run
        ("model.layers.3.input_layernorm.weight", torch.ones(36), "is unexpected"),
    ):
        changed = {**weights, name: given}
        if given is None:
            del changed[name]
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        refused(load, folder, f"{name} {problem}")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder)


def test_another_head_may_be_new_and_the_layers_may_not(tmp_path: Path) -> None:
    model = make("llama")
    ignoring_tokens(model, UNEQUAL)
    folder = exported(model, tmp_path)
    found, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"} and info["unexpected_keys"] == {"lm_head.weight"}
    found.save_pretrained(tmp_path / "classifier")
    _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert not any(info.values())
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="layers.1.mlp.up_proj.weight is missing"):
        AutoModelForSequenceClassification.from_pretrained(folder)


def test_it_is_a_dense_model_without_a_budget(tmp_path: Path) -> None:
    for number, masks in enumerate((UNEQUAL, {(i, "ffn"): [0, 1] for i in range(3)})):
        model = make("llama")
        ignoring_tokens(model, masks)
        folder = exported(model, tmp_path / str(number))
        loaded, _ = widellm.load(folder, budget=1.0)
        with pytest.raises(ConfigError, match="is dense"):
            set_budget(loaded, 0.5)
        with pytest.raises(ConfigError, match="has no budget"):
            widellm.load(folder, budget=0.5)
        with pytest.raises(ConfigError, match="quantise the loaded model"):
            widellm.load(folder, quantization_config=object())
        with pytest.raises(UnsupportedModelError, match="static form, which is not routed again"):
            route(loaded)
        with pytest.raises(WidellmError, match="is dense"):
            export_static(folder, tmp_path / "twice", 0.5)


def test_the_command(run: Run, tmp_path: Path) -> None:  # noqa: F811
    model = make("llama")
    route(model, ffn_group_size=5)
    width_of(model).config = width_of(model).config.replace(provenance={"budget": 0.5})
    routed, out = tmp_path / "routed", tmp_path / "out"
    save(model, routed, tiny_tokenizer())
    text = tmp_path / "some.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    static = ("--form", "static", "--text", text, "--tokens", "512")
    code, shown, err = run("export", routed, out, *static, "--shard-size", "20KB")
    assert code == 0 and "static form" in shown and "of 18 heads and" in shown and "of the routable work" in shown, err
    assert (out / "model.safetensors.index.json").is_file()
    code, shown, err = run("eval", out, "--text", text, "--window", "64")
    assert code == 0 and "token perplexity" in shown and "budget" not in shown, err
    code, shown, err = run("generate", out, "hello", "--max-new-tokens", "4")
    assert code == 0 and shown.startswith("hello"), err
    for arguments, message in (
        (("export", routed, out, *static), "exists"),
        (("export", routed, tmp_path / "x", *static, "--budget", "2"), "budget must be in (0, 1]"),
        (("export", routed, tmp_path / "x", "--budget", "0.5"), "--budget is of the static form"),
        (("export", routed, tmp_path / "x", "--form", "adapter", "--text", "x"), "--text is of the static form"),
        (("export", routed, tmp_path / "x", "--tokens", "512"), "--tokens is of the static form"),
        (("export", routed, tmp_path / "x", "--form", "adapter", "--column", "text"), "--column is of the static form"),
        (("export", routed, tmp_path / "x", *static, "--column", "body"), "some.txt has no columns"),
        (("export", routed, tmp_path / "x", "--form", "static", "--column", "body"), "python-docs has no columns"),
        (("export", routed, tmp_path / "x", *static, "--budget", "1"), "budget 1.0 keeps all groups: leave the text"),
        (("export", routed, tmp_path / "x", "--form", "adapter", "--shard-size", "1MB"), "full and the static form"),
        (("export", routed, tmp_path / "x", "--form", "static", "--tokens", "1"), "--tokens must be at least 2"),
        (("export", routed, tmp_path / "x", "--form", "static", "--text", text), "the text is too short"),
        (("export", routed, tmp_path / "x", "--form", "narrow"), "--form must be one of full, adapter, static"),
        (("eval", out, "--text", text, "--budget", "0.5"), "has no budget"),
        (("prune", out, "--out", tmp_path / "x", "--text", text, "--tokens", "512", "--window", "64"), "static form"),
    ):
        code, _, err = run(*arguments)
        last = err.splitlines()[-1]
        assert code == 2 and last.startswith("error: ") and message in last, err
    assert not (tmp_path / "x").exists()


def test_the_text_is_not_for_routers_that_ignore_tokens(tmp_path: Path) -> None:
    model = make("llama")
    ignoring_tokens(model, UNEQUAL)
    save(model, tmp_path / "routed", tiny_tokenizer())
    for given in ({"text": "python-docs"}, {"tokens": 16384}, {"column": "text"}):
        with pytest.raises(ConfigError, match=f"for all tokens already: leave the {next(iter(given))} out"):
            export_static(tmp_path / "routed", tmp_path / "out", 0.5, **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("budget", [1.0, None])
def test_the_text_is_not_for_a_budget_that_keeps_all(budget: float | None, tmp_path: Path) -> None:
    model = make("llama")
    route(model, ffn_group_size=5)
    width_of(model).config = width_of(model).config.replace(provenance={"budget": 1.0})
    save(model, tmp_path / "routed", tiny_tokenizer())
    for given in ({"text": "/nonexistent.txt"}, {"tokens": 16384}, {"column": "text"}):
        with pytest.raises(ConfigError, match=f"keeps all groups: leave the {next(iter(given))} out"):
            export_static(tmp_path / "routed", tmp_path / "out", budget, **given)
    assert not (tmp_path / "out").exists()


def test_pushing_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from test_loading import FakeHub
    from widellm.modeling.checkpoint import push

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    model = make("llama")
    ignoring_tokens(model, UNEQUAL)
    assert "https://hub/me/small" in push(exported(model, tmp_path), "me/small")
    assert {"README.md", "config.json", "model.safetensors"} <= set(FakeHub.files)

"""The contract of every supported model family, and what is said to those that are not."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from family_contract import CHECKS, logits_of, make, tokens
from routing_helpers import route
from tiny import CONTRACT, tiny_model, tiny_tokenizer
from widellm.calibrate.calibration import Settings
from widellm.config import WidthConfig
from widellm.errors import ConfigError, UnsupportedModelError
from widellm.families import FAMILIES, Family, locate
from widellm.kernels import cpu
from widellm.modeling.attach import attach, detach, set_backend, width_of
from widellm.modeling.checkpoint import load
from widellm.modeling.linears import is_plain_linear, matrix
from widellm.modeling.routed_layer import RoutedLayer
from widellm.pipeline import prune


@pytest.mark.requirement("R11")
@pytest.mark.requirement("R17")
@pytest.mark.requirement("R19")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name: str, check: str) -> None:
    CHECKS[check](name)


@pytest.mark.requirement("R18")
def test_every_family_has_a_contract_and_a_row() -> None:
    """`tools/supported_models.py --check` compares every cell with what the contract finds; here: no row is missing."""
    assert {family for family, _ in CONTRACT.values()} == set(FAMILIES)
    table = (Path(__file__).parents[1] / "docs" / "supported-models.md").read_text(encoding="utf-8")
    assert [family for family in FAMILIES if f"| `{family}` |" not in table] == []


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("llama", None),
        ("phi3", [0, 1, 2, 3, -1, -1, -1, -1]),
        ("gpt_neox", [0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1]),
        ("falcon", [0, 1, 2, 3, -1, -1]),
        ("falcon-gqa", [0, 1, -1, -1, 2, 3, -1, -1]),
    ],
)
def test_the_rows_of_a_fused_projection(name: str, heads: list[int] | None) -> None:
    assert locate(make(name)).fused_heads() == heads


def test_a_fused_projection_makes_k_and_v_of_every_token() -> None:
    model, ids = make("gpt_neox"), tokens(1, 7)
    sub = route(model).sublayers[0]
    qkv = model.gpt_neox.layers[0].attention.query_key_value
    seen: list[torch.Tensor] = []
    qkv.register_forward_hook(lambda module, args, output: seen.extend((args[0], output)))
    logits_of(model, ids)
    by_head = seen[1].view(7, 4, 3, 8)
    whole = torch.nn.functional.linear(seen[0], qkv.weight, qkv.bias).view(7, 4, 3, 8)
    torch.testing.assert_close(by_head[:, :, 1:], whole[:, :, 1:], atol=1e-5, rtol=1e-4)
    assert sub.keep is not None and not by_head[:, :, 0][~sub.keep[0]].any()


def test_a_norm_across_heads_gets_all_of_them() -> None:
    """OLMo 2 norms q over all heads at once: with zeros for the dropped ones, kept heads would change."""
    model, ids = make("olmo2"), tokens(1, 7)
    sub = route(model).sublayers[0]
    attention = model.model.layers[0].self_attn
    seen: list[torch.Tensor] = []
    attention.q_norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits_of(model, ids)
    assert sub.keep is not None and not sub.keep.all() and bool((seen[0] != 0).all())
    # q is not saved, so it does not count as routable
    assert sub.group_cost * sub.groups == attention.o_proj.weight.numel()


@pytest.mark.skipif(not cpu.availability()[0], reason=f"native library: {cpu.availability()[1]}")
@pytest.mark.parametrize("name", ["smollm3", "phi3", "phi3-partial-rotary"])
def test_whole_layer_decode_of_layers_that_are_not_quite_llamas(name: str) -> None:
    """Without rotary embeddings in some layers or in part of each head, or with fused linears (bound as row slices)."""
    model, ids = make(name), tokens(2, 3)
    route(model)
    native = copy.deepcopy(model)
    set_backend(model, "masked")
    torch.testing.assert_close(logits_of(native, ids), logits_of(model, ids), atol=1e-4, rtol=1e-3)
    layers = native.model.layers
    assert all(isinstance(m, RoutedLayer) and m._native[-1].fused is not None for m in layers)
    if name == "smollm3":
        assert [bool(layer.self_attn.use_rope) for layer in layers] == [True, False]
        return
    bound = layers[0]._native[-1].fused
    for m in (model, native):  # a slice does not follow its parameter to new memory: it has to be bound again
        weight = m.model.layers[0].self_attn.qkv_proj.weight
        weight.data = weight.data * 2
    torch.testing.assert_close(logits_of(native, ids), logits_of(model, ids), atol=1e-4, rtol=1e-3)
    assert layers[0]._native[-1].fused is not bound


def test_transposed_weights_are_stored_for_kernels_and_given_back() -> None:
    model = make("gpt2")
    block = model.transformer.h[0]
    route(model)
    if block.mlp.c_proj.weight.device.type == "cpu":
        assert matrix(block.attn.c_attn).stride(1) == 1 and matrix(block.mlp.c_proj).stride(0) == 1
    assert is_plain_linear(block.mlp.c_fc) and matrix(block.mlp.c_fc).shape == (48, 32)


def test_experts_are_left_alone() -> None:
    model = make("mixtral")
    with pytest.raises(ConfigError, match="mixtral can route attention only, not ffn"):
        attach(model, WidthConfig("mixtral", 2, ffn_group_size=8))
    width = route(model)
    assert [s.kind for s in width.sublayers] == ["attention"] * 2
    assert list(width.permutations.shape) == [2, 0] and width.config.kinds == ("attention",)
    logits_of(model, tokens(1, 5))
    counter = width.counter()
    counter.add(None, (1, 5))
    assert counter.work(0.5).ffn_sparsity == 0.0 < counter.work(0.5).attention_sparsity


@pytest.mark.parametrize("kind", ["attention", "ffn"])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_one_kind_alone_can_be_routed(name: str, kind: str) -> None:
    model = make(name)
    width = attach(model, WidthConfig(locate(model).model_type, 2, 1, 8, kinds=(kind,)))
    for sub in width.sublayers:
        sub.threshold = 0.0
        torch.nn.init.normal_(width.router(sub).bias)
    logits_of(model, tokens(1, 5))
    assert [s.kind for s in width.sublayers] == [kind] * 2 and all(s.keep is not None for s in width.sublayers)


@pytest.mark.parametrize("kinds", [(), ("heads",), "ffn", ("ffn", "attention", "depth")])
def test_unknown_kinds_are_refused(kinds: Any) -> None:
    with pytest.raises(ConfigError, match="kinds must name one or both of attention, ffn"):
        WidthConfig("llama", 2, kinds=kinds)


@pytest.mark.requirement("R24")
def test_an_activation_without_kernels_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="activation 'relu2' is not supported; known: gelu"):
        locate(tiny_model("llama", hidden_act="relu2"))


@pytest.mark.requirement("R24")
def test_experts_in_a_dense_familys_place_are_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'olmoe' is not supported .it lacks .*0.mlp.gate_proj.*mixtral"):
        locate(tiny_model("olmoe", num_experts=4))


def test_masks_of_flattened_sub_layers_have_a_batch() -> None:
    """OPT flattens [B, T, D] before its FFN; its masks are [B, T, G] all the same."""
    model = make("opt")
    route(model)
    logits_of(model, tokens(2, 5))
    assert all(sub.keep is not None and sub.keep.shape[:2] == (2, 5) for sub in width_of(model).sublayers)


def test_watching_sees_few_tokens_too() -> None:
    """A layer bound natively does not call its modules; watching the routers must not miss it."""
    model, ids = make("llama"), tokens(1, 4)
    width = route(model)
    logits_of(model, ids)
    seen: list[int] = []
    with width.watch(lambda place, logits: seen.append(place)):
        logits_of(model, ids)
    assert seen == [0, 1, 2, 3]


@pytest.mark.requirement("R24")
@pytest.mark.parametrize("check", CHECKS)
def test_the_guide_by_following_it(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/families.md is short, and the family it adds as an example keeps the contract."""
    guide = (Path(__file__).parents[1] / "docs" / "families.md").read_text(encoding="utf-8")
    assert len(guide.splitlines()) <= 50
    entry = re.search(r'^ +"(\w+)": (Family\(.*\)),$', guide, re.MULTILINE)
    contract = re.search(r'Add `"(.+)": (\(.+\))` to `CONTRACT`', guide)
    assert entry is not None and contract is not None and entry[1] == contract[1]
    monkeypatch.setitem(FAMILIES, entry[1], eval(entry[2], {"Family": Family}))
    monkeypatch.setitem(CONTRACT, contract[1], eval(contract[2]))
    CHECKS[check](entry[1])


@pytest.mark.requirement("R22")
@pytest.mark.parametrize("name", CONTRACT)
def test_every_family_attaches_on_the_meta_device(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = make(name).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layout = locate(model)
    width = attach(model, WidthConfig(layout.model_type, 2, 2, 8, 4, kinds=layout.family.kinds))
    assert all(p.is_meta for sub in width.sublayers for p in width.router(sub).parameters())
    detach(model)


@pytest.mark.parametrize("name", ["gpt2", "opt", "mixtral"])
def test_prune_and_its_directory(name: str, tmp_path: Path) -> None:
    """From a directory to a routed one: learned positions, an FFN without a module, no routed FFN."""
    model, out, text = make(name), tmp_path / "routed", tmp_path / "text.txt"
    model.save_pretrained(tmp_path / "dense")
    tiny_tokenizer().save_pretrained(tmp_path / "dense")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    settings = Settings(ffn_group_size=8, router_rank=4)
    prune(str(tmp_path / "dense"), out, 0.5, str(text), tokens=4096, window=128, settings=settings, force=True)
    routed, _ = load(out, budget=0.5)
    assert width_of(routed).config.kinds == locate(model).family.kinds
    assert torch.isfinite(logits_of(routed, tokens(1, 9))).all()


@pytest.mark.skipif(not cpu.availability()[0], reason=f"native library: {cpu.availability()[1]}")
@pytest.mark.parametrize("name", CONTRACT)
def test_native_kernels_take_every_familys_weights_in_bfloat16(name: str) -> None:
    model, ids = make(name).to(torch.bfloat16), tokens(1, 50)
    first = route(model).sublayers[0]
    expected = []
    for backend in ("masked", "cpu"):  # by name: what it cannot take is an error, not a fall-back
        set_backend(model, backend)
        assert torch.isfinite(logits_of(model, ids)).all()
        assert first.keep is not None
        expected.append(first.keep.clone())
    assert torch.equal(*expected)

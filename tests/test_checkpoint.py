"""Saving and loading: a new process computes the same; a damaged directory is refused and says where."""

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
from safetensors.torch import load_file, save_file

import widellm
from routing_helpers import route
from tiny import CASES, tiny_model
from tiny import tiny_tokenizer as make_tokenizer
from widellm.errors import CheckpointError, ConfigError, WidellmError
from widellm.modeling.attach import detach, get_budget, width_of
from widellm.sources.models import load_dense


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = tiny_model("llama")
    route(model)
    widellm.save(model, tmp_path / "routed", make_tokenizer())
    return tmp_path / "routed"


@pytest.mark.requirement("R10")
@pytest.mark.requirement("R15")
@pytest.mark.requirement("R16")
def test_a_new_process_computes_the_same(saved: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    model, _ = widellm.load(saved, budget=0.5)
    save_file({"ids": ids, "logits": logits_of(model, ids)}, tmp_path / "expected.safetensors")
    script = f"""
import torch, widellm
from safetensors.torch import load_file
model, tokenizer = widellm.load({str(saved)!r}, budget=0.5)
expected = load_file({str(tmp_path / "expected.safetensors")!r})
with torch.no_grad():
    assert torch.equal(model(expected["ids"]).logits, expected["logits"])
assert tokenizer.decode([104, 105])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.requirement("R11")
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_round_trip(family: str, shape: str, ids: torch.Tensor, tmp_path: Path) -> None:
    from tiny import SHAPES

    model = tiny_model(family, **SHAPES[shape])
    dense = {k: v.clone() for k, v in model.state_dict().items()}
    route(model, head_group_size=2)
    expected = logits_of(model, ids)
    widellm.save(model, tmp_path / "routed", make_tokenizer())
    loaded, _ = widellm.load(tmp_path / "routed", budget=0.5)
    assert torch.equal(logits_of(loaded, ids), expected)
    widellm.set_budget(loaded, 0.8)
    widellm.set_budget(model, 0.8)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    detach(loaded)
    assert all(torch.equal(v, dense[k]) for k, v in loaded.state_dict().items())


def test_the_directory_holds_no_pickle_and_is_a_dense_model_too(saved: Path, ids: torch.Tensor) -> None:
    names = sorted(p.name for p in saved.iterdir())
    assert all(n.endswith((".json", ".safetensors", ".jinja", ".md")) for n in names), names
    plain = load_dense(str(saved)).model
    torch.testing.assert_close(logits_of(plain, ids), logits_of(tiny_model("llama"), ids), atol=1e-4, rtol=1e-4)
    assert plain.config._attn_implementation == "sdpa"


def test_saving_leaves_the_model_as_it_was(tmp_path: Path, ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    route(model)
    before, attention = logits_of(model, ids), model.config._attn_implementation
    widellm.save(model, tmp_path / "a")
    assert torch.equal(logits_of(model, ids), before) and model.config._attn_implementation == attention


def test_the_default_budget_is_the_one_it_was_made_for(tmp_path: Path) -> None:
    model = tiny_model("llama")
    width = route(model)
    width.config = width.config.replace(provenance={"budget": 0.6})
    widellm.save(model, tmp_path / "a", make_tokenizer())
    assert get_budget(widellm.load(tmp_path / "a")[0]) == 0.6
    with pytest.raises(ConfigError, match="budget must be in"):
        widellm.load(tmp_path / "a", budget=1.5)


def test_bfloat16_round_trip_keeps_float32_routers(tmp_path: Path, ids: torch.Tensor) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    width = route(model)
    widellm.save(model, tmp_path / "a", make_tokenizer())
    first, tokenizer = widellm.load(tmp_path / "a", budget=0.5)
    router = width_of(first).router(width.sublayers[0])
    assert router.down.dtype == torch.float32 and torch.equal(router.down, width.router(width.sublayers[0]).down)
    widellm.save(first, tmp_path / "b", tokenizer)
    second, _ = widellm.load(tmp_path / "b", budget=0.5)
    assert torch.equal(logits_of(second, ids), logits_of(first, ids))


def test_a_dense_model_is_not_saved_as_a_routed_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dense"):
        widellm.save(tiny_model("llama"), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_an_existing_directory_is_kept(saved: Path) -> None:
    model = tiny_model("llama")
    route(model)
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    with pytest.raises(WidellmError, match="exists"):
        widellm.save(model, saved)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def _edit(saved: Path, change: Callable[[dict[str, torch.Tensor]], object], name: str = "width.safetensors") -> None:
    tensors = load_file(saved / name)
    change(tensors)
    save_file(tensors, saved / name, metadata={"format": "pt"})


ROUTER = "layers.1.ffn.router.up"

TAMPERINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "router missing": (lambda d: _edit(d, lambda t: t.pop(ROUTER)), rf"missing keys \[{ROUTER}\]"),
    "extra key": (lambda d: _edit(d, lambda t: t.update(x=torch.zeros(1))), r"unexpected keys \[x\]"),
    "router of another shape": (
        lambda d: _edit(d, lambda t: t.update({ROUTER: torch.zeros(3, 4)})),
        rf"{ROUTER} is torch.float32 \[3, 4\], expected torch.float32 \[6, 4\]",
    ),
    "router of another dtype": (
        lambda d: _edit(d, lambda t: t.update({ROUTER: t[ROUTER].half()})),
        rf"{ROUTER} is torch.float16",
    ),
    "NaN in a router": (lambda d: _edit(d, lambda t: t[ROUTER].fill_(torch.nan)), rf"{ROUTER} holds NaN"),
    "permutation with a repeat": (lambda d: _edit(d, lambda t: t["permutations"].fill_(0)), "must reorder"),
    "dial without order": (
        lambda d: _edit(d, lambda t: t.update({"dial.budgets": t["dial.budgets"].flip(0)})),
        "must ascend",
    ),
    "routers truncated": (
        lambda d: (d / "width.safetensors").write_bytes((d / "width.safetensors").read_bytes()[:-100]),
        "truncated|cannot be read",
    ),
    "routers gone": (lambda d: (d / "width.safetensors").unlink(), "is missing"),
    "weights truncated": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
        "model.safetensors",
    ),
    "weight missing": (
        lambda d: _edit(d, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"), "model.safetensors"),
        "model.layers.0.mlp.up_proj.weight",
    ),
    "weights of another model": (
        lambda d: _edit(d, lambda t: t["model.layers.0.mlp.up_proj.weight"].mul_(2), "model.safetensors"),
        "wrong base model",
    ),
    "config damaged": (lambda d: (d / "width_config.json").write_text("{"), "not valid JSON"),
    "config of a newer version": (
        lambda d: (d / "width_config.json").write_text(
            json.dumps({**json.loads((d / "width_config.json").read_text()), "format_version": 7})
        ),
        "upgrade widellm",
    ),
}


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_a_tampered_directory_is_refused(tampering: str, saved: Path) -> None:
    change, message = TAMPERINGS[tampering]
    change(saved)
    with pytest.raises(CheckpointError, match=message) as caught:
        widellm.load(saved)
    assert "\n" not in str(caught.value)


def test_a_killed_save_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from widellm.modeling import width_file

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    model = tiny_model("llama")
    route(model)
    monkeypatch.setattr(width_file, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        widellm.save(model, tmp_path / "a", make_tokenizer())
    assert list(tmp_path.iterdir()) == []


def test_a_copied_half_of_a_directory_is_refused(saved: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    shutil.copy(saved / "config.json", half)
    with pytest.raises(CheckpointError, match="no width_config.json"):
        widellm.load(half)

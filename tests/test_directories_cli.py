"""The commands on directories: export, card, push, eval --tasks, generate --speculative; and the example scripts."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import widellm
from routing_helpers import route
from test_cli import run  # noqa: F401  (a fixture)
from tiny import tiny_tokenizer as make_tokenizer
from widellm.kernels import cpu
from widellm.modeling.checkpoint import save
from widellm.optional import available

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
Build = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def routed(tiny_checkpoint: Build, tmp_path: Path) -> Path:
    base = tiny_checkpoint("llama", "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    width = route(model)
    width.config = width.config.replace(base={"name": str(base)}, provenance={"budget": 0.5})
    save(model, tmp_path / "routed", make_tokenizer())
    return tmp_path / "routed"


def test_export_there_and_back(routed: Path, run: Run, tmp_path: Path) -> None:  # noqa: F811
    code, shown, err = run("export", routed, tmp_path / "adapter", "--form", "adapter")
    assert code == 0 and "adapter form" in shown, err
    assert run("export", tmp_path / "adapter", tmp_path / "full", "--shard-size", "20KB")[0] == 0
    assert (tmp_path / "full" / "model.safetensors.index.json").is_file()
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        first, last = (widellm.load(p)[0](ids).logits for p in (routed, tmp_path / "full"))
    assert torch.equal(first, last)
    for arguments, message in (
        (("export", routed, tmp_path / "full"), "exists"),
        (("export", routed, tmp_path / "x", "--form", "both"), "form must be one of"),
        (("export", tmp_path / "base", tmp_path / "x"), "no width_config.json"),
    ):
        code, _, err = run(*arguments)
        assert code == 2 and message in err and err.count("\n") == 1


def test_card_measures_the_curve(routed: Path, run: Run, tmp_path: Path) -> None:  # noqa: F811
    text = tmp_path / "some.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    before = (routed / "width.safetensors").read_bytes()
    arguments = ("card", routed, "--text", text, "--window", "64", "--max-windows", "3")
    code, shown, err = run(*arguments, "--budgets", "0.9,0.5")
    assert code == 0 and "budget 0.9" in shown and "budget 0.5" in shown, err
    card = (routed / "README.md").read_text()
    assert "| 0.9 |" in card and "| 0.5 |" in card and "some.txt, 3 windows of 64" in card
    rows = json.loads((routed / "width_config.json").read_text())["provenance"]["results"]
    assert [row["budget"] for row in rows] == [0.9, 0.5]
    model, _ = widellm.load(routed)  # it is still the same directory
    assert widellm.get_budget(model) == 0.5 and (routed / "width.safetensors").read_bytes() == before
    code, _, err = run(*arguments, "--budgets", "half")
    assert code == 2 and "--budgets must be numbers" in err
    code, _, err = run(*arguments, "--budgets", "2")
    assert code == 2 and "budget must be in (0, 1]" in err


def test_push(routed: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    import huggingface_hub

    from test_loading import FakeHub

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    code, shown, err = run("push", routed, "me/routed")
    assert code == 0 and "https://hub/me/routed" in shown, err
    assert {"README.md", "width.safetensors", "model.safetensors"} <= set(FakeHub.files)


def test_generate_speculatively(routed: Path, run: Run) -> None:  # noqa: F811
    _, dense, _ = run("generate", routed, "hello there", "--budget", "1", "--max-new-tokens", "8")
    code, shown, err = run("generate", routed, "hello there", "--speculative", "--max-new-tokens", "8")
    assert code == 0 and shown == dense and "accepted" in err


def test_an_adapter_whose_base_moved(routed: Path, run: Run, tmp_path: Path) -> None:  # noqa: F811
    assert run("export", routed, tmp_path / "adapter", "--form", "adapter")[0] == 0
    (tmp_path / "base").rename(tmp_path / "moved")
    code, _, err = run("generate", tmp_path / "adapter", "hi")
    assert code == 2 and "say where it is with base=" in err and err.count("\n") == 1
    assert run("generate", tmp_path / "adapter", "hi", "--base", tmp_path / "moved", "--max-new-tokens", "2")[0] == 0


def test_eval_wants_a_text_or_tasks(routed: Path, run: Run) -> None:  # noqa: F811
    for arguments in ((), ("--text", "x", "--tasks", "y")):
        code, _, err = run("eval", routed, *arguments)
        assert code == 2 and "--text FILE for perplexity, or --tasks NAMES" in err


@pytest.mark.skipif(not available("lm_eval"), reason='needs pip install "widellm[eval]"')
def test_eval_tasks_prints_and_writes(routed: Path, run: Run, tmp_path: Path) -> None:  # noqa: F811
    rows = [{"sentence": "Ann met Bea and _ smiled.", "option1": "Ann", "option2": "Bea", "answer": "1"}] * 2
    (tmp_path / "winogrande").mkdir()
    (tmp_path / "winogrande" / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--tasks", "winogrande", "--task-data", tmp_path, "--json", tmp_path / "out.json", "--budget", "0.5")
    code, shown, err = run("eval", routed, *arguments)
    assert code == 0 and "winogrande" in shown and "routable work saved" in shown, err
    found = json.loads((tmp_path / "out.json").read_text())
    (row,) = found["tasks"]
    assert row["metric"] == "acc" and row["documents"] == 2 and row["shots"] == 0 and found["budget"] == 0.5


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_example_loading(routed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("loading.py", monkeypatch, routed)
    assert "detached: the base model again" in capsys.readouterr().out


def test_example_self_speculative(
    routed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("self_speculative.py", monkeypatch, routed, "--tokens", "6", "--budgets", "0.5")
    assert "0 of 4 texts differ" in capsys.readouterr().out


@pytest.mark.skipif(not available("torchao"), reason='needs pip install "widellm[quant]"')
def test_example_quantised(routed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("quantised.py", monkeypatch, routed, "--windows", "2", "--window", "32", "--skip", "0")
    out = capsys.readouterr().out
    who = "on int8 weights" if cpu.availability()[0] else "their own library"
    assert "int8: token perplexity" in out and who in out

"""The command from end to end on tiny models, and what it says when it cannot work."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import widellm
from widellm.cli.main import main
from widellm.modeling.attach import get_budget

ROOT = Path(__file__).parents[1]
Build = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
PRUNE = ("--tokens", "2048", "--window", "128", "--ffn-group-size", "8", "--router-rank", "4")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: (exit code, stdout, stderr)."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["widellm", *map(str, args)])
        monkeypatch.setenv("COLUMNS", "120")
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def routed(tiny_checkpoint: Build, run: Run, tmp_path: Path) -> Path:
    code, _, err = run("prune", tiny_checkpoint(), "--out", tmp_path / "routed", *PRUNE, "--force")
    assert code == 0, err
    return tmp_path / "routed"


PRUNE_KEYS = {
    "dense": {"perplexity", "prefill_tokens_per_s", "decode_tokens_per_s"},
    "routed": {"perplexity", "kl_to_dense", "top1_agreement", "prefill_tokens_per_s", "decode_tokens_per_s"},
    "work": {"budget", "saved_routable", "saved_all_layers", "attention_sparsity", "ffn_sparsity"},
    "calibration": {"seconds", "peak_memory_gb", "tokens"},
}


def test_the_package_is_a_command_too() -> None:
    result = subprocess.run([sys.executable, "-m", "widellm", "--version"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and widellm.__version__ in result.stdout, result.stderr


@pytest.mark.requirement("R9")
@pytest.mark.requirement("R41")
def test_prune_writes_a_model_a_table_and_json(tiny_checkpoint: Build, run: Run, tmp_path: Path) -> None:
    out, report = tmp_path / "routed", tmp_path / "report.json"
    args = ("prune", tiny_checkpoint(), "--budget", "0.6", "--out", out, "--json", report, *PRUNE, "--force")
    code, shown, err = run(*args)
    assert code == 0, err
    found = json.loads(report.read_text())
    for section, keys in PRUNE_KEYS.items():
        assert keys <= set(found[section]) and all(isinstance(found[section][k], (int, float)) for k in keys)
    assert found["work"]["budget"] == 0.6 and found["calibration"]["tokens"] == 2048
    assert found["text"]["source"] == "python-docs" and len(found["text"]["sha256"]) == 64
    assert "perplexity" in shown and "prefill tokens/s" in shown and "routable work saved" in shown
    model, tokenizer = widellm.load(out)
    assert get_budget(model) == 0.6
    text = tokenizer.decode(model.generate(torch.tensor([[72, 105]]), max_new_tokens=4, do_sample=False)[0])
    assert isinstance(text, str)


@pytest.mark.requirement("R7")
@pytest.mark.requirement("R48")
def test_routers_are_fitted_again_after_fine_tuning(routed: Path, run: Run, tmp_path: Path) -> None:
    """A routed directory whose weights have changed since is refused by load, and pruned like any dense one."""
    weights = load_file(routed / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name] + 0.05 * torch.randn(weights[name].shape)
    save_file(weights, routed / "model.safetensors", metadata={"format": "pt"})
    code, _, err = run("generate", routed, "hello")
    assert code == 2 and "fingerprint" in err
    code, _, err = run("prune", routed, "--out", tmp_path / "again", *PRUNE, "--force")
    assert code == 0, err
    before, after = (load_file(d / "width.safetensors")["layers.0.ffn.router.up"] for d in (routed, tmp_path / "again"))
    assert not torch.equal(before, after)
    assert run("generate", tmp_path / "again", "hello", "--max-new-tokens", "2")[0] == 0


def test_prune_reads_local_text_and_the_models_own(tiny_checkpoint: Build, run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike; each unhappy family is unhappy in its own way.\n" * 60)
    dense = tiny_checkpoint()
    for number, source in enumerate((str(text), "self")):
        report = tmp_path / f"{number}.json"
        args = ("--text", source, "--json", report, *PRUNE, "--force")
        code, _, err = run("prune", dense, "--out", tmp_path / f"routed{number}", *args)
        assert code == 0, err
        assert json.loads(report.read_text())["text"]["source"] == source


@pytest.mark.requirement("R2")
@pytest.mark.requirement("R3")
def test_eval_says_what_was_measured(routed: Path, run: Run, tmp_path: Path) -> None:
    report = tmp_path / "eval.json"
    args = ("--text", "python-docs", "--window", "64", "--max-windows", "3", "--json", report)
    code, shown, err = run("eval", routed, *args, "--budget", "0.5")
    assert code == 0, err
    found = json.loads(report.read_text())
    assert (found["windows"], found["window"], found["tokens"]) == (3, 64, 189)
    assert found["metric"] == "token perplexity" and found["work"]["budget"] == 0.5
    assert re.search(r"token perplexity\W+[\d.]+", shown) and "3 of 64 tokens" in shown
    run("eval", routed, *args, "--budget", "0.5")
    again = json.loads(report.read_text())
    assert again["perplexity"] == found["perplexity"]


@pytest.mark.requirement("R8")
def test_results_and_models_say_what_made_them(routed: Path, run: Run, tmp_path: Path) -> None:
    """Version and, from a checkout, commit; one digest of the configuration in the model, its card and results."""
    run("eval", routed, "--text", "python-docs", "--window", "64", "--max-windows", "1", "--json", tmp_path / "e.json")
    saved = (routed / "width_config.json").read_bytes()
    digest = hashlib.sha256(saved).hexdigest()[:16]
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["config"] == digest
    assert digest in (routed / "README.md").read_text()
    for versions in (found["versions"], json.loads(saved)["provenance"]["versions"]):
        assert versions["widellm"] == widellm.__version__
        assert ("commit" in versions) == (ROOT / ".git").exists()


def test_a_routed_model_on_the_hub_is_routed(routed: Path, run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    """Given by id, it is downloaded first, and then is what a directory is."""
    monkeypatch.setattr("widellm.sources.models._download", lambda name, revision=None: routed)
    args = ("--text", "python-docs", "--window", "64", "--max-windows", "1", "--budget", "0.5", "--json")
    for name in ("me/routed", routed):
        code, _, err = run("eval", name, *args, tmp_path / "e.json")
        assert code == 0, err
        assert json.loads((tmp_path / "e.json").read_text())["work"]["saved_routable"] > 0.3


WRONG = {
    "directory of --json": (("--text", "python-docs", "--json", "nowhere/x.json"), "nowhere is not a directory"),
    "--limit": (("--text", "python-docs", "--limit", "3"), "--limit means nothing with --text"),
    "--seed": (("--text", "python-docs", "--seed", "0"), "--seed means nothing with --text"),
    "--batch-size": (("--text", "python-docs", "--batch-size", "8"), "--batch-size means nothing with --text"),
    "--column of tasks": (("--tasks", "arc_easy", "--column", "text"), "--column means nothing with --tasks"),
    "--column of text": (("--text", "python-docs", "--column", "text"), "python-docs has no columns: leave the column"),
    "--window": (("--tasks", "arc_easy", "--window", "64"), "--window means nothing with --tasks"),
    "long window": (("--text", "python-docs", "--window", "100000"), "longer than the model's context of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_cannot_work_are_said_first(case: str, routed: Path, run: Run) -> None:
    arguments, message = WRONG[case]
    code, _, err = run("eval", routed, *arguments)
    assert code == 2 and message in err and "Traceback" not in err


def test_brackets_in_names_are_shown(tiny_checkpoint: Build, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "[x] model"
    shutil.copytree(tiny_checkpoint(), folder)
    code, shown, err = run("eval", folder, "--text", "python-docs", "--window", "64", "--max-windows", "1")
    assert code == 0, err
    assert "[x]" in shown


def test_eval_takes_a_dense_model_and_budget_one_is_the_same(
    routed: Path, tmp_path: Path, run: Run, tiny_checkpoint: Build
) -> None:
    values = []
    for number, (model, budget) in enumerate(((tmp_path / "dense", None), (routed, "1.0"))):
        report = tmp_path / f"{number}.json"
        extra = () if budget is None else ("--budget", budget)
        args = ("--text", "python-docs", "--window", "64", "--max-windows", "2", "--json", report, *extra)
        assert run("eval", model, *args)[0] == 0
        values.append(json.loads(report.read_text()))
    assert values[0]["work"] is None and values[1]["work"]["saved_routable"] == 0.0
    assert values[0]["perplexity"] == pytest.approx(values[1]["perplexity"], rel=1e-4)


def test_generate_continues_the_prompt(routed: Path, run: Run) -> None:
    code, shown, err = run("generate", routed, "Hello", "--max-new-tokens", "5", "--budget", "0.5")
    assert code == 0, err
    assert shown.startswith("Hello")


@pytest.mark.requirement("R44")
def test_doctor_says_what_runs_here(run: Run, tmp_path: Path) -> None:
    code, shown, err = run("doctor", "--json", tmp_path / "doctor.json")
    assert code == 0, err
    for name in ("torch", "transformers", "masked", "grouped", "cpu"):
        assert name in shown
    assert isinstance(json.loads((tmp_path / "doctor.json").read_text()), dict)


def _empty(folder: Path) -> Path:
    (folder / "empty.txt").write_text("")
    return folder / "empty.txt"


def _binary(folder: Path) -> Path:
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 10)
    return folder / "binary.txt"


def _short(folder: Path) -> Path:
    (folder / "short.txt").write_text("too short")
    return folder / "short.txt"


def _write(folder: Path) -> Path:
    (folder / "there").mkdir()
    return folder / "there"


BAD = {
    "no such model": (lambda d, m: ("nowhere/at/all", "--out", d / "o"), "no model at nowhere/at/all"),
    "budget of zero": (lambda d, m: (m, "--out", d / "o", "--budget", "0"), r"budget must be in \(0, 1\]"),
    "budget above one": (lambda d, m: (m, "--out", d / "o", "--budget", "1.5"), r"budget must be in \(0, 1\]"),
    "ffn groups": (lambda d, m: (m, "--out", d / "o", "--ffn-group-size", "7"), "7 does not divide the model's 48"),
    "head groups": (lambda d, m: (m, "--out", d / "o", "--head-group-size", "3"), "3 does not divide the model's 4"),
    "text missing": (lambda d, m: (m, "--out", d / "o", "--text", d / "none.txt"), "no text at"),
    "text empty": (lambda d, m: (m, "--out", d / "o", "--text", _empty(d)), "is empty"),
    "text binary": (lambda d, m: (m, "--out", d / "o", "--text", _binary(d)), "binary|not text"),
    "text too short": (lambda d, m: (m, "--out", d / "o", "--text", _short(d)), "too short"),
    "no columns": (lambda d, m: (m, "--out", d / "o", "--column", "body"), "python-docs has no columns"),
    "few tokens": (lambda d, m: (m, "--out", d / "o", "--tokens", "10"), "less than one window"),
    "output exists": (lambda d, m: (m, "--out", _write(d)), "exists"),
    "dtype": (lambda d, m: (m, "--out", d / "o", "--dtype", "int4"), "--dtype must be one of"),
    "device": (lambda d, m: (m, "--out", d / "o", "--device", "tpu:3"), "no device 'tpu:3' here: this machine has cpu"),
    "threads": (lambda d, m: (m, "--out", d / "o", "--threads", "0"), "--threads must be at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(case: str, run: Run, tiny_checkpoint: Build, tmp_path: Path) -> None:
    arguments, message = BAD[case]
    args = arguments(tmp_path, tiny_checkpoint())
    small = [] if "--tokens" in args else ["--tokens", "2048"]
    code, _, err = run("prune", *args, *small, "--window", "128")
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and re.search(message, lines[0]), err
    assert "Traceback" not in err
    assert not (tmp_path / "o").exists() and not [p for p in tmp_path.iterdir() if ".tmp-" in p.name]


def test_nan_in_the_weights_is_named(run: Run, tiny_checkpoint: Build, tmp_path: Path) -> None:
    dense = tiny_checkpoint()
    tensors = load_file(dense / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    code, _, err = run("prune", dense, "--out", tmp_path / "o", *PRUNE)
    assert code == 2 and "model.layers.1.mlp.up_proj.weight" in err
    assert not (tmp_path / "o").exists()


def test_an_unknown_family_is_named(run: Run, tiny_checkpoint: Build, tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    from tiny import tiny_tokenizer

    config = BloomConfig(vocab_size=272, hidden_size=32, n_layer=1, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    tiny_tokenizer().save_pretrained(tmp_path / "bloom")
    code, _, err = run("prune", tmp_path / "bloom", "--out", tmp_path / "o", *PRUNE)
    assert code == 2 and "'bloom' is not supported" in err and "model.layers" in err


def test_a_budget_of_a_dense_model_is_refused(run: Run, tiny_checkpoint: Build) -> None:
    code, _, err = run("eval", tiny_checkpoint(), "--text", "python-docs", "--budget", "0.5", "--max-windows", "1")
    assert code == 2 and "is a dense model" in err


@pytest.mark.requirement("R9")
def test_a_bad_result_is_not_saved_without_force(
    run: Run, tiny_checkpoint: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widellm import pipeline

    monkeypatch.setattr(pipeline, "MISS_TOLERANCE", -1.0)  # any result misses
    code, _, err = run("prune", tiny_checkpoint(), "--out", tmp_path / "o", *PRUNE)
    assert code == 2 and "not saved" in err and "--force" in err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing_that_loads(kind: signal.Signals, tiny_checkpoint: Build, tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    command = [sys.executable, "-c", "from widellm.cli.main import main; main()", "prune", str(tiny_checkpoint())]
    # a text that takes minutes to sample: it is still at work when the signal comes
    command += ["--out", str(out), "--text", "self", "--tokens", "1000000", "--window", "128", "--ffn-group-size", "8"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ, text=True)
    assert process.stderr is not None
    time.sleep(8)
    process.send_signal(kind)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (2, 130), err
    assert "Traceback" not in err and "stopped" in err
    assert not out.exists() and not [p for p in tmp_path.iterdir() if ".tmp-" in p.name]


def test_help_lists_every_command_without_loading_torch() -> None:
    script = (
        "import sys; from widellm.cli import main\n"
        "try:\n    sys.argv = ['widellm', '--help']; main.main()\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("prune", "eval", "generate", "doctor", "demo"):
        assert command in done.stdout

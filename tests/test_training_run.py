"""Training runs from end to end on tiny models: what they save, resume, survive and refuse."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from routing_helpers import route
from tiny import tiny_model, tiny_tokenizer
from widellm.bench.speed import Speed
from widellm.errors import CheckpointError, ConfigError, TextError, WidellmError
from widellm.modeling.attach import set_budget, width_of
from widellm.modeling.checkpoint import load, save
from widellm.pipeline import record_results
from widellm.training import checkpoints
from widellm.training.data import cache_key, packed_dataset, stream_windows, streamed_dataset
from widellm.training.guards import Usage, first_not_finite, warnings_of
from widellm.training.recipes import Optimisation, recipe_of
from widellm.training.run import Interrupted, _long_windows, train
from widellm.training.settings import Settings, optimisation_rows, read_config, steps_of

for package in ("accelerate", "datasets", "peft"):
    pytest.importorskip(package, reason="the extra `train` is not installed")

from widellm.training.trainer import WidthTrainer  # noqa: E402

ROOT = Path(__file__).parents[1]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a routed model `in`, a dense one `dense` and a text; and the cache in it too."""
    monkeypatch.setenv("WIDELLM_CACHE", str(tmp_path / "cache"))
    model = tiny_model()
    route(model)
    save(model, tmp_path / "in", tiny_tokenizer())
    words = ["north", "south", "tree", "water", "stone", "light", "of", "the", "and", "a"]
    numbers = torch.randint(10, (9000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(words[i] for i in numbers))
    return tmp_path


def settings(place: Path, recipe: str = "default", **changes: Any) -> Settings:
    chosen = recipe_of(recipe)
    small = {"batch_tokens": 128}
    stages = {stage: dataclasses.replace(chosen.stage(stage), **small) for stage in ("routers", "recover")}
    chosen = chosen.replace(**{**stages, "lora_rank": 2, **changes.pop("recipe_changes", {})})
    fields: dict[str, Any] = {"stage": "recover", "tokens": 128 * 8, "window": 32, "held_out": 2, "evaluations": 2}
    return Settings(recipe=chosen, texts=(str(place / "text.txt"),), **{**fields, **changes})


def trained_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {**load_file(directory / "width.safetensors"), **load_file(directory / "model.safetensors")}


# ---- end to end ----


def test_recover_trains_saves_and_serves_every_budget(place: Path) -> None:
    result = train(str(place / "in"), place / "out", settings(place, tokens=128 * 24))
    assert result.steps == 24 and result.tokens == 24 * 128
    assert result.loss_before is not None and result.loss_after is not None
    assert result.loss_after < 0.9 * result.loss_before
    logged = [h for h in result.history if "density_ffn" in h]
    assert {"dead", "always_on", "entropy", "drift", "spent", "prediction", "grad_norm"} <= set(logged[0])
    model, tokenizer = load(place / "out", budget=0.6)
    width = width_of(model)
    record = width.config.provenance["training"][-1]
    assert record["stage"] == "recover" and record["recipe"]["name"] == "default" and record["tokens"] == result.tokens
    assert not any("lora" in n for n, _ in model.named_modules())
    ids = tokenizer("north south tree", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] == ids.input_ids.shape[1] + 4
    json.dumps(result.to_json())


@pytest.mark.requirement("R46")
def test_router_stage_leaves_the_backbone_bit_identical(place: Path) -> None:
    def digest(directory: Path) -> str:
        read = load_file(directory / "model.safetensors")
        return hashlib.sha256(b"".join(read[k].numpy().tobytes() for k in sorted(read))).hexdigest()

    train(str(place / "in"), place / "out", settings(place, stage="routers"))
    assert digest(place / "in") == digest(place / "out")
    before, after = (load_file(place / d / "width.safetensors") for d in ("in", "out"))
    assert not torch.equal(before["layers.0.ffn.router.down"], after["layers.0.ffn.router.down"])


@pytest.mark.requirement("R49")
@pytest.mark.parametrize("name", ["wide", "skipgpt", "layer-skip"])
def test_published_recipes_go_through_both_stages(place: Path, name: str) -> None:
    train(str(place / "in"), place / "one", settings(place, name, stage="routers"))
    result = train(str(place / "one"), place / "two", settings(place, name, stage="recover"))
    assert "distance" in next(h for h in result.history if "distance" in h)
    model, _ = load(place / "two", budget=0.7)
    width = width_of(model)
    assert width.config.router_input == "residual"
    with torch.no_grad():
        model(torch.arange(20)[None])
    if name != "wide":
        assert {s.groups for s in width.sublayers} == {1}


def test_static_width_is_the_same_kind_of_checkpoint(place: Path) -> None:
    result = train(str(place / "in"), place / "one", settings(place, "static-width", stage="routers"))
    assert result.steps == 0  # nothing to learn: only the choice
    train(str(place / "one"), place / "two", settings(place, "static-width"))
    model, _ = load(place / "two", budget=0.5)
    with torch.no_grad():
        model(torch.arange(20)[None])
    for sub in width_of(model).sublayers:
        assert bool((sub.keep == sub.keep[:1, :1]).all())


# ---- resume ----


def _killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = WidthTrainer.training_step

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            raise RuntimeError("killed")
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(WidthTrainer, "training_step", dying)


@pytest.mark.requirement("R49")
@pytest.mark.parametrize("streaming", [False, True])
def test_resume_after_a_kill_is_bit_equal(place: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    chosen = settings(place, save_every=3, streaming=streaming, recipe_changes={"lora_dropout": 0.1})
    train(str(place / "in"), place / "whole", chosen)
    with monkeypatch.context() as patch:
        _killed_at(5, patch)
        with pytest.raises(RuntimeError, match="killed"):
            train(str(place / "in"), place / "cut", chosen)
    assert not (place / "cut").exists()
    with pytest.raises(WidellmError, match="--resume"):
        train(str(place / "in"), place / "cut", chosen)
    result = train(str(place / "in"), place / "cut", chosen, resume=True)
    assert result.steps == 8
    whole, cut = trained_tensors(place / "whole"), trained_tensors(place / "cut")
    assert whole.keys() == cut.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, cut[name]), name


def test_a_damaged_checkpoint_is_found_and_the_one_before_it_used(place: Path, monkeypatch: Any) -> None:
    chosen = settings(place, save_every=2)
    train(str(place / "in"), place / "whole", chosen)
    with monkeypatch.context() as patch:
        _killed_at(5, patch)
        with pytest.raises(RuntimeError, match="killed"):
            train(str(place / "in"), place / "cut", chosen)
    newest, before = checkpoints.saved(place / "cut.run")[:2]
    with open(newest / "optimizer.pt", "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    assert checkpoints.to_resume(place / "cut.run")[0] == before
    result = train(str(place / "in"), place / "cut", chosen, resume=True)
    assert any("checkpoint-4 is damaged (optimizer.pt has changed)" in w for w in result.warnings)
    whole, cut = trained_tensors(place / "whole"), trained_tensors(place / "cut")
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())


def test_a_run_goes_on_only_as_it_began(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(place, save_every=2)
    with monkeypatch.context() as patch:
        _killed_at(5, patch)
        with pytest.raises(RuntimeError, match="killed"):
            train(str(place / "in"), place / "cut", chosen)
    for changes, message in (({"seed": 1}, "seed: 0 then, 1 now"), ({"micro_batch": 1}, "micro_batch: 2 then, 1 now")):
        with pytest.raises(CheckpointError, match=message):
            train(str(place / "in"), place / "cut", dataclasses.replace(chosen, **changes), resume=True)
    model = tiny_model(seed=3)
    route(model)
    save(model, place / "other", tiny_tokenizer())
    with pytest.raises(CheckpointError, match="another start"):
        train(str(place / "other"), place / "cut", chosen, resume=True)
    assert train(str(place / "in"), place / "cut", dataclasses.replace(chosen, budget=0.7), resume=True).steps == 8


def test_what_a_killed_run_left_unfinished_does_not_stand_in_the_way(place: Path) -> None:
    leftover = place / "out.run" / "checkpoint-1"
    leftover.mkdir(parents=True)
    (leftover / "optimizer.pt").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="run again without --resume"):
        train(str(place / "in"), place / "out", settings(place), resume=True)
    train(str(place / "in"), f"{place}/out/", settings(place, tokens=256))
    assert (place / "out").is_dir() and (leftover / "optimizer.pt").read_bytes() != b"half"


def test_a_budget_below_what_the_routers_can_spend_still_loads(place: Path) -> None:
    result = train(str(place / "in"), place / "out", settings(place, tokens=256, budget=0.01))
    assert any("the least that these routers can spend" in w for w in result.warnings)
    model, _ = load(place / "out")
    assert width_of(model).dial is not None and 0.01 < width_of(model).config.provenance["budget"] < 0.5


def test_every_kind_of_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.to_resume(tmp_path)
    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"12345")
        checkpoints.seal(folder)
    newest, old = checkpoints.saved(tmp_path)
    assert (newest.name, old.name) == ("checkpoint-10", "checkpoint-2")
    assert checkpoints.damage(newest) is None
    (newest / "model.safetensors").write_bytes(b"1234")
    assert checkpoints.damage(newest) == "model.safetensors has 4 bytes, expected 5"
    (newest / "model.safetensors").unlink()
    assert checkpoints.damage(newest) == "model.safetensors is missing"
    (newest / checkpoints.MANIFEST).write_text("{")
    assert checkpoints.damage(newest) == "manifest.json is not valid JSON"
    (newest / checkpoints.MANIFEST).unlink()
    assert checkpoints.newest_good(tmp_path) == (old, ["checkpoint-10 is damaged (it was not finished)"])


def test_ctrl_c_saves_and_says_how_to_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(place)
    train(str(place / "in"), place / "whole", chosen)
    whole_step = WidthTrainer.training_step
    with monkeypatch.context() as patch:

        def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 2 and self.micro == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return whole_step(self, *args, **kwargs)

        patch.setattr(WidthTrainer, "training_step", interrupted)
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(Interrupted, match="after step 3 of 8 .*--resume"):
            train(str(place / "in"), place / "cut", chosen)
        assert signal.getsignal(signal.SIGINT) is before
    train(str(place / "in"), place / "cut", chosen, resume=True)
    whole, cut = trained_tensors(place / "whole"), trained_tensors(place / "cut")
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())


def test_a_full_disk_leaves_the_last_good_checkpoint(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(place, save_every=2)
    real = torch.save

    def full(data: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if "checkpoint-4" in str(path):
            with open(path, "wb") as file:
                file.write(b"half")
            raise OSError(28, "No space left on device")
        real(data, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(WidellmError, match="step 4 could not be written .*checkpoint-2 with --resume"):
            train(str(place / "in"), place / "out", chosen)
    assert not (place / "out").exists()
    assert train(str(place / "in"), place / "out", chosen, resume=True).steps == 8


# ---- guards ----


def test_a_loss_that_is_not_finite_stops_with_step_and_layer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = WidthTrainer.training_step

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 3:
            with torch.no_grad():
                self.objective.width.layout.layers[1].down_proj.weight[0, 0] = float("nan")
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(WidthTrainer, "training_step", broken)
    with pytest.raises(WidellmError, match="loss is nan at step 4, first in layer 1's ffn.*checkpoint-2"):
        train(str(place / "in"), place / "out", settings(place, save_every=2))


def test_gradients_that_are_not_finite_stop_with_the_parameter(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    whole = Trainer.training_step

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = whole(self, *args, **kwargs)
        self.objective.width.router(self.objective.width.sublayers[1]).up.grad[0, 0] = float("inf")
        return loss

    monkeypatch.setattr(Trainer, "training_step", broken)
    with pytest.raises(
        WidellmError, match=r"gradients are not finite at step 1, first in .*layers\.0\.mlp\.router\.up"
    ):
        train(str(place / "in"), place / "out", settings(place))


def test_first_not_finite_names_a_router() -> None:
    model = tiny_model()
    width = route(model)
    with torch.no_grad():
        width.router(width.sublayers[2]).bias[0] = float("nan")
    assert first_not_finite(model, width, torch.arange(5)[None]) == "the router of layer 1's attention"


@pytest.mark.requirement("R47")
def test_usage_counts_dead_and_always_on_groups() -> None:
    model = tiny_model()
    width = route(model)
    usage = Usage(width)
    decisions = [torch.zeros(1, 10, sub.groups, dtype=torch.bool) for sub in width.sublayers]
    for keep in decisions:
        keep[..., 0] = True
    decisions[0][:, :5, 1] = True
    usage.add(decisions, 0.9)
    figures = usage.take()
    assert figures["always_on"] == pytest.approx(4 / 20) and figures["dead"] == pytest.approx(15 / 20)
    assert figures["density_attention"] == pytest.approx((1 + 0.5 + 1) / 8)
    assert figures["entropy"] == pytest.approx(1 / 20, abs=1e-6)
    assert figures["density/layer_0_attention"] == pytest.approx(1.5 / 4)
    assert figures["dead/layer_0_attention"] == pytest.approx(2 / 4)
    assert figures["entropy/layer_0_attention"] == pytest.approx(1 / 4, abs=1e-6)
    assert figures["density/layer_1_ffn"] == pytest.approx(1 / 6) and figures["entropy/layer_1_ffn"] < 1e-6
    assert usage.take() == {}
    found = warnings_of(figures)
    assert len(found) == 2 and "no token" in found[0] and "less than asked" in found[1]


def test_the_best_checkpoint_is_kept(place: Path) -> None:
    """At an absurd learning rate the model gets worse: what is saved is the best that was seen on held-out text."""
    worse = {"recover": Optimisation(router_lr=5.0, lora_lr=0.0, warmup=0.9, batch_tokens=128)}
    result = train(str(place / "in"), place / "out", settings(place, evaluations=8, recipe_changes=worse))
    losses = [h["eval_loss"] for h in result.history if "eval_loss" in h]
    assert losses[-1] > min(losses[1:]) and result.loss_after == min(losses[1:])
    # what there was before training is never saved, so it is not the best either
    assert (result.loss_after > losses[0]) == any("worse" in w for w in result.warnings)
    best = losses[1:].index(min(losses[1:])) + 1
    read = load_file(place / "out.run" / f"checkpoint-{best}" / "model.safetensors")
    saved = load_file(place / "out" / "width.safetensors")
    torch.testing.assert_close(saved["layers.0.ffn.router.up"], read["model.layers.0.mlp.router.up"])


# ---- data ----


def test_windows_are_made_once_for_equal_text_and_settings(place: Path) -> None:
    tokenizer, text = tiny_tokenizer(), str(place / "text.txt")
    first = packed_dataset(tokenizer, [text], 640, 32)
    assert len(first) == 20 and len(first[0]["input_ids"]) == 32
    key = cache_key(tokenizer, [text], 640, 32, "text", 0)
    assert (place / "cache" / "windows" / key).is_dir()
    assert key != cache_key(tokenizer, [text], 640, 16, "text", 0)
    (place / "same.jsonl").write_text((place / "text.txt").read_text())  # another reader, other text
    assert key != cache_key(tokenizer, [str(place / "same.jsonl")], 640, 32, "text", 0)
    (place / "text.txt").write_text((place / "text.txt").read_text() + "more")
    assert key != cache_key(tokenizer, [text], 640, 32, "text", 0)
    with pytest.raises(TextError, match="too short"):
        packed_dataset(tokenizer, [text], 10**6, 32)


def test_streamed_windows_are_the_packed_ones(place: Path) -> None:
    tokenizer, text = tiny_tokenizer(), str(place / "text.txt")
    packed = packed_dataset(tokenizer, [text], 640, 32)
    streamed = list(stream_windows(tokenizer, [text], 32, "text", 0))[:20]
    assert [r["input_ids"] for r in streamed] == packed["input_ids"][:]
    lazily = streamed_dataset(tokenizer, [text], 32)
    assert next(iter(lazily.skip(3)))["input_ids"] == packed[3]["input_ids"]
    with pytest.raises(TextError, match="are needed: give more text"):
        list(stream_windows(tokenizer, [text], 32, "text", 0, wanted=10**4))


def test_a_stream_that_is_too_short_is_not_read_twice(place: Path) -> None:
    (place / "text.txt").write_text("north south tree " * 300)
    with pytest.raises(TextError, match="are needed: give more text"):
        train(str(place / "in"), place / "out", settings(place, streaming=True, tokens=128 * 60, evaluations=1))
    assert not (place / "out").exists()


def test_two_runs_may_pack_the_same_text_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from widellm.training import data

    tokenizer, text = tiny_tokenizer(), str(place / "text.txt")
    whole = data.token_windows

    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        monkeypatch.setattr(data, "token_windows", whole)
        packed_dataset(tokenizer, [text], 640, 32)  # the other one is done first
        return whole(*args, **kwargs)

    monkeypatch.setattr(data, "token_windows", slow)
    assert len(packed_dataset(tokenizer, [text], 640, 32)) == 20


def test_the_dial_is_measured_on_long_windows() -> None:
    sample = torch.arange(64 * 40).view(64, 40)
    joined = _long_windows(sample, 4096)
    assert joined.shape == (2, 1000) and torch.equal(joined.flatten(), torch.arange(2000))
    assert _long_windows(sample, 100).shape == (32, 80)
    assert _long_windows(sample[:30], 4096) is not None and _long_windows(sample[:30], 4096).shape == (30, 40)
    assert _long_windows(torch.zeros(4, 2048, dtype=torch.long), 4096).shape == (4, 2048)


def test_several_texts_are_taken_in_turn(place: Path) -> None:
    for name in ("a", "b"):
        rows = "".join(json.dumps({"text": f"{name}{i}" * 8}) + "\n" for i in range(8))
        (place / f"{name}.jsonl").write_text(rows)
    tokenizer = tiny_tokenizer()
    windows = packed_dataset(tokenizer, [str(place / "a.jsonl"), str(place / "b.jsonl")], 64, 32)
    text = tokenizer.decode([i for w in windows["input_ids"][:] for i in w])
    assert "a" in text[:18] and "b" in text[18:36]


# ---- settings ----


@pytest.mark.requirement("R42")
def test_routers_of_a_1b_model_train_in_little_more_than_its_weights() -> None:
    """What the memory table rests on, by its own script, with one layer: no second copy of the weights, no [T, V]."""
    code = "import json, training; print(json.dumps(training.memory(1, 256)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "benchmarks")
    assert done.returncode == 0, done.stderr
    with_checkpoints, without = json.loads(done.stdout.splitlines()[-1])
    assert 0.6 < with_checkpoints["weights"] < 0.7
    # three chunks of 128 rows of logits in float32 are 0.2 GB
    assert without["after"] - with_checkpoints["before"] < 0.35


def test_settings_are_checked(place: Path) -> None:
    with pytest.raises(ConfigError, match="--tokens 10"):
        settings(place, tokens=10)
    with pytest.raises(ConfigError, match="micro_batch"):
        settings(place, micro_batch=0)
    chosen = settings(place, tokens=1000, micro_batch=3)
    assert optimisation_rows(chosen, 1) == 3 and steps_of(chosen, 1) == 10
    assert optimisation_rows(chosen, 2) == 6
    with pytest.raises(WidellmError, match="exists"):
        train(str(place / "in"), place / "in", settings(place))


def test_both_stages_from_one_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    content = {
        "recipe": {"budgets": [0.5, 0.6]},
        "routers": {"router_lr": 0.5},
        "recover": {"lora_lr": 0.25},
        "trainer": {"report_to": "tensorboard"},
    }
    path.write_text(json.dumps(content))
    recipe, trainer = read_config("default", path)
    assert recipe.budgets == (0.5, 0.6) and recipe.routers.router_lr == 0.5 and recipe.recover.lora_lr == 0.25
    assert trainer == {"report_to": "tensorboard"}
    for bad, message in (
        ("[]", "object"),
        ('{"x": {}}', "object"),
        ('{"recover": {"lr": 1}}', "lora_lr"),
        ("{", "JSON"),
    ):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=message):
            read_config("default", path)


def test_the_command(place: Path) -> None:
    from typer.testing import CliRunner

    from widellm.cli.main import app

    config = place / "c.json"
    config.write_text(json.dumps({"recipe": {"lora_rank": 2}, "recover": {"batch_tokens": 128}}))
    arguments = ["train", str(place / "in"), "--out", str(place / "out"), "--text", str(place / "text.txt")]
    arguments += [
        "--stage",
        "recover",
        "--tokens",
        "512",
        "--window",
        "32",
        "--config",
        str(config),
        "--json",
        str(place / "r.json"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "loss on held-out text, best" in result.output
    assert json.loads((place / "r.json").read_text())["steps"] == 4


def test_compare_writes_table_and_figure_and_goes_on(place: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    from widellm.evaluation.compare import Plan, run

    config = place / "c.json"
    config.write_text(json.dumps({"recipe": {"lora_rank": 2}}))
    (place / "eval.txt").write_text("stone and water " * 300)
    plan = Plan(
        ("default", "wide"),
        (str(place / "text.txt"),),
        str(place / "eval.txt"),
        tokens=512,
        window=32,
        batch_tokens=128,
        seeds=2,
        budgets=(0.7, 0.6),
        max_windows=2,
        config=config,
    )
    model, _ = load(place / "in")
    set_budget(model, 1.0)
    model.config.max_position_embeddings = 1024
    save(model, place / "long", tiny_tokenizer())
    table = run(str(place / "long"), place / "cmp", plan)
    lines = table.splitlines()
    assert lines[2].startswith("| start | 1 |") and lines[3].startswith("| default | 2 |") and "±" in lines[4]
    rows = json.loads((place / "cmp" / "results.json").read_text())["rows"]
    assert len(rows) == 5 * 3 and {r["seed"] for r in rows} == {0, 1}
    assert (place / "cmp" / "results.png").stat().st_size > 5000
    assert run(str(place / "long"), place / "cmp", plan) == table  # nothing is run again

    def timer(model: Any, prompt: torch.Tensor, budgets: Sequence[float]) -> list[Speed]:
        return [Speed(b, 100.0 / b, 1.0, 10.0 / b, 1.0) for b in budgets]

    for other in ({"tokens": 1024}, {"budgets": (0.7,)}):
        with pytest.raises(ConfigError, match=f"was made with {next(iter(other))}"):
            run(str(place / "long"), place / "cmp", dataclasses.replace(plan, **other))
    run(str(place / "long"), place / "cmp", plan, timer=timer)  # speeds are added to what is there
    timed = json.loads((place / "cmp" / "results.json").read_text())["rows"]
    assert [
        {**r, "prefill_tokens_per_s": 100 / r["budget"], "decode_tokens_per_s": 10 / r["budget"]} for r in rows
    ] == timed


# ---- several processes ----

_SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_training_run import settings
from widellm.training.run import train
place, out, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "resume"
micro, fsdp = int(sys.argv[4]), json.loads(sys.argv[5])
chosen = settings(place, save_every=3, micro_batch=micro, recipe_changes={{"noise": 0.0}}, trainer=fsdp)
if sys.argv[3] == "kill":
    from widellm.training.trainer import WidthTrainer
    whole = WidthTrainer.training_step
    def dying(self, *a, **k):
        if self.state.global_step == 5:
            sys.exit(7)
        return whole(self, *a, **k)
    WidthTrainer.training_step = dying
result = train(str(place / "in"), place / out, chosen, resume=resume)
import os
if os.environ.get("RANK", "0") == "0":
    (place / (out + ".json")).write_text(json.dumps(result.to_json()))
"""


@pytest.mark.slow
@pytest.mark.requirement("R40")
def test_two_processes_with_fsdp_learn_like_one_and_resume(place: Path) -> None:
    script = place / "run.py"
    script.write_text(_SCRIPT.format(tests=str(Path(__file__).parent)))
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2}, "ddp_backend": "gloo"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}

    def run(processes: int, out: str, mode: str, check: bool = True) -> None:
        options = json.dumps(fsdp if processes > 1 else {})
        launch = [sys.executable]
        if processes > 1:
            launch += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_addr", "127.0.0.1"]
            launch += ["--master_port", "29517"]
        command = [*launch, str(script), str(place), out, mode, str(4 // processes), options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert (done.returncode == 0) == check, done.stderr[-3000:]

    def losses(out: str) -> list[float]:
        return [h["loss"] for h in json.loads((place / f"{out}.json").read_text())["history"] if "loss" in h]

    run(1, "one", "whole")
    run(2, "two", "whole")
    assert losses("two") == pytest.approx(losses("one"), rel=2e-3)
    run(2, "cut", "kill", check=False)
    run(2, "cut", "resume")
    assert losses("cut") == pytest.approx(losses("two"), rel=1e-5)
    two, cut = trained_tensors(place / "two"), trained_tensors(place / "cut")
    for name, tensor in two.items():
        torch.testing.assert_close(tensor, cut[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"recipe": {"start": "foo"}}, "start is one of calibrated, random, static"),
        ({"recipe": {"budgets": "x"}}, "budgets is two numbers"),
        ({"recipe": {"budgets": [0.5, 2.0]}}, "budget must be in"),
        ({"trainer": {"nope": 1}}, "nope"),
        ({"trainer": {"learning_rate": 1e-4}}, "trainer's learning_rate follows from the recipe"),
        ({"trainer": {"num_train_epochs": 2}}, "trainer's num_train_epochs follows"),
        ({"recipe": {"recover": {"lora_lr": 0.1}}}, "recover stands beside recipe"),
        ({"recover": {"lora_lr": "1e-3"}}, "lora_lr must be a number of at least 0, got '1e-3'"),
        ({"recover": {"batch_tokens": 0.5}}, "batch_tokens must be a whole number"),
        ({"recipe": {"budgets": ["0.4", 0.9]}}, "budgets is two numbers above 0"),
        ({"recipe": {"up_lr_factor": 0}}, "up_lr_factor must be a number"),
        ({"recipe": {"label_share": 2}}, "label_share must be a number from 0 to 1"),
        ({"recipe": {"target": [0.5, 1.5]}}, "target is a share"),
    ],
)
def test_a_config_that_means_nothing_is_one_line(place: Path, file: dict[str, Any], message: str) -> None:
    path = place / "config.json"
    path.write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=message):
        recipe, trainer = read_config("default", path)
        train(str(place / "in"), place / "out", dataclasses.replace(settings(place), recipe=recipe, trainer=trainer))
    assert not (place / "out").exists()


def test_a_comparison_checks_all_it_was_told_before_it_trains() -> None:
    from widellm.evaluation.compare import Plan

    with pytest.raises(ConfigError, match="there is no recipe 'nope'"):
        Plan(("default", "nope"), ("text",), "text")


def test_a_dense_start_remembers_its_base_and_training_forgets_old_results(place: Path) -> None:
    tiny_model().save_pretrained(place / "dense")
    tiny_tokenizer().save_pretrained(place / "dense")
    run = settings(place, "layer-skip", stage="routers", tokens=256)
    train(str(place / "dense"), place / "out", run)
    model, tokenizer = load(place / "out")
    assert width_of(model).config.base["name"] == str(place / "dense")
    save(model, place / "adapter", tokenizer, form="adapter")  # its weights are the base's own
    row = {"budget": 0.5, "saved_routable": 0.5, "saved_all_layers": 0.4, "perplexity": 2.0, "dense_perplexity": 1.0}
    record_results(model, [{**row, "text": "some", "windows": 1, "window": 32}])
    save(model, place / "measured", tokenizer)
    train(str(place / "measured"), place / "again", settings(place, "layer-skip", tokens=256))
    provenance = width_of(load(place / "again")[0]).config.provenance
    assert "results" not in provenance and len(provenance["training"]) == 2

"""Training from end to end: a directory in, a better directory out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.calibrate.calibration import DIAL_PROBE_TOKENS, DIAL_TOKENS, peak_memory_gb
from widellm.calibrate.dial import measure_dial
from widellm.errors import ConfigError, WidellmError
from widellm.files import check_new_directory
from widellm.modeling.attach import Width, is_attached, set_budget, set_dial, width_of
from widellm.modeling.checkpoint import WEIGHTS_FILE, is_routed_directory, load_any, read_width, save
from widellm.optional import require
from widellm.progress import Progress, no_progress
from widellm.provenance import versions
from widellm.sources.models import local_directory
from widellm.sources.texts import check_window, context_of, window_record, windows_digest
from widellm.training import checkpoints
from widellm.training.data import as_windows, collate, packed_dataset, streamed_dataset
from widellm.training.lora import add_lora, merge_lora
from widellm.training.objective import Objective, start_prices
from widellm.training.settings import Settings, arguments_of, optimisation_rows, steps_of
from widellm.training.start import prepare

DIAL_WINDOW = 1024
"""Tokens of a window on which the dial is measured."""


@dataclass(frozen=True)
class TrainResult:
    """What a training run did."""

    recipe: str
    stage: str
    tokens: int
    steps: int
    seconds: float
    """Of the training loop alone, evaluations included."""
    tokens_per_s: float
    peak_memory_gb: float
    loss_before: float | None
    loss_after: float | None
    """On the held-out windows, without noise, mean over the recipe's budgets; None where nothing was trained."""
    history: tuple[dict[str, float], ...]
    warnings: tuple[str, ...]
    saved_to: str

    def to_json(self) -> dict[str, Any]:
        """The stable keys that docs/json.md lists."""
        return {**dataclasses.asdict(self), "versions": versions()}


class Interrupted(WidellmError):
    """A signal ended the run after a step; everything is saved and the message says how to go on."""


def train(
    directory: str,
    out: str | Path,
    settings: Settings,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> TrainResult:
    """Train `directory` (routed, or dense for a recipe with a random start) under a recipe, and save it to `out`.

    Checkpoints of the run are kept in `OUT.run`; with `resume`, the newest undamaged one is gone on from, bit for bit
    where the machine computes deterministically. Raises WidellmError for anything a user can mend; `out` is written
    whole or not at all.
    """
    require("accelerate", "train", "training")
    from transformers import PrinterCallback

    from widellm.training.trainer import WidthTrainer, stop_politely

    out = Path(out)
    check_new_directory(out, overwrite=overwrite)
    run = Path(f"{out}.run")
    recipe, optimisation = settings.recipe, settings.recipe.stage(settings.stage)
    warnings: list[str] = []
    checkpoint = None
    if resume:
        checkpoint, warnings = checkpoints.to_resume(run)
    elif checkpoints.newest_good(run)[0] is not None:
        raise WidellmError(f"{run} holds checkpoints of another run: pass --resume to go on with it, or remove it")

    arguments = arguments_of(settings, run)
    progress("loading", 0, 1)
    model, tokenizer = _read(directory)
    progress("loading", 1, 1)
    steps = steps_of(settings, arguments.world_size)
    with arguments.main_process_first(desc="packing text"):
        held_out, dataset, sample = _data(tokenizer, settings, arguments.world_size)
    check_window(model, settings.window)
    if arguments.process_index == 0:
        checkpoints.begin(run, describe(directory, settings, held_out), resume)
    width = _build(model, settings, sample)
    trained = [p for p in model.parameters() if p.requires_grad]
    start = time.perf_counter()
    history: list[dict[str, float]] = []
    before = after = None
    done = 0
    if trained:
        prices = start_prices(model, held_out) if recipe.budgets is not None else None
        objective = Objective(model, recipe, prices, settings.seed)
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        # FSDP shards by the class of a decoder layer, and ours have classes of their own
        model._no_split_modules = [type(width.layout.layers[0].layer).__name__]
        trainer = WidthTrainer(
            objective,
            optimisation,
            args=arguments,
            train_dataset=dataset,
            eval_dataset=held_out_dataset(held_out),
            data_collator=collate,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_reporter(progress, steps))
        with stop_politely(trainer) as signals:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        done = trainer.state.global_step
        if signals.asked and done < steps:
            raise Interrupted(f"stopped after step {done} of {steps} and saved in {run}: go on with --resume")
        history, warnings = list(trainer.state.log_history), [*warnings, *trainer.found]
        before, after = next(h["eval_loss"] for h in history if "eval_loss" in h), trainer.state.best_metric
        if after is not None and after > before:
            warnings.append(f"training made the loss on held-out text worse: {before:.3f} before, at best {after:.3f}")
        objective.remove()
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            model = _gathered(trainer, directory, settings, sample)
        model = plain(model)
    seconds = time.perf_counter() - start
    tokens = done * optimisation_rows(settings, arguments.world_size) * settings.window
    result = TrainResult(
        recipe.name, settings.stage, tokens, done, seconds, tokens / seconds, peak_memory_gb(), before, after,
        tuple(history), tuple(warnings), str(out),
    )  # fmt: skip
    if arguments.process_index == 0:
        result = _finish(model, sample, settings, result, progress)
        save(model, out, tokenizer, overwrite=overwrite)
    return result


def describe(directory: str, settings: Settings, held_out: Tensor) -> dict[str, Any]:
    """What a run must share with the checkpoints it goes on from: start, text and settings, as JSON."""
    chosen = dataclasses.asdict(settings)
    for name in ("budget", "texts", "activation_checkpointing"):  # text counts by its tokens
        del chosen[name]
    start, folder = directory, local_directory(directory)
    if is_routed_directory(folder):
        read = read_width(folder)
        start = read.config.digest() + hashlib.sha256((read.folder / WEIGHTS_FILE).read_bytes()).hexdigest()[:16]
    found: dict[str, Any] = json.loads(json.dumps({"start": start, "text": windows_digest(held_out), **chosen}))
    return found


def _read(directory: str) -> tuple[Any, Any]:
    model, tokenizer = load_any(directory, budget=1.0)
    if not is_attached(model):
        model.name_or_path = directory
    return model, tokenizer


def _build(model: Any, settings: Settings, sample: Tensor) -> Width:
    """Routers, adapters, and what of them learns, in place."""
    from widellm.training.trainer import choose_trained

    recipe, optimisation = settings.recipe, settings.recipe.stage(settings.stage)
    width = prepare(model, recipe, settings.stage, sample, settings.seed)
    if width.dense_attention != "sdpa":
        raise ConfigError(f"training needs sdpa attention, this model has {width.dense_attention}: load it with sdpa")
    if optimisation.lora_lr > 0:
        add_lora(model, recipe.lora_rank, recipe.lora_alpha, recipe.lora_dropout, settings.seed)
    choose_trained(model, optimisation)
    return width


def _data(tokenizer: Any, settings: Settings, processes: int) -> tuple[Tensor, Any, Tensor]:
    """(held-out windows, data set to train on, a sample of it that statistics and the dial are measured on)."""
    rows = steps_of(settings, processes) * optimisation_rows(settings, processes)
    sample = min(rows, max(2, DIAL_TOKENS // settings.window))
    packed = settings.held_out + (sample if settings.streaming else rows)
    dataset = packed_dataset(
        tokenizer, settings.texts, packed * settings.window, settings.window, settings.column, settings.seed
    )
    held_out = as_windows(dataset, 0, settings.held_out)
    shown = as_windows(dataset, settings.held_out, sample)
    if settings.streaming:
        wanted = settings.held_out + rows
        stream = streamed_dataset(tokenizer, settings.texts, settings.window, settings.column, settings.seed, wanted)
        return held_out, stream.skip(settings.held_out), shown
    return held_out, dataset.select(range(settings.held_out, settings.held_out + rows)), shown


def held_out_dataset(windows: Tensor) -> Any:
    """Windows int64 [n, T] as a `datasets.Dataset`."""
    datasets = require("datasets", "train", "training data")
    return datasets.Dataset.from_dict({"input_ids": windows.tolist()})


def plain(model: Any) -> Any:
    """Undo what training alone needed, in place; returns the model."""
    vars(model).pop("_no_split_modules", None)
    # the name it has in newer transformers, else the old one
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()
    return model


def checkpoint_activations(model: Any) -> None:
    """Keep only each layer's input for the backward, and run the layer again there (non-reentrant)."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:  # transformers before it had that name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _gathered(trainer: Any, directory: str, settings: Settings, sample: Tensor) -> Any:
    """A whole model on every process, with what the shards have learned."""
    learned = {}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            value = parameter.detach()
            learned[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
    model, _ = _read(directory)
    _build(model, settings, sample)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(learned[name])
    return model


def _finish(model: Any, sample: Tensor, settings: Settings, result: TrainResult, progress: Progress) -> TrainResult:
    """Fold the adapters in, measure the dial anew, and write down what happened, in place; more warnings, if any."""
    model.eval()
    merge_lora(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    shown = _long_windows(sample, context_of(model) or DIAL_WINDOW)
    probes = shown[: max(2, DIAL_PROBE_TOKENS // shown.shape[1])]
    width = width_of(model)
    width.dial = None
    dial = measure_dial(model, shown, probes, lambda d, t: progress("dial", d, t))
    set_dial(model, dial)
    set_budget(model, 1.0)
    budget = settings.budget
    if budget < float(dial.budgets[0]):
        budget = float(dial.budgets[0])
        note = f"saved for budget {budget:.3f}, not {settings.budget}: it is the least that these routers can spend"
        result = dataclasses.replace(result, warnings=(*result.warnings, note))
    record = {
        "recipe": dataclasses.asdict(settings.recipe),
        "stage": settings.stage,
        "tokens": result.tokens,
        "text": window_record(sample, ", ".join(settings.texts), settings.seed),
        "seed": settings.seed,
        "versions": versions(),
    }
    # what was measured before is not true of these weights
    before = {name: value for name, value in width.config.provenance.items() if name != "results"}
    trained = [*before.get("training", []), record]
    width.config = width.config.replace(provenance={**before, "budget": budget, "training": trained})
    return result


def _long_windows(sample: Tensor, context: int) -> Tensor:
    """Consecutive windows int64 [n, T] joined to DIAL_WINDOW tokens, where there are enough of them.

    Trained on short windows, a model is used on long ones; and the first tokens of a window, which are harder to do
    without, would count too much.
    """
    length = min(DIAL_WINDOW, context) // sample.shape[1] * sample.shape[1]
    rows = sample.numel() // length if length > sample.shape[1] else 0
    return sample.flatten()[: rows * length].view(rows, length) if rows >= 2 else sample


def _reporter(progress: Progress, steps: int) -> Any:
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        """Tells `progress` about every step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress("training", state.global_step, steps)

    return Reporter()

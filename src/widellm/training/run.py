"""Training from end to end: a directory in, a better directory out."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.calibrate.calibration import DIAL_PROBE_TOKENS, DIAL_TOKENS, peak_memory_gb
from widellm.calibrate.dial import measure_dial
from widellm.config import check_budget
from widellm.errors import ConfigError, WidellmError
from widellm.files import check_new_directory, one_line
from widellm.modeling.attach import Width, set_budget, set_dial, width_of
from widellm.modeling.checkpoint import is_routed_directory, load, save
from widellm.optional import require
from widellm.progress import Progress, no_progress
from widellm.provenance import versions
from widellm.sources.models import load_dense
from widellm.sources.texts import window_record
from widellm.training import checkpoints
from widellm.training.data import as_windows, collate, packed_dataset, streamed_dataset
from widellm.training.lora import add_lora, merge_lora
from widellm.training.objective import Objective, start_prices
from widellm.training.recipes import Optimisation, Recipe, recipe_of
from widellm.training.start import prepare

DIAL_WINDOW = 1024
"""Tokens of a window on which the dial is measured."""


@dataclass(frozen=True)
class Settings:
    """What a user may choose about a training run."""

    recipe: Recipe = field(default_factory=lambda: recipe_of("default"))
    stage: str = "routers"
    tokens: int = 100_000
    """Training tokens; each is seen once unless the text is shorter (then it is an error)."""
    texts: tuple[str, ...] = ("python-docs",)
    """Sources as of `sources.texts.read_texts`, taken in turn, document by document."""
    column: str = "text"
    window: int = 512
    """Tokens in a training sequence."""
    micro_batch: int = 2
    """Sequences in one forward."""
    held_out: int = 8
    """Windows of the same text that are never trained on: they choose the best checkpoint."""
    evaluations: int = 4
    """How often they are looked at."""
    seed: int = 0
    budget: float = 0.5
    """What the saved model is set to."""
    streaming: bool = False
    """Read the text as it is needed instead of packing it first."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward and run the layer again."""
    save_every: int | None = None
    """Optimiser steps between checkpoints; default: at each evaluation."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Any further fields of transformers' TrainingArguments: fsdp, deepspeed, bf16, report_to, ..."""

    def __post_init__(self) -> None:
        check_budget(self.budget)
        self.recipe.stage(self.stage)
        for name in ("window", "micro_batch", "held_out", "evaluations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tokens < self.window:
            raise ConfigError(f"--tokens {self.tokens} is less than one window of {self.window}: ask for more")


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
    saved_to: str | None

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

    check_new_directory(out, overwrite=overwrite)
    run = Path(f"{out}.run")
    recipe, optimisation = settings.recipe, settings.recipe.stage(settings.stage)
    warnings: list[str] = []
    checkpoint = None
    if resume:
        checkpoint, warnings = checkpoints.to_resume(run)
    elif checkpoints.saved(run):
        raise WidellmError(f"{run} holds checkpoints of another run: pass --resume to go on with it, or remove it")

    arguments = _arguments(settings, run)
    progress("loading", 0, 1)
    model, tokenizer = _read(directory)
    progress("loading", 1, 1)
    steps = steps_of(settings, arguments.world_size)
    with arguments.main_process_first(desc="packing text"):
        held_out, dataset, sample = _data(tokenizer, settings, arguments.world_size)
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
        losses = [h["eval_loss"] for h in history if "eval_loss" in h]
        before, after = (losses[0], min(losses)) if losses else (None, None)
        objective.remove()
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            model, width = _gathered(trainer, directory, settings, sample)
        model = plain(model)
    seconds = time.perf_counter() - start
    tokens = done * optimisation_rows(settings, arguments.world_size) * settings.window
    result = TrainResult(
        recipe.name, settings.stage, tokens, done, seconds, tokens / seconds, peak_memory_gb(), before, after,
        tuple(history), tuple(warnings), str(out),
    )  # fmt: skip
    if arguments.process_index == 0:
        _finish(model, width, sample, settings, result, progress)
        save(model, out, tokenizer, overwrite=overwrite)
    return result


def read_config(recipe: str, path: str | Path | None) -> tuple[Recipe, dict[str, Any]]:
    """(a named recipe with a JSON file's changes, the file's fields for TrainingArguments).

    The file holds an object of "recipe" (fields of Recipe), "routers" and "recover" (fields of Optimisation) and
    "trainer". Raises ConfigError for anything else in it.
    """
    chosen = recipe_of(recipe)
    if path is None:
        return chosen, {}
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({one_line(error, 100)})") from None
    known = {"recipe", "routers", "recover", "trainer"}
    if not isinstance(read, dict) or set(read) - known or not all(isinstance(v, dict) for v in read.values()):
        raise ConfigError(f"{path} must hold an object of objects named {', '.join(sorted(known))}")
    changes = {k: tuple(v) if isinstance(v, list) else v for k, v in read.get("recipe", {}).items()}
    for stage in ("routers", "recover"):
        fields = {f.name for f in dataclasses.fields(Optimisation)}
        odd = sorted(set(read.get(stage, {})) - fields)
        if odd:
            raise ConfigError(f"{path}: a stage has no {odd[0]!r}; it has {', '.join(sorted(fields))}")
        changes[stage] = dataclasses.replace(chosen.stage(stage), **read.get(stage, {}))
    return chosen.replace(**changes), read.get("trainer", {})


def optimisation_rows(settings: Settings, processes: int) -> int:
    """Sequences in an optimiser step, over all processes."""
    at_once = settings.micro_batch * processes
    wanted = settings.recipe.stage(settings.stage).batch_tokens / settings.window
    return max(1, round(wanted / at_once)) * at_once


def steps_of(settings: Settings, processes: int) -> int:
    """Optimiser steps in a run."""
    return max(1, settings.tokens // (optimisation_rows(settings, processes) * settings.window))


def _arguments(settings: Settings, run: Path) -> Any:
    """transformers' TrainingArguments for a run; a user's own fields win."""
    from transformers import TrainingArguments

    optimisation = settings.recipe.stage(settings.stage)
    processes = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
    steps = steps_of(settings, processes)
    between = max(1, math.ceil(steps / settings.evaluations))
    fields: dict[str, Any] = {
        "output_dir": str(run),
        "max_steps": steps,
        "per_device_train_batch_size": settings.micro_batch,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": optimisation_rows(settings, processes) // (settings.micro_batch * processes),
        "learning_rate": max(optimisation.router_lr, optimisation.lora_lr),
        "lr_scheduler_type": "cosine",
        "warmup_steps": math.ceil(optimisation.warmup * steps),
        "weight_decay": optimisation.weight_decay,
        "max_grad_norm": optimisation.clip,
        "logging_steps": max(1, steps // 40),
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps",
        "eval_steps": between,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": settings.save_every or between,
        "save_total_limit": 3,
        "load_best_model_at_end": settings.save_every is None,
        "metric_for_best_model": "loss",
        "prediction_loss_only": True,
        "remove_unused_columns": False,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "seed": settings.seed,
        "use_cpu": not torch.cuda.is_available(),
    }
    try:
        return TrainingArguments(**{**fields, **settings.trainer})
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"these trainer settings do not do ({one_line(error, 160)}): mend --config") from error


def _read(directory: str) -> tuple[Any, Any]:
    if is_routed_directory(directory):
        return load(directory, budget=1.0)
    dense = load_dense(directory)
    dense.model.name_or_path = dense.source
    return dense.model, dense.tokenizer


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
        stream = streamed_dataset(tokenizer, settings.texts, settings.window, settings.column, settings.seed)
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


def _gathered(trainer: Any, directory: str, settings: Settings, sample: Tensor) -> tuple[Any, Width]:
    """A whole model on every process, with what the shards have learned."""
    learned = {}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            value = parameter.detach()
            learned[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
    model, _ = _read(directory)
    width = _build(model, settings, sample)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(learned[name])
    return model, width


def _finish(
    model: Any, width: Width, sample: Tensor, settings: Settings, result: TrainResult, progress: Progress
) -> None:
    """Fold the adapters in, measure the dial anew, and write down what happened, in place."""
    model.eval()
    merge_lora(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    shown = _long_windows(sample, getattr(model.config, "max_position_embeddings", DIAL_WINDOW))
    probes = shown[: max(2, DIAL_PROBE_TOKENS // shown.shape[1])]
    width = width_of(model)
    width.dial = None
    set_dial(model, measure_dial(model, shown, probes, lambda d, t: progress("dial", d, t)))
    set_budget(model, 1.0)
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
    width.config = width.config.replace(provenance={**before, "budget": settings.budget, "training": trained})


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

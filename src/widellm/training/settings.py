"""What a user may choose about a training run, and what it means to transformers' Trainer."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from widellm.config import check_budget
from widellm.errors import ConfigError
from widellm.files import one_line
from widellm.training.recipes import Optimisation, Recipe, recipe_of


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
    """Optimiser steps between checkpoints, each evaluated; default: `evaluations` of them in the run."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further fields of transformers' TrainingArguments, those nothing above decides: fsdp, bf16, report_to, ..."""

    def __post_init__(self) -> None:
        check_budget(self.budget)
        self.recipe.stage(self.stage)
        for name in ("window", "micro_batch", "held_out", "evaluations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.save_every is not None and self.save_every < 1:
            raise ConfigError(f"--save-every must be at least 1, got {self.save_every}")
        if self.tokens < self.window:
            raise ConfigError(f"--tokens {self.tokens} is less than one window of {self.window}: ask for more")


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
    inside = sorted({"routers", "recover"} & set(read.get("recipe", {})))
    if inside:
        raise ConfigError(f"{path}: {inside[0]} stands beside recipe, not inside it")
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


_FREE = {"logging_steps", "logging_nan_inf_filter", "lr_scheduler_type", "save_total_limit", "report_to", "use_cpu"}
_FREE |= {"disable_tqdm", "dataloader_num_workers"}
"""Fields that we set and a user may set otherwise."""
_DECIDED = {"num_train_epochs", "warmup_ratio", "auto_find_batch_size", "data_seed"}
"""Fields that would change what we set elsewhere."""


def arguments_of(settings: Settings, run: Path) -> Any:
    """transformers' TrainingArguments for a run; a user's own fields win."""
    from transformers import TrainingArguments

    optimisation = settings.recipe.stage(settings.stage)
    processes = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
    steps = steps_of(settings, processes)
    between = settings.save_every or max(1, math.ceil(steps / settings.evaluations))
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
        "save_steps": between,
        "save_total_limit": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "prediction_loss_only": True,
        "remove_unused_columns": False,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "seed": settings.seed,
        "use_cpu": not torch.cuda.is_available(),
    }
    taken = sorted(set(settings.trainer) & (set(fields) - _FREE | _DECIDED))
    if taken:
        raise ConfigError(f"trainer's {taken[0]} follows from the recipe and the other settings: change it there")
    try:
        return TrainingArguments(**{**fields, **settings.trainer})
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"these trainer settings do not do ({one_line(error, 160)}): mend --config") from error

"""transformers' Trainer with our objective in it. Optimiser steps, precision, processes and logging are all its own."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Trainer, TrainerCallback

from widellm.errors import CheckpointError, WidellmError
from widellm.files import atomic_write_json, one_line
from widellm.modeling.attach import width_of
from widellm.training import checkpoints
from widellm.training.guards import Usage, first_not_finite, gradient_not_finite, warnings_of
from widellm.training.losses import wanted_share
from widellm.training.objective import Objective
from widellm.training.recipes import Optimisation, Recipe

WEIGHTS = "model.safetensors"
PRICES = "prices.json"


class WidthTrainer(Trainer):
    """Trains what requires a gradient in an attached model; checkpoints hold that and nothing else."""

    def __init__(self, objective: Objective, optimisation: Optimisation, **kwargs: Any) -> None:
        self.objective, self.optimisation = objective, optimisation
        self.usage = Usage(objective.width)
        self.micro = 0
        self.found: list[str] = []
        """Warnings, each once."""
        super().__init__(model=objective.model, **kwargs)
        self.model_accepts_loss_kwargs = False  # our loss is a mean over a micro-batch
        self.add_callback(_Steps(self))

    # ---- one batch ----

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Loss of one micro-batch under the recipe."""
        state, processes = self.state, self.args.world_size
        self.objective.progress = state.global_step / max(state.max_steps - 1, 1)
        draw = state.global_step * self.args.gradient_accumulation_steps + self.micro
        noise_draw = draw * processes + self.args.process_index
        loss = self.objective.train_loss(model, inputs["input_ids"], draw, noise_draw)
        if not bool(torch.isfinite(loss)):
            where = first_not_finite(model, self.objective.width, inputs["input_ids"])
            self._stop(f"the loss is {float(loss.detach())}", where)
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As Trainer's, and then: are the gradients finite, what did the batch spend, what should it have cost."""
        loss = super().training_step(*args, **kwargs)
        bad = gradient_not_finite(self.model)
        if bad is not None:
            self._stop("gradients are not finite", bad)
        recipe = self.objective.recipe
        wanted = (
            self.objective.budget
            if recipe.budgets is not None
            else wanted_share(self.objective.width.sublayers, recipe.target)
        )
        self.usage.add(self.objective.decisions(), wanted)
        if self.objective.prices is not None:
            lacked, price = self.objective.observed()
            scaler = getattr(self.accelerator, "scaler", None)
            scale = self.current_gradient_accumulation_steps / (scaler.get_scale() if scaler is not None else 1.0)
            seen = torch.tensor([lacked, price * scale], dtype=torch.float64, device=self._float64_device())
            seen = self.accelerator.reduce(seen, "mean")
            self.objective.prices.observe(self.objective.budget, float(seen[0]), float(seen[1]))
        self.micro += 1
        return loss

    def _float64_device(self) -> Any:
        return "cpu" if self.args.device.type == "mps" else self.args.device

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Loss without noise at the recipe's budgets."""
        ids = self._prepare_inputs(inputs)["input_ids"]
        return self.objective.evaluation_loss(model, ids), None, None

    def _stop(self, what: str, where: str) -> None:
        raise WidellmError(
            f"{what} at step {self.state.global_step + 1}, first in {where}: lower the learning rate and go on "
            f"{self._way_back()}"
        )

    def _way_back(self) -> str:
        good, _ = checkpoints.newest_good(self.args.output_dir)
        return "from the start" if good is None else f"from {good} with --resume"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer's, with the figures of `guards.Usage` and the terms of the loss."""
        if "loss" in logs:
            figures = self.usage.take()
            logs = {**logs, **self.objective.parts, **figures}
            if self.objective.prices is not None:
                threshold, price = self.objective.prices.at(0.5)
                logs |= {"threshold_at_half": threshold, "price_at_half": price}
            self.found += [
                w for w in warnings_of(figures) if w.split(":")[-1] not in {f.split(":")[-1] for f in self.found}
            ]
        super().log(logs, start_time)

    # ---- what learns, and how fast ----

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW over routers and adapters, each at its own rate."""
        if self.optimizer is None:  # type: ignore[has-type]
            kind, arguments = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = parameter_groups(self.model if model is None else model, self.optimisation, self.objective.recipe)
            self.optimizer = kind(groups, **arguments)
        return self.optimizer

    # ---- checkpoints ----

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Only what learns; `state_dict` is FSDP's, gathered on the process that saves."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        source = dict(self.model.named_parameters()) if state_dict is None else state_dict
        names = [n for n, p in self.model.named_parameters() if p.requires_grad]
        save_file({n: source[n].detach().cpu().contiguous() for n in names}, folder / WEIGHTS)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As Trainer's; then the table of prices, and last the manifest that makes it count."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save and self.objective.prices is not None:
                atomic_write_json(folder / PRICES, self.objective.prices.to_list())
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.seal(folder)
        except (OSError, RuntimeError, SafetensorError, WidellmError) as error:
            raise WidellmError(
                f"the checkpoint of step {self.state.global_step} could not be written ({one_line(error, 120)}): "
                f"make room and go on {self._way_back()}"
            ) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_trained(self.model, folder)
        if self.objective.prices is not None:
            self.objective.prices.read(json.loads((folder / PRICES).read_text(encoding="utf-8")))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        if self.is_fsdp_enabled:
            super()._load_best_model()
        else:
            load_trained(self.model, Path(self.state.best_model_checkpoint))


class _Steps(TrainerCallback):
    """Counts micro-batches, and ends the run after the present step when a signal asks for it."""

    def __init__(self, trainer: WidthTrainer) -> None:
        self.trainer = trainer
        self.asked = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.objective.install()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.micro = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.asked:
            control.should_save = control.should_training_stop = True
        return control


@contextmanager
def stop_politely(trainer: WidthTrainer) -> Iterator[_Steps]:
    """Inside the block, the first Ctrl-C or SIGTERM saves after the present step and ends; a second ends at once."""
    steps = next(c for c in trainer.callback_handler.callbacks if isinstance(c, _Steps))
    if threading.current_thread() is not threading.main_thread():
        yield steps
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        if steps.asked:
            raise KeyboardInterrupt
        steps.asked = True

    for number in before:
        signal.signal(number, ask)
    try:
        yield steps
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parameter_groups(model: Any, optimisation: Optimisation, recipe: Recipe) -> list[dict[str, Any]]:
    """Optimiser groups: routers' first maps, their second maps and biases, adapters."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    factor, decay = recipe.up_lr_factor, optimisation.weight_decay
    rates = {
        "router.down": (optimisation.router_lr, decay),
        "router.up": (optimisation.router_lr * factor, decay / factor),
        "lora": (optimisation.lora_lr, decay),
    }
    members: dict[str, list[Any]] = {name: [] for name in rates}
    for name, parameter in trained:
        group = "router.up" if name.endswith(("router.up", "router.bias")) else "lora"
        members["router.down" if name.endswith("router.down") else group].append(parameter)
    return [
        {"params": parameters, "lr": rates[name][0], "weight_decay": rates[name][1]}
        for name, parameters in members.items()
        if parameters
    ]


def choose_trained(model: Any, optimisation: Optimisation) -> None:
    """Let routers and adapters learn as the stage says, and nothing else."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name and optimisation.lora_lr > 0)
    width = width_of(model)
    for sub in width.sublayers:
        # a router whose sub-layer follows another is never run
        width.router(sub).requires_grad_(optimisation.router_lr > 0 and sub.follows is None)


def load_trained(model: Any, folder: Path) -> None:
    """Copy a checkpoint's tensors into the parameters that learn. CheckpointError unless they match one to one."""
    read = load_file(folder / WEIGHTS)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if set(read) != set(trained):
        odd = sorted(set(read) ^ set(trained))[0]
        raise CheckpointError(f"{folder} is of another recipe or stage ({odd} is in one of them only)")
    with torch.no_grad():
        for name, parameter in trained.items():
            if read[name].shape != parameter.shape:
                raise CheckpointError(f"{folder}: {name} is {list(read[name].shape)}, not {list(parameter.shape)}")
            parameter.copy_(read[name])

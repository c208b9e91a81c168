"""Low-rank adapters on a routed model, through PEFT: put in, switched off for the dense teacher, folded in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from widellm.errors import ConfigError
from widellm.modeling.attach import width_of
from widellm.optional import require

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_lora(model: Any, rank: int, alpha: float, dropout: float, seed: int = 0) -> int:
    """Put LoRA adapters (float32) on all projections of an attached model, in place; returns how many.

    Everything else is frozen, routers too: the caller says what else learns. Adapters start at exactly no change.
    Raises ConfigError when there are adapters already, MissingDependencyError without peft.
    """
    peft = require("peft", "train", "LoRA training")
    width = width_of(model)
    if lora_layers(model):
        raise ConfigError("this model has LoRA adapters already: merge them first")
    family = width.layout.family
    names = [name for part in PROJECTIONS if (name := getattr(family, part)) is not None]
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, bias="none", target_modules=sorted(set(names))
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    layers = lora_layers(model)
    for layer in layers:
        layer.lora_A.float()
        layer.lora_B.float()
    _refresh(model)
    return len(layers)


def lora_layers(model: Any) -> list[Any]:
    """All adapter layers of a model, in the order of its modules."""
    return [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "get_base_layer")]


@contextmanager
def without_lora(model: Any) -> Iterator[None]:
    """Inside the block, adapters do nothing. (PEFT's own switch also flips requires_grad, which FSDP must not see.)"""
    layers = lora_layers(model)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def narrow_products(model: Any) -> Iterator[None]:
    """Inside the block, float32 adapters multiply in the dtype of the weights they sit on, as those weights do.

    Nothing changes where that is float32. Routers stay in float32.
    """
    layers = lora_layers(model)
    weight = width_of(model).layout.layers[0].up_proj.weight
    if not layers or weight.dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        with torch.autocast(weight.device.type, dtype=weight.dtype):
            yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True


@torch.no_grad()
def merge_lora(model: Any) -> int:
    """Add every adapter's product (float32, scale from its own configuration) to its weight and remove it, in place.

    The sum is rounded once to the weight's dtype. Returns how many were merged; 0 for a model without adapters.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not (hasattr(child, "lora_A") and hasattr(child, "get_base_layer")):
                continue
            base = child.get_base_layer()
            total = base.weight.float()
            for adapter in child.active_adapters:
                up, down = child.lora_B[adapter].weight.float(), child.lora_A[adapter].weight.float()
                total = total + child.scaling[adapter] * (up @ down)
            base.weight.copy_(total)  # keeps the strides: o and down may be stored input-major
            setattr(parent, name, base)
            count += 1
    _refresh(model)
    return count


def _refresh(model: Any) -> None:
    """A routed MLP calls its projections through a tuple: point it at what is there now."""
    width = width_of(model)
    family = width.layout.family
    for modules in width.layout.layers:
        mlp = modules.mlp
        if not hasattr(mlp, "_parts"):
            continue  # an FFN that is no module, or is not routed
        gate = None if family.gate_proj is None else getattr(mlp, family.gate_proj)
        mlp._parts = (gate, getattr(mlp, family.up_proj), getattr(mlp, family.down_proj), mlp._parts[3])

"""Low-rank adapters on a routed model, through PEFT: put in, switched off for the dense teacher, folded in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from widellm.errors import ConfigError
from widellm.kernels import masked
from widellm.modeling.attach import width_of
from widellm.modeling.decide import weigh
from widellm.modeling.linears import matrix
from widellm.modeling.routed_attention import RoutedOut
from widellm.modeling.swap import is_routed
from widellm.optional import require
from widellm.routing.state import SubLayer

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
    parts = PROJECTIONS if "ffn" in family.kinds else PROJECTIONS[:4]  # experts are no linears
    names = [name for part in parts if (name := getattr(family, part)) is not None]
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
        base = layer.get_base_layer()
        if is_routed(base, RoutedOut):
            layer.register_forward_pre_hook(partial(_narrow_input, base._width))
    return len(layers)


def _narrow_input(sub: SubLayer, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What an adapter on o or down reads: as weighed, or without what is dropped, where the input is still whole.

    Once folded in, the adapter reads no dropped group; it must not learn from one.
    """
    h, *rest = args
    if sub.threshold is None:
        return None
    if sub.gate is not None:
        if sub.weights is None or sub.weighed:
            return None
        sub.weighed = True
        return (weigh(h, sub.weights.view(*h.shape[:-1], -1), sub.groups), *rest)
    if sub.keep is None:
        return None
    rows = h.reshape(-1, h.shape[-1])
    return (masked.drop(rows, sub.keep.reshape(-1, sub.groups)).view(h.shape), *rest)


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
    weight = width_of(model).layout.layers[0].q_proj.weight
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
            weight = matrix(base)
            total = weight.float()
            for adapter in child.active_adapters:
                up, down = child.lora_B[adapter].weight.float(), child.lora_A[adapter].weight.float()
                total = total + child.scaling[adapter] * (up @ down)
            weight.copy_(total)  # keeps the strides: o and down may be stored input-major
            setattr(parent, name, base)
            count += 1
    return count

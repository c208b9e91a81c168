"""Turn a dense model into a routed one in place, and back; and the budget dial of a routed model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widellm.config import WidthConfig, check_budget
from widellm.errors import ConfigError, UnsupportedModelError
from widellm.families import Family, LayerModules, Layout, locate
from widellm.kernels import cpu
from widellm.kernels.registry import check_backend
from widellm.modeling.routed_attention import ATTENTION_NAME, RoutedOutput, RoutedQuery, register_attention
from widellm.modeling.routed_layer import Binding, NativeHead, RoutedLayer
from widellm.modeling.routed_mlp import RoutedMLP, is_plain_linear, parts_of
from widellm.modeling.routed_model import RoutedModel
from widellm.modeling.swap import check_swappable, is_bare_linear, is_routed, routed, special_weight, unrouted
from widellm.routing.budget import Dial, WorkCounter, group_cost, routable_share
from widellm.routing.router import Router
from widellm.routing.state import SubLayer


@dataclass
class Width:
    """All that widellm knows of an attached model; found at `width_of(model)`."""

    config: WidthConfig
    layout: Layout
    sublayers: tuple[SubLayer, ...]
    """Ordered by layer, attention before FFN."""
    permutations: Tensor
    """int64 [layers, F]: channel now at position j was at permutations[layer, j] in the base model."""
    dense_attention: str
    """The attention implementation to give back at detach."""
    dial: Dial | None = None
    budget: float = 1.0

    def counter(self) -> WorkCounter:
        """A fresh counter of the work this model does."""
        return WorkCounter(self.sublayers, routable_share(self.layout))

    def owner(self, sub: SubLayer) -> Any:
        """The module that holds the router of `sub` and receives what it reads: q_proj, or the MLP."""
        modules = self.layout.layers[sub.layer_index]
        return modules.q_proj if sub.kind == "attention" else modules.mlp

    def router(self, sub: SubLayer) -> Router:
        """The router that decides for `sub`."""
        router = self.owner(sub).router
        assert isinstance(router, Router)
        return router

    @contextmanager
    def watch(self, see: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Inside the block, every forward calls see(place in `sublayers`, logits [B, T, G]), at budget 1.0 too."""
        with ExitStack() as hooks:
            for place, sub in enumerate(self.sublayers):

                def note(module: Any, args: Any, place: int = place) -> None:
                    see(place, module.router(args[0]))

                hooks.callback(self.owner(sub).register_forward_pre_hook(note).remove)
            yield


def is_attached(model: Any) -> bool:
    """Whether `attach` has been called on this model (and `detach` has not)."""
    return isinstance(getattr(model, "_widellm", None), Width)


def width_of(model: Any) -> Width:
    """The Width of an attached model; ConfigError for a dense one."""
    width = getattr(model, "_widellm", None)
    if not isinstance(width, Width):
        raise ConfigError(f"this {type(model).__name__} is dense: load a routed directory or call widellm.attach first")
    return width


def attach(
    model: Any,
    config: WidthConfig,
    permutations: Tensor | None = None,
    family: Family | None = None,
    in_order: bool = False,
) -> Width:
    """Add routers to a transformers causal LM, in place. Everything is kept (dense) until a dial is set.

    permutations: int64 [layers, F], the order in which each layer's FFN channels are put before they are cut into
    groups; None leaves them as they are. The model's function does not change (up to the order of a float sum).
    in_order: the weights are in that order already (they were saved so); only remember it.

    Raises UnsupportedModelError or ConfigError before anything is touched when the model does not fit.
    """
    if is_attached(model):
        raise ConfigError("this model is routed already: call widellm.detach first")
    layout = locate(model, family)
    if len(layout.layers) != config.num_hidden_layers:
        raise ConfigError(f"config is for {config.num_hidden_layers} layers, the model has {len(layout.layers)}")
    groups = {
        "attention": layout.groups("attention", config.head_group_size),
        "ffn": layout.groups("ffn", config.ffn_group_size),
    }
    for index, modules in enumerate(layout.layers):
        for name in ("q_proj", "o_proj", "mlp", "layer"):
            check_swappable(getattr(modules, name), f"{name} of layer {index}")
    if permutations is None:
        permutations = torch.arange(layout.intermediate_size).repeat(len(layout.layers), 1)
    else:
        permutations = check_permutations(permutations, len(layout.layers), layout.intermediate_size)
        for index, modules in enumerate(layout.layers):
            for part in (modules.gate_proj, modules.up_proj, modules.down_proj):
                if part is None or in_order or is_plain_linear(part):
                    continue
                if not _is_identity(permutations[index]):
                    raise UnsupportedModelError(
                        f"layer {index}'s {type(part).__name__} cannot be regrouped: use a model with plain linears"
                    )

    sublayers = []
    for index, modules in enumerate(layout.layers):
        if not in_order:
            _permute_channels(modules.gate_proj, modules.up_proj, modules.down_proj, permutations[index])
        regrouped = not _is_identity(permutations[index])
        for kind, owner in (("attention", modules.q_proj), ("ffn", modules.mlp)):
            size = config.head_group_size if kind == "attention" else config.ffn_group_size
            sub = SubLayer(kind, index, groups[kind], size, group_cost(layout, kind, size))
            device = modules.up_proj.weight.device if kind == "ffn" else modules.q_proj.weight.device
            owner.router = Router(layout.hidden_size, groups[kind], config.router_rank, device)
            owner._width = sub
            sublayers.append(sub)
        modules.o_proj._width = modules.attention._width = modules.q_proj._width
        modules.mlp._parts = parts_of(modules, layout.activation)
        routed(modules.q_proj, RoutedQuery)
        routed(modules.o_proj, RoutedOutput)
        routed(modules.mlp, RoutedMLP)
        if layout.family.plain_block and cpu.availability()[0]:
            modules.layer._native = (modules, layout, sublayers[-2], sublayers[-1], regrouped, Binding())
            routed(modules.layer, RoutedLayer)
        if regrouped:
            _store_input_major(modules, True)

    head = model.get_output_embeddings()
    if cpu.availability()[0] and is_plain_linear(head) and not all(map(_is_identity, permutations)):
        head._width = sublayers[0]
        routed(head, NativeHead)

    dense_attention = str(model.config._attn_implementation)
    if dense_attention == "sdpa":
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
    width = Width(config, layout, tuple(sublayers), permutations, dense_attention)
    model._widellm = width
    routed(model, RoutedModel)
    return width


def settle(model: Any, permute: bool) -> None:
    """Do what `attach` had to leave out while the weights were on the meta device, now that they are loaded.

    permute: the weights are still in the base model's channel order.
    """
    width = width_of(model)
    for modules, permutation in zip(width.layout.layers, width.permutations, strict=True):
        if permute:
            _permute_channels(modules.gate_proj, modules.up_proj, modules.down_proj, permutation)
        if not _is_identity(permutation):
            _store_input_major(modules, True)


def detach(model: Any) -> Any:
    """Give back the dense model, bit for bit, in place; returns it."""
    width = width_of(model)
    for index, modules in enumerate(width.layout.layers):
        unrouted(modules.q_proj, RoutedQuery)
        unrouted(modules.o_proj, RoutedOutput)
        unrouted(modules.mlp, RoutedMLP)
        if is_routed(modules.layer, RoutedLayer):
            unrouted(modules.layer, RoutedLayer)
            del modules.layer._native
        _store_input_major(modules, False)
        for owner in (modules.q_proj, modules.mlp):
            del owner.router
        for owner in (modules.q_proj, modules.o_proj, modules.attention, modules.mlp):
            del owner._width
        del modules.mlp._parts
        inverse = torch.argsort(width.permutations[index])
        _permute_channels(modules.gate_proj, modules.up_proj, modules.down_proj, inverse)
    head = model.get_output_embeddings()
    if is_routed(head, NativeHead):
        unrouted(head, NativeHead)
        del head._width
    model.set_attn_implementation(width.dense_attention)
    unrouted(model, RoutedModel)
    del model._widellm
    return model


def set_dial(model: Any, dial: Dial) -> None:
    """Give an attached model its table of thresholds; the budget stays where it is."""
    width = width_of(model)
    if dial.thresholds.shape[0] != len(width.sublayers):
        raise ConfigError(f"dial has {dial.thresholds.shape[0]} rows, the model has {len(width.sublayers)} sub-layers")
    width.dial = dial
    set_budget(model, width.budget)


def set_budget(model: Any, budget: float) -> None:
    """Let the model spend this share of its routable work; 1.0 is the dense model and runs no router.

    Raises ConfigError outside (0, 1], below what was calibrated, or when the model has no dial yet.
    """
    width = width_of(model)
    budget = check_budget(budget)
    if budget < 1.0 and width.dial is None:
        raise ConfigError("this model has no dial yet: calibrate it (widellm prune) before asking for less than 1.0")
    thresholds = [None] * len(width.sublayers) if width.dial is None else width.dial.thresholds_at(budget)
    for sub, threshold in zip(width.sublayers, thresholds, strict=True):
        sub.threshold = threshold
        sub.keep = None
    width.budget = budget


def get_budget(model: Any) -> float:
    """The budget a routed model is set to."""
    return width_of(model).budget


def set_backend(model: Any, name: str) -> None:
    """Use one backend for all layers: "auto" or one of `kernels.registry.backends()`; BackendError if it cannot run."""
    check_backend(name)
    for sub in width_of(model).sublayers:
        sub.backend = name


def check_permutations(permutations: Tensor, layers: int, channels: int) -> Tensor:
    """Return them as int64 [layers, F] on the CPU, or raise ConfigError unless each row reorders 0..F-1."""
    permutations = permutations.to("cpu", torch.int64)
    if list(permutations.shape) != [layers, channels]:
        raise ConfigError(f"permutations must have shape [{layers}, {channels}], got {list(permutations.shape)}")
    if not bool((permutations.sort(dim=1).values == torch.arange(channels)).all()):
        raise ConfigError(f"permutations must reorder 0..{channels - 1} in every layer, and do not")
    return permutations


def _store_input_major(modules: LayerModules, input_major: bool) -> None:
    """Store o and down so that what one head group or channel group multiplies is one block (or undo it), on the CPU.

    The parameter keeps its shape and values and becomes a transposed view: no second copy. Kernels then skip a dropped
    group by not reading it at all.
    """
    for linear in (modules.o_proj, modules.down_proj):
        if not is_bare_linear(linear):
            continue
        weight = linear.weight
        if weight.device.type == "cpu" and weight.dtype in cpu.NATIVE_TYPES:
            weight.data = weight.data.t().contiguous().t() if input_major else weight.data.contiguous()


def _is_identity(permutation: Tensor) -> bool:
    return bool((permutation == torch.arange(permutation.numel())).all())


@torch.no_grad()
def _permute_channels(gate: Any, up: Any, down: Any, permutation: Tensor) -> None:
    """Reorder FFN channels in place: rows of gate and up, columns of down. One matrix is copied at a time.

    Quantised weights stay as they are: which order they are in changes nothing but who may name them.
    """
    if _is_identity(permutation) or up.weight.is_meta or special_weight(up) is not None:
        return
    for linear in (gate, up):
        if linear is not None:
            order = permutation.to(linear.weight.device)
            linear.weight.copy_(linear.weight[order])
            if linear.bias is not None:
                linear.bias.copy_(linear.bias[order])
    order = permutation.to(down.weight.device)
    down.weight.copy_(down.weight[:, order])

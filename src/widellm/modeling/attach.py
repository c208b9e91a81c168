"""Turn a dense model into a routed one in place, and back; and the budget dial of a routed model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widellm.config import KINDS, WidthConfig, check_budget
from widellm.errors import ConfigError, UnsupportedModelError
from widellm.families import Family, LayerModules, Layout, locate
from widellm.kernels import cpu
from widellm.kernels.registry import check_backend
from widellm.modeling import linears
from widellm.modeling.decide import ResidualTap
from widellm.modeling.routed_attention import ATTENTION_NAME, OwnFFN, RoutedIn, RoutedOut, register_attention
from widellm.modeling.routed_layer import Binding, NativeHead, RoutedLayer
from widellm.modeling.routed_mlp import RoutedMLP, is_plain_linear, parts_of
from widellm.modeling.routed_model import RoutedModel
from widellm.modeling.swap import check_swappable, has_adapters, is_routed, routed, special_weight, unrouted
from widellm.routing.budget import Dial, WorkCounter, group_cost, routable_share
from widellm.routing.router import Router
from widellm.routing.state import SubLayer


@dataclass
class Width:
    """All that widellm knows of an attached model; found at `width_of(model)`."""

    config: WidthConfig
    layout: Layout
    sublayers: tuple[SubLayer, ...]
    """Ordered by layer, attention before FFN; only of the kinds that are routed."""
    permutations: Tensor
    """int64 [layers, F] (F = 0 where the FFN is not routed): channel now at position j was at
    permutations[layer, j] in the base model."""
    dense_attention: str
    """The attention implementation to give back at detach."""
    dial: Dial | None = None
    budget: float = 1.0

    def counter(self) -> WorkCounter:
        """A fresh counter of the work this model does."""
        return WorkCounter(self.sublayers, routable_share(self.layout, self.config.kinds))

    def owner(self, sub: SubLayer) -> Any:
        """The module that holds the router of `sub` and receives what it reads: the q projection, or the MLP."""
        return self.layout.layers[sub.layer_index].entrance(sub.kind)

    def router(self, sub: SubLayer) -> Router:
        """The router that decides for `sub`."""
        router = self.owner(sub).router
        assert isinstance(router, Router)
        return router

    @contextmanager
    def watch(self, see: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Inside the block, every forward calls see(place in `sublayers`, logits [B, T, G]), at budget 1.0 too."""
        led: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for modules in self.layout.layers:
                if is_routed(modules.layer, RoutedLayer):
                    modules.layer._native[-1].fused = None  # bind again, and see the hooks
            for place, sub in enumerate(self.sublayers):

                def note(module: Any, args: Any, place: int = place, sub: SubLayer = sub) -> None:
                    if sub.follows is None:
                        led[sub.layer_index] = module.router(args[0] if sub.residual is None else sub.residual)
                    see(place, led[sub.layer_index])

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
    unfit = [kind for kind in config.kinds if kind not in layout.family.kinds]
    if unfit:
        raise ConfigError(
            f"{layout.model_type} can route {', '.join(layout.family.kinds)} only, not {', '.join(unfit)}"
        )
    sizes = {"attention": config.head_group_size, "ffn": config.ffn_group_size}
    groups = {kind: layout.groups(kind, sizes[kind]) for kind in config.kinds}
    if config.decision == "layer" and groups != {"attention": 1, "ffn": 1}:
        raise ConfigError(
            f"one decision for a whole layer needs one group in attention and FFN, got {groups}: "
            f"use group sizes {layout.num_attention_heads} and {layout.intermediate_size}"
        )
    channels = layout.intermediate_size if "ffn" in config.kinds else 0
    for index, modules in enumerate(layout.layers):
        norms = ("attention_norm", "ffn_norm") if config.router_input == "residual" else ()
        if norms and (None in (modules.attention_norm, modules.ffn_norm) or modules.attention_norm is modules.ffn_norm):
            raise ConfigError(
                f"{layout.model_type} has no norm of its own before each sub-layer: use router_input=normed"
            )
        swapped = ("q_proj", "o_proj", "layer", *(("up_proj", "down_proj") if modules.mlp is None else ("mlp",)))
        for name in (*swapped, *norms):
            check_swappable(getattr(modules, name), f"{name} of layer {index}")
    if permutations is None:
        permutations = torch.arange(channels).repeat(len(layout.layers), 1)
    else:
        permutations = check_permutations(permutations, len(layout.layers), channels)
        for index, modules in enumerate(layout.layers):
            for part in (modules.gate_proj, modules.up_proj, modules.down_proj):
                if part is None or in_order or is_plain_linear(part):
                    continue
                if not _is_identity(permutations[index]):
                    raise UnsupportedModelError(
                        f"layer {index}'s {type(part).__name__} cannot be regrouped: use a model with plain linears"
                    )

    fused = layout.fused_heads()
    sublayers: list[SubLayer] = []
    for index, modules in enumerate(layout.layers):
        if not in_order:
            _permute_channels(modules, permutations[index])
        regrouped = not _is_identity(permutations[index])
        own: list[SubLayer] = []
        for kind in config.kinds:
            sub = SubLayer(kind, index, groups[kind], sizes[kind], group_cost(layout, kind, sizes[kind]))
            if kind == "attention":
                modules.attention._width = sub
                sub.skips_in = not layout.family.whole_q
                if fused is not None:
                    sub.blocks = torch.tensor([sub.groups if h < 0 else h // sub.group_size for h in fused])
            elif config.decision == "layer":
                sub.follows = own[0]
            swaps = _behaviours(modules, kind, config)
            entrance, device = swaps[0][0], next(modules.exit(kind).parameters()).device
            capped = config.router_input == "normed"
            entrance.router = Router(layout.hidden_size, groups[kind], config.router_rank, device, capped)
            if kind == "ffn" and modules.mlp is not None:
                modules.mlp._parts = parts_of(modules, layout.activation)
            for module, behaviour in swaps:
                module._width = sub
                routed(module, behaviour)
            own.append(sub)
        if layout.family.plain_block and config.kinds == KINDS and cpu.availability()[0]:
            modules.layer._native = (modules, layout, own[0], own[1], regrouped, Binding())
            routed(modules.layer, RoutedLayer)
        if regrouped:
            _store_for_kernels(modules, True)
        sublayers += own

    head = model.get_output_embeddings()
    readable = is_plain_linear(head) or linears.is_int8_linear(head)
    if cpu.availability()[0] and readable:
        head._width, head._regrouped = sublayers[0], not all(map(_is_identity, permutations))
        routed(head, NativeHead)

    dense_attention = str(model.config._attn_implementation)
    if dense_attention == "sdpa" and layout.family.attention_function and "attention" in config.kinds:
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
            _permute_channels(modules, permutation)
        if not _is_identity(permutation):
            _store_for_kernels(modules, True)


def detach(model: Any) -> Any:
    """Give back the dense model, bit for bit, in place; returns it.

    Raises ConfigError, with nothing changed, where adapters sit on regrouped channels: their order would be lost.
    """
    width = width_of(model)
    for modules, permutation in zip(width.layout.layers, width.permutations, strict=True):
        if not _is_identity(permutation) and has_adapters(modules.layer if modules.mlp is None else modules.mlp):
            raise ConfigError("adapters are on regrouped channels: merge or unload them before widellm.detach")
    for index, modules in enumerate(width.layout.layers):
        if is_routed(modules.layer, RoutedLayer):
            unrouted(modules.layer, RoutedLayer)
            del modules.layer._native
        for kind in width.config.kinds:
            del modules.entrance(kind).router
            for module, behaviour in _behaviours(modules, kind, width.config):
                unrouted(module, behaviour)
                del module._width
        if "attention" in width.config.kinds:
            del modules.attention._width
        if "ffn" in width.config.kinds and modules.mlp is not None:
            del modules.mlp._parts
        _store_for_kernels(modules, False)
        _permute_channels(modules, torch.argsort(width.permutations[index]))
    head = model.get_output_embeddings()
    if is_routed(head, NativeHead):
        unrouted(head, NativeHead)
        del head._width, head._regrouped
    if model.config._attn_implementation != width.dense_attention:
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


def set_batch_shared(model: Any, shared: bool) -> None:
    """Opt in: while decoding, the sequences of a batch agree on one set of groups per layer and token.

    With routing of its own per row, a batch reads nearly every weight, since some row wants each group; with one set
    it reads only the budget's share. The price: what a sequence generates depends on its batch mates. A call with one
    sequence, or with several tokens per sequence (prefill), routes as ever. Not saved with the model. Each sequence
    has a vote, ended ones that generate() keeps padding too.
    """
    for sub in width_of(model).sublayers:
        sub.shared = shared


def check_permutations(permutations: Tensor, layers: int, channels: int) -> Tensor:
    """Return them as int64 [layers, F] on the CPU, or raise ConfigError unless each row reorders 0..F-1."""
    permutations = permutations.to("cpu", torch.int64)
    if list(permutations.shape) != [layers, channels]:
        raise ConfigError(f"permutations must have shape [{layers}, {channels}], got {list(permutations.shape)}")
    if not bool((permutations.sort(dim=1).values == torch.arange(channels)).all()):
        raise ConfigError(f"permutations must reorder 0..{channels - 1} in every layer, and do not")
    return permutations


def _behaviours(modules: LayerModules, kind: str, config: WidthConfig) -> list[tuple[Any, type]]:
    """(module, behaviour put before its class) of one sub-layer; the first holds its router."""
    norm = modules.attention_norm if kind == "attention" else modules.ffn_norm
    follows = kind == "ffn" and config.decision == "layer"  # reads nothing, and would hold the stream for nothing
    tap = [(norm, ResidualTap)] if config.router_input == "residual" and not follows else []
    if kind == "attention":
        return [(modules.q_proj, RoutedIn), (modules.o_proj, RoutedOut), *tap]
    if modules.mlp is not None:
        return [(modules.mlp, RoutedMLP), *tap]
    return [(modules.up_proj, RoutedIn), (modules.down_proj, RoutedOut), (modules.layer, OwnFFN), *tap]


def _store_for_kernels(modules: LayerModules, routed: bool) -> None:
    """Store o and down so that what one head group or channel group multiplies is one block, and what is read by rows
    by rows (or undo it), on the CPU.

    The parameter keeps its shape and values and becomes a transposed view: no second copy. Kernels then skip a dropped
    group by not reading it at all.
    """
    for linear in (modules.o_proj, modules.down_proj):
        if linear is not None:
            linears.store(linear, True if routed else None)
    for linear in (modules.q_proj, modules.gate_proj, modules.up_proj):
        if linear is not None:
            linears.store(linear, False if routed else None)


def _is_identity(permutation: Tensor) -> bool:
    return bool((permutation == torch.arange(permutation.numel())).all())


def _permute_channels(modules: LayerModules, permutation: Tensor) -> None:
    """Reorder FFN channels in place: rows of gate and up, columns of down. One matrix is copied at a time.

    Quantised weights stay as they are: which order they are in changes nothing but who may name them.
    """
    up = modules.up_proj
    if _is_identity(permutation) or up.weight.is_meta or special_weight(up) is not None:
        return
    gate = modules.gate_proj
    if gate is up:
        linears.reorder_outputs(up, torch.cat([permutation, permutation + permutation.numel()]))
    else:
        for linear in (gate, up):
            if linear is not None:
                linears.reorder_outputs(linear, permutation)
    linears.reorder_inputs(modules.down_proj, permutation)

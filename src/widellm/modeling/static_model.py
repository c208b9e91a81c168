"""Models whose layers differ in width: heads and channels taken out for good, no routers, plain linears.

transformers builds every layer by the one width in config.json; `narrow` then makes each as small as that layer's sizes
say, before any weight is read (see `quantizer`). The modelling code runs as it is: it counts heads by the length of
what q, k and v give, and by a few attributes of the attention module, which `narrow` sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from widellm.errors import CheckpointError, ConfigError, UnsupportedModelError
from widellm.families import Family, LayerModules, Layout, locate
from widellm.modeling.card import static_card
from widellm.modeling.quantizer import StaticConfig
from widellm.modeling.swap import routed, special_weight

UNEVEN = "widellm_uneven"
"""The registered attention function of a model where KV heads serve unequal numbers of query heads."""
CARD_FILE = "README.md"


@dataclass(frozen=True)
class Sizes:
    """How wide one layer is; None where it is as its family makes it."""

    heads_per_kv_head: tuple[int, ...] | None
    """For each KV head, how many consecutive query heads share it; () where no head is left."""
    channels: int | None
    """FFN channels."""

    def to_json(self) -> dict[str, Any]:
        """As in config.json."""
        heads = None if self.heads_per_kv_head is None else list(self.heads_per_kv_head)
        return {"heads_per_kv_head": heads, "channels": self.channels}

    @property
    def uneven(self) -> bool:
        """Whether the KV heads serve unequal numbers of query heads."""
        return len(set(self.heads_per_kv_head or ())) > 1


@dataclass(frozen=True)
class Kept:
    """What one layer keeps, ascending numbers in the dense model's order; None where everything of a kind is kept."""

    heads: Tensor | None
    """int64 [H']: query heads."""
    channels: Tensor | None
    """int64 [F']: FFN channels."""


class Zeros(nn.Module):
    """Stands for a projection of which nothing is left: `[..., D]` -> zeros `[..., out_features]`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x.new_zeros(*x.shape[:-1], self.out_features)


class BiasOnly(nn.Module):
    """Stands for an o or down projection that has nothing left to read: `[..., N]` -> its bias, or 0, `[..., D]`."""

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = 0, linear.out_features
        bias = None if linear.bias is None else nn.Parameter(torch.empty_like(linear.bias))
        self.register_parameter("bias", bias)

    def forward(self, h: Tensor) -> Tensor:
        """See the class."""
        zeros = h.new_zeros(*h.shape[:-1], self.out_features)
        return zeros if self.bias is None else zeros + self.bias


class StaticModel:
    """Behaviour put before the class of a causal LM that `narrow` has changed; see `swap`."""

    _widellm_keeps_name = True
    """transformers writes the class's name into config.json, and other programs look it up there."""
    _widellm_static: StaticConfig

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, with the sizes in config.json, and a model card where there is none."""
        config: Any = self.config  # type: ignore[attr-defined]
        attention = config._attn_implementation
        config._attn_implementation = "sdpa" if attention == UNEVEN else attention
        config.quantization_config = self._widellm_static
        try:
            found = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        finally:
            config._attn_implementation = attention
            del config.quantization_config
        card = Path(save_directory) / CARD_FILE
        adapters = getattr(self, "_hf_peft_config_loaded", False)  # transformers writes those alone then
        if kwargs.get("is_main_process", True) and not adapters and not card.exists():
            card.write_text(static_card(self._widellm_static.layers, self._widellm_static.provenance), encoding="utf-8")
        return found

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """transformers' own; ConfigError for what cannot share KV heads unevenly, where this model does."""
        if any(size.uneven for size in sizes_of(self._widellm_static)):
            _check_attention(attn_implementation)
            attn_implementation = UNEVEN
        super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]

    def _get_static_cache_init_shape(self, *args: Any, **kwargs: Any) -> None:
        """None: transformers must not make a static cache by the one number of heads in config.json."""


def sizes_of(config: StaticConfig) -> list[Sizes]:
    """The sizes in a config.json, one per layer. Raises CheckpointError when they are not such sizes."""
    found = []
    for index, layer in enumerate(config.layers):
        try:
            heads, channels = layer["heads_per_kv_head"], layer["channels"]
            numbers = [*(heads or ()), *(() if channels is None else (channels + 1,))]
            if not all(type(n) is int and n >= 1 for n in numbers):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"config.json has the sizes {layer!r} for layer {index}, expected heads_per_kv_head (whole numbers of "
                f"at least 1) and channels: it is damaged, export the model again"
            ) from None
        found.append(Sizes(None if heads is None else tuple(heads), channels))
    return found


def narrow(model: Any, config: StaticConfig) -> Layout:
    """Make every layer of a dense model as small as `config` says, in place; the new weights have no values yet.

    Returns what the model was before. Raises, with nothing changed, CheckpointError when the sizes do not fit the
    model, UnsupportedModelError when its weights cannot be taken apart, ConfigError when its attention implementation
    cannot run them.
    """
    sizes, layout = sizes_of(config), locate(model)
    if len(sizes) != len(layout.layers):
        raise CheckpointError(f"config.json has sizes of {len(sizes)} layers, the model has {len(layout.layers)}")
    for index, (size, modules) in enumerate(zip(sizes, layout.layers, strict=True)):
        heads = sum(size.heads_per_kv_head or ())
        if heads > layout.num_attention_heads or (size.channels or 0) > layout.intermediate_size:
            raise CheckpointError(
                f"config.json has {heads} heads and {size.channels} channels for layer {index}, the model has "
                f"{layout.num_attention_heads} and {layout.intermediate_size}: they do not belong together"
            )
        _check_separable(layout, modules, size)
    uneven = any(size.uneven for size in sizes)
    if uneven:
        _check_attention(model.config._attn_implementation)
    for modules, size in zip(layout.layers, sizes, strict=True):
        if size.heads_per_kv_head is not None:
            _narrow_attention(modules, layout, size.heads_per_kv_head)
        if size.channels is not None:
            _narrow_ffn(modules, layout.family, size.channels)
    model._widellm_static = config
    routed(model, StaticModel)
    if uneven:
        AttentionInterface.register(UNEVEN, _attention)
        AttentionMaskInterface.register(UNEVEN, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation(UNEVEN)
    return layout


@torch.no_grad()
def take_out(model: Any, kept: Sequence[Kept], provenance: dict[str, Any]) -> list[Sizes]:
    """Take all that is not kept out of a dense model, in place: it computes what it would with that zeroed.

    A KV head that no kept query head needs goes too. Where KV heads are left with unequal numbers of query heads, and
    the model runs another attention than transformers' sdpa, they are stored as often as makes the numbers equal.
    Raises UnsupportedModelError, with nothing changed, for a model of which this cannot be taken out.
    """
    layout = locate(model)
    shares = layout.num_attention_heads // layout.num_key_value_heads
    any_number = layout.family.attention_function and model.config._attn_implementation == "sdpa"
    sizes, kv_heads = [], []
    for layer in kept:
        counts, ids = None, torch.empty(0, dtype=torch.int64)
        if layer.heads is not None:
            found = torch.bincount(layer.heads // shares, minlength=layout.num_key_value_heads)
            ids, counts = found.nonzero().flatten(), tuple(found[found > 0].tolist())
            if not any_number and len(set(counts)) > 1:
                each = math.gcd(*counts)
                ids = ids.repeat_interleave(torch.tensor(counts) // each)
                counts = (each,) * len(ids)
        kv_heads.append(ids)
        sizes.append(Sizes(counts, None if layer.channels is None else layer.channels.numel()))
    layout = narrow(model, StaticConfig(layers=[size.to_json() for size in sizes], provenance=provenance))
    for modules, layer, ids in zip(layout.layers, kept, kv_heads, strict=True):
        rows: dict[str, Tensor] = {}
        if layer.heads is not None:
            q, kv = _rows(layer.heads, layout.head_dim), _rows(ids, layout.head_dim)
            rows |= {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q}
        if layer.channels is not None:
            into = layer.channels
            if modules.gate_proj is modules.up_proj:  # one linear: the gate's rows, then up's
                into = torch.cat([into, into + layout.intermediate_size])
            rows |= {"gate_proj": into, "up_proj": into, "down_proj": layer.channels}
        for name, chosen in rows.items():
            if getattr(modules, name) is not None:
                _fill(_place(modules, layout.family, name), getattr(modules, name), chosen, name in _EXITS)
    return sizes


_EXITS = ("o_proj", "down_proj")
"""Projections whose columns are chosen; of the others it is the rows, and their biases."""


def _fill(now: Any, before: Any, chosen: Tensor, exits: bool) -> None:
    """Copy the chosen part of a linear into the smaller one that has taken its place."""
    chosen = chosen.to(before.weight.device)
    if not isinstance(now, (Zeros, BiasOnly)):
        now.weight.copy_(before.weight[:, chosen] if exits else before.weight[chosen])
    if before.bias is not None and not isinstance(now, Zeros):
        now.bias.copy_(before.bias if exits else before.bias[chosen])


def _rows(heads: Tensor, head_dim: int) -> Tensor:
    """int64 [n * head_dim]: the rows of some heads."""
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _narrow_attention(modules: LayerModules, layout: Layout, counts: tuple[int, ...]) -> None:
    dim, family = layout.head_dim, layout.family
    # of nothing, one head of zeros is left: every layer must have something to put into a cache, whose length is asked
    counts, nothing = counts or (1,), not counts
    heads, kv_heads = sum(counts), len(counts)
    for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        before = getattr(modules, name)
        after = Zeros(before.in_features, dim) if nothing else _linear(before, before.in_features, count * dim)
        _put(modules, family, name, after)
    before = modules.o_proj
    _put(modules, family, "o_proj", BiasOnly(before) if nothing else _linear(before, heads * dim, before.out_features))
    uneven = len(set(counts)) > 1
    for name, value in (("num_key_value_groups", 1 if uneven else counts[0]), ("num_heads", heads)):
        if hasattr(modules.attention, name):
            setattr(modules.attention, name, value)
    if uneven:
        modules.attention._heads_per_kv_head = counts


def _narrow_ffn(modules: LayerModules, family: Family, channels: int) -> None:
    down = modules.down_proj
    for name in ("gate_proj", "up_proj"):
        before = getattr(modules, name)
        if before is None:
            continue
        rows = channels * (2 if modules.gate_proj is modules.up_proj else 1)
        after = _linear(before, before.in_features, rows) if rows else Zeros(before.in_features, 2)
        _put(modules, family, name, after)
    _put(modules, family, "down_proj", _linear(down, channels, down.out_features) if channels else BiasOnly(down))


def _linear(like: nn.Linear, inputs: int, outputs: int) -> nn.Linear:
    """A linear of another size, without values."""
    weight, bias = like.weight, like.bias is not None
    return skip_init(type(like), inputs, outputs, bias=bias, device=weight.device, dtype=weight.dtype)


def _parent(modules: LayerModules, name: str) -> Any:
    if name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        return modules.attention
    return modules.layer if modules.mlp is None else modules.mlp


def _place(modules: LayerModules, family: Family, name: str) -> Any:
    """What is in the place of a projection now."""
    return _parent(modules, name).get_submodule(getattr(family, name))


def _put(modules: LayerModules, family: Family, name: str, module: nn.Module) -> None:
    parent, _, leaf = getattr(family, name).rpartition(".")
    setattr(_parent(modules, name).get_submodule(parent), leaf, module)


def _check_separable(layout: Layout, modules: LayerModules, size: Sizes) -> None:
    """Raise UnsupportedModelError where heads or channels cannot be taken out of this family's weights."""
    problem: str | None = None
    parts: list[Any] = (
        [] if size.heads_per_kv_head is None else [modules.q_proj, modules.k_proj, modules.v_proj, modules.o_proj]
    )
    if parts and modules.q_proj is modules.k_proj:
        problem = "its q, k and v are one fused linear"
    elif parts and layout.family.whole_q:
        problem = "it norms q and k across heads"
    parts += [] if size.channels is None else [modules.gate_proj, modules.up_proj, modules.down_proj]
    odd = [type(m).__name__ for m in parts if m is not None and not isinstance(m, nn.Linear)]
    odd += [f"quantised ({name})" for m in parts if m is not None and (name := special_weight(m))]
    if problem is None and odd:
        problem = f"its projections are {odd[0]}"
    if problem is not None:
        raise UnsupportedModelError(
            f"{layout.model_type} has no static form with heads or channels taken out: {problem}"
        )


def _check_attention(name: Any) -> None:
    if name not in ("sdpa", UNEVEN):
        raise ConfigError(
            f"attention {name!r} cannot run this model, whose KV heads serve unequal numbers of query heads: "
            f"use attn_implementation='sdpa'"
        )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' sdpa, with each KV head once for every query head that shares it.

    query [B, H, Tq, d], key and value [B, K, Tk, d] -> ([B, Tq, H, d], None).
    """
    counts = getattr(module, "_heads_per_kv_head", None)
    if counts is not None:
        key, value = (_repeat(t, counts) for t in (key, value))
    found: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, **kwargs
    )
    return found


def _repeat(heads: Tensor, counts: tuple[int, ...]) -> Tensor:
    """[B, K, T, d] -> [B, sum(counts), T, d]."""
    parts = zip(heads.split(1, 1), counts, strict=True)
    return torch.cat([part.expand(-1, count, -1, -1) for part, count in parts], 1)

"""Where each model family keeps its modules: data, and the one function that reads it.

To add a family, add a line to FAMILIES; docs/families.md walks through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from widellm.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class Family:
    """Names of the modules of one model family, as attribute paths. The defaults are Llama's."""

    layers: str = "model.layers"
    """Path from the causal-LM model to its list of decoder layers."""
    attention: str = "self_attn"
    mlp: str = "mlp"
    """Paths from a decoder layer to its two sub-layers."""
    q_proj: str = "q_proj"
    k_proj: str = "k_proj"
    v_proj: str = "v_proj"
    o_proj: str = "o_proj"
    """Paths from the attention module to its projections."""
    gate_proj: str | None = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"
    """Paths from the MLP to its projections; a family without a gate says None."""
    attention_norm: str = "input_layernorm"
    ffn_norm: str = "post_attention_layernorm"
    """Paths from a decoder layer to the norms whose outputs the sub-layers (and so the routers) receive."""
    q_norm: str | None = None
    k_norm: str | None = None
    """Per-head norms inside the attention module, where the family has them."""
    plain_block: bool = True
    """Whether a layer is x + attention(norm(x)), then x + mlp(norm(x)), with RMSNorm (weight times the normed value)
    and rotary embeddings in the rotate-half convention: what the native whole-layer decode computes."""


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(q_norm="q_norm", k_norm="k_norm"),
}

# transformers' activation names -> ours (kernels know these four)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class LayerModules:
    """The live modules of one decoder layer."""

    # Any, because torch types every attribute of a module as "tensor or module"
    layer: Any
    attention: Any
    mlp: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    gate_proj: Any
    """None in a family without a gate."""
    up_proj: Any
    down_proj: Any
    attention_norm: Any
    ffn_norm: Any


@dataclass(frozen=True)
class Layout:
    """A model seen through its family's description: sizes and live modules. Sizes are those of every layer."""

    model_type: str
    family: Family
    layers: tuple[LayerModules, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    activation: str

    def groups(self, kind: str, group_size: int) -> int:
        """Number of groups of `group_size` heads (kind "attention") or channels ("ffn"); ConfigError if uneven."""
        size, unit = self.intermediate_size, "FFN channels"
        if kind == "attention":
            size, unit = self.num_attention_heads, "query heads"
        if size % group_size:
            fits = [n for n in range(1, size + 1) if size % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - group_size))[:4])
            raise ConfigError(
                f"{kind} group size {group_size} does not divide the model's {size} {unit}; "
                f"use one that does, such as {', '.join(map(str, near))}"
            )
        return size // group_size


def _get(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return None
    return root


def _missing(model: Any, family: Family) -> list[str]:
    """Attribute paths that `family` names and `model` lacks (looked up in the first layer)."""
    layers = _get(model, family.layers)
    if layers is None or len(layers) == 0:
        return [family.layers]
    layer, missing = layers[0], []
    for path in (family.attention, family.mlp, family.attention_norm, family.ffn_norm):
        if _get(layer, path) is None:
            missing.append(f"{family.layers}.0.{path}")
    attention, mlp = _get(layer, family.attention), _get(layer, family.mlp)
    in_attention = (family.q_proj, family.k_proj, family.v_proj, family.o_proj, family.q_norm, family.k_norm)
    in_mlp = (family.gate_proj, family.up_proj, family.down_proj)
    for parent, module, names in ((family.attention, attention, in_attention), (family.mlp, mlp, in_mlp)):
        for name in names:
            if module is not None and name is not None and _get(module, name) is None:
                missing.append(f"{family.layers}.0.{parent}.{name}")
    return missing


def locate(model: Any, family: Family | None = None) -> Layout:
    """Find the routable modules of a transformers causal LM; nothing is changed.

    `family` overrides the description found by `model.config.model_type`. Raises UnsupportedModelError, naming the
    attributes that are missing, when the model does not have the structure its description promises.
    """
    config: Any = getattr(model, "config", None)
    model_type = str(getattr(config, "model_type", type(model).__name__))
    if family is None:
        family = FAMILIES.get(model_type)
    if family is None:
        lacks = _missing(model, Family())
        hint = "it has Llama's layout: pass family=Family()"
        if lacks:
            hint = f"it lacks {', '.join(lacks)} of Llama's layout"
        raise UnsupportedModelError(
            f"model family {model_type!r} is not supported ({hint}); supported: {', '.join(sorted(FAMILIES))}"
        )
    lacks = _missing(model, family)
    if lacks:
        raise UnsupportedModelError(
            f"this {model_type!r} model lacks {', '.join(lacks)}, which its family's description names: "
            f"the installed transformers may have moved it"
        )
    layers = tuple(_layer_modules(layer, family) for layer in _get(model, family.layers))
    first = layers[0]
    head_dim = int(getattr(first.attention, "head_dim", 0)) or config.hidden_size // config.num_attention_heads
    named = getattr(config, "hidden_act", None)
    activation = ACTIVATIONS.get(str(named))
    if activation is None:
        raise UnsupportedModelError(f"activation {named!r} is not supported; known: {', '.join(sorted(ACTIVATIONS))}")
    layout = Layout(
        model_type=model_type,
        family=family,
        layers=layers,
        hidden_size=first.q_proj.in_features,
        intermediate_size=first.up_proj.out_features,
        num_attention_heads=first.q_proj.out_features // head_dim,
        num_key_value_heads=first.k_proj.out_features // head_dim,
        head_dim=head_dim,
        activation=activation,
    )
    for index, modules in enumerate(layers):
        sizes = (modules.q_proj.out_features, modules.up_proj.out_features)
        if sizes != (first.q_proj.out_features, first.up_proj.out_features):
            raise UnsupportedModelError(
                f"layer {index} has q and up sizes {sizes}, unlike layer 0: mixed widths are not supported"
            )
    return layout


def _layer_modules(layer: Any, family: Family) -> LayerModules:
    attention, mlp = _get(layer, family.attention), _get(layer, family.mlp)
    return LayerModules(
        layer=layer,
        attention=attention,
        mlp=mlp,
        q_proj=_get(attention, family.q_proj),
        k_proj=_get(attention, family.k_proj),
        v_proj=_get(attention, family.v_proj),
        o_proj=_get(attention, family.o_proj),
        gate_proj=None if family.gate_proj is None else _get(mlp, family.gate_proj),
        up_proj=_get(mlp, family.up_proj),
        down_proj=_get(mlp, family.down_proj),
        attention_norm=_get(layer, family.attention_norm),
        ffn_norm=_get(layer, family.ffn_norm),
    )

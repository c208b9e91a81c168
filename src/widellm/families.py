"""Where each model family keeps its modules: data, and the one function that reads it.

To add a family, add an entry to FAMILIES; docs/families.md walks through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from widellm.config import KINDS
from widellm.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class Family:
    """Names of the modules of one model family, as attribute paths. The defaults are Llama's.

    Two projections with the same path are one fused linear, which holds the rows of both.
    """

    layers: str = "model.layers"
    """Path from the causal-LM model to its list of decoder layers."""
    kinds: tuple[str, ...] = KINDS
    """What can be routed: a family of experts has no FFN groups, and says ("attention",)."""
    attention: str = "self_attn"
    mlp: str | None = "mlp"
    """Paths from a decoder layer to its two sub-layers. None: the FFN's projections are the layer's own."""
    q_proj: str = "q_proj"
    k_proj: str = "k_proj"
    v_proj: str = "v_proj"
    o_proj: str = "o_proj"
    """Paths from the attention module to its projections."""
    interleaved: bool = False
    """Order of the rows of a fused q, k, v. False: all of q, then k, then v. True: for each KV head in turn the query
    heads that share it, then its k, then its v."""
    gate_proj: str | None = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"
    """Paths from the MLP (or the layer) to its projections; a family without a gate says None. A fused pair holds the
    rows of the gate first."""
    activation: str = "hidden_act"
    """The field of the model's configuration that names the activation."""
    attention_norm: str | None = "input_layernorm"
    ffn_norm: str | None = "post_attention_layernorm"
    """Paths from a decoder layer to the norms whose outputs the sub-layers receive; only a plain block needs them."""
    q_norm: str | None = None
    k_norm: str | None = None
    """Per-head norms inside the attention module; only a plain block needs them."""
    whole_q: bool = False
    """Whether q is normed across heads: then a kept head's query needs all others, and q is computed whole."""
    rope_switch: str | None = None
    """An attribute of the attention module that is false in layers without rotary embeddings."""
    attention_function: bool = True
    """Whether its attention asks transformers' AttentionInterface for the function to call, so that ours can be it.
    False: attention runs over all heads, and only q and o skip."""
    plain_block: bool = True
    """Whether a layer is x + attention(norm(x)), then x + mlp(norm(x)), with RMSNorm (weight times the normed value),
    and rotary embeddings in the rotate-half convention: what the native whole-layer decode computes. A fused q, k, v
    must not be interleaved."""


# Not plain: norms after the sub-layers (Gemma, OLMo 2), factors on the residual (Granite), parallel sub-layers or
# LayerNorm (Falcon, GPT-NeoX, OPT, GPT-2), experts (Mixtral, Qwen3 MoE).
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(q_norm="q_norm", k_norm="k_norm"),
    "smollm3": Family(rope_switch="use_rope"),
    "gemma2": Family(activation="hidden_activation", ffn_norm="pre_feedforward_layernorm", plain_block=False),
    "gemma3_text": Family(activation="hidden_activation", ffn_norm="pre_feedforward_layernorm", plain_block=False),
    "phi3": Family(
        q_proj="qkv_proj",
        k_proj="qkv_proj",
        v_proj="qkv_proj",
        gate_proj="gate_up_proj",
        up_proj="gate_up_proj",
    ),
    "olmo2": Family(attention_norm=None, ffn_norm=None, whole_q=True, plain_block=False),
    "granite": Family(plain_block=False),
    "falcon": Family(
        layers="transformer.h",
        attention="self_attention",
        q_proj="query_key_value",
        k_proj="query_key_value",
        v_proj="query_key_value",
        interleaved=True,
        o_proj="dense",
        gate_proj=None,
        up_proj="dense_h_to_4h",
        down_proj="dense_4h_to_h",
        activation="activation",
        attention_norm=None,
        ffn_norm=None,
        attention_function=False,
        plain_block=False,
    ),
    "gpt_neox": Family(
        layers="gpt_neox.layers",
        attention="attention",
        q_proj="query_key_value",
        k_proj="query_key_value",
        v_proj="query_key_value",
        interleaved=True,
        o_proj="dense",
        gate_proj=None,
        up_proj="dense_h_to_4h",
        down_proj="dense_4h_to_h",
        plain_block=False,
    ),
    "opt": Family(
        layers="model.decoder.layers",
        mlp=None,
        o_proj="out_proj",
        gate_proj=None,
        up_proj="fc1",
        down_proj="fc2",
        activation="activation_function",
        attention_norm="self_attn_layer_norm",
        ffn_norm="final_layer_norm",
        plain_block=False,
    ),
    "gpt2": Family(
        layers="transformer.h",
        attention="attn",
        q_proj="c_attn",
        k_proj="c_attn",
        v_proj="c_attn",
        o_proj="c_proj",
        gate_proj=None,
        up_proj="c_fc",
        down_proj="c_proj",
        activation="activation_function",
        attention_norm="ln_1",
        ffn_norm="ln_2",
        plain_block=False,
    ),
    "mixtral": Family(kinds=("attention",), plain_block=False),
    "qwen3_moe": Family(kinds=("attention",), q_norm="q_norm", k_norm="k_norm", plain_block=False),
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
    """The live modules of one decoder layer; what a family does not have is None."""

    # Any, because torch types every attribute of a module as "tensor or module"
    layer: Any
    attention: Any
    mlp: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    """All three are the same module where it is fused."""
    o_proj: Any
    gate_proj: Any
    """The same module as up_proj where it is fused."""
    up_proj: Any
    down_proj: Any
    attention_norm: Any
    ffn_norm: Any

    def entrance(self, kind: str) -> Any:
        """The module that receives what the sub-layer reads, and so holds its router."""
        return self.q_proj if kind == "attention" else self.up_proj if self.mlp is None else self.mlp

    def exit(self, kind: str) -> Any:
        """The module whose output is the sub-layer's."""
        return self.o_proj if kind == "attention" else self.down_proj if self.mlp is None else self.mlp


@dataclass(frozen=True)
class Layout:
    """A model seen through its family's description: sizes and live modules. Sizes are those of every layer."""

    model_type: str
    family: Family
    layers: tuple[LayerModules, ...]
    hidden_size: int
    intermediate_size: int
    """FFN channels; 0 where the family's FFN cannot be routed."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    activation: str
    ffn_cost: int
    """Multiply-adds per token of a whole FFN; of the experts that a token uses, and the choice of them."""

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

    def cost(self, kind: str) -> int:
        """Multiply-adds per token of all that can be skipped in a sub-layer: q and o, or the FFN."""
        if kind == "ffn":
            return self.ffn_cost if "ffn" in self.family.kinds else 0
        linears = 1 if self.family.whole_q else 2
        return linears * self.num_attention_heads * self.head_dim * self.hidden_size

    def whole_cost(self) -> int:
        """Multiply-adds per token of a layer's weights, skipped or not: q, k, v, o and the FFN."""
        heads = self.num_attention_heads + self.num_key_value_heads
        return 2 * heads * self.head_dim * self.hidden_size + self.ffn_cost

    def fused_heads(self) -> list[int] | None:
        """What each block of `head_dim` rows of a fused q, k, v makes: the query head of that number, or -1 for k and
        v. None where q has a linear of its own."""
        first = self.layers[0]
        if first.q_proj is not first.k_proj:
            return None
        blocks = self.num_key_value_heads if self.family.interleaved else 1
        queries, others = self.num_attention_heads // blocks, 2 * self.num_key_value_heads // blocks
        heads = range(self.num_attention_heads)
        return [h for b in range(blocks) for h in (*heads[b * queries : (b + 1) * queries], *[-1] * others)]


def _get(root: Any, path: str | None) -> Any:
    """The attribute at a path; `root` itself for None; None where there is none."""
    for name in path.split(".") if path is not None else ():
        root = getattr(root, name, None)
        if root is None:
            return None
    return root


def _missing(model: Any, family: Family) -> list[str]:
    """Attribute paths that `family` names and `model` lacks (looked up in the first layer)."""
    layers = _get(model, family.layers)
    if layers is None or len(layers) == 0:
        return [family.layers]
    in_attention = (family.q_proj, family.k_proj, family.v_proj, family.o_proj, family.q_norm, family.k_norm)
    in_mlp = (family.gate_proj, family.up_proj, family.down_proj) if "ffn" in family.kinds else ()
    missing = [p for p in (family.attention_norm, family.ffn_norm) if p is not None and _get(layers[0], p) is None]
    for parent, names in ((family.attention, in_attention), (family.mlp, in_mlp)):
        module, prefix = _get(layers[0], parent), "" if parent is None else f"{parent}."
        if module is None:
            missing.append(str(parent))
        else:
            missing += [f"{prefix}{name}" for name in names if name is not None and _get(module, name) is None]
    return [f"{family.layers}.0.{path}" for path in dict.fromkeys(missing)]


def locate(model: Any, family: Family | None = None) -> Layout:
    """Find the routable modules of a transformers causal LM; nothing is changed.

    `family` overrides the description found by `model.config.model_type`. Raises UnsupportedModelError, naming the
    attributes that are missing, when the model does not have the structure its description promises.
    """
    if hasattr(model, "_widellm_static"):
        raise UnsupportedModelError(
            "this model is of the static form, which is not routed again: use what it was made of"
        )
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
    first, routed_ffn = layers[0], "ffn" in family.kinds
    hidden, q_rows = _sizes(first.q_proj)
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(first.attention, "head_dim", 0)) or hidden // heads
    if first.q_proj is first.k_proj:
        kv_heads = (q_rows // head_dim - heads) // 2
    else:
        heads, kv_heads = q_rows // head_dim, _sizes(first.k_proj)[1] // head_dim
    named = getattr(config, family.activation, None)
    activation = ACTIVATIONS.get(str(named), "")
    if routed_ffn and not activation:
        raise UnsupportedModelError(f"activation {named!r} is not supported; known: {', '.join(sorted(ACTIVATIONS))}")
    channels = _channels(first) if routed_ffn else 0
    for index, modules in enumerate(layers):
        sizes = (_sizes(modules.q_proj)[1], _channels(modules) if routed_ffn else 0)
        if sizes != (q_rows, channels):
            raise UnsupportedModelError(
                f"layer {index} has q and up sizes {sizes}, unlike layer 0: mixed widths are not supported"
            )
    return Layout(
        model_type=model_type,
        family=family,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=channels,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        activation=activation,
        ffn_cost=(2 if first.gate_proj is None else 3) * channels * hidden
        if routed_ffn
        else _experts(first.mlp, config),
    )


def _layer_modules(layer: Any, family: Family) -> LayerModules:
    attention, ffn = _get(layer, family.attention), _get(layer, family.mlp)
    in_ffn = ffn if "ffn" in family.kinds else None
    before = getattr(layer, "do_layer_norm_before", True)  # OPT's smallest norm afterwards
    return LayerModules(
        layer=layer,
        attention=attention,
        mlp=None if family.mlp is None else ffn,
        q_proj=_get(attention, family.q_proj),
        k_proj=_get(attention, family.k_proj),
        v_proj=_get(attention, family.v_proj),
        o_proj=_get(attention, family.o_proj),
        gate_proj=None if family.gate_proj is None else _get(in_ffn, family.gate_proj),
        up_proj=_get(in_ffn, family.up_proj),
        down_proj=_get(in_ffn, family.down_proj),
        attention_norm=None if family.attention_norm is None or not before else _get(layer, family.attention_norm),
        ffn_norm=None if family.ffn_norm is None or not before else _get(layer, family.ffn_norm),
    )


def _sizes(linear: Any) -> tuple[int, int]:
    """(inputs, outputs) of a linear: GPT-2's Conv1D names them differently."""
    if hasattr(linear, "in_features"):
        return int(linear.in_features), int(linear.out_features)
    return int(linear.nx), int(linear.nf)


def _channels(modules: LayerModules) -> int:
    rows = _sizes(modules.up_proj)[1]
    return rows // 2 if modules.gate_proj is modules.up_proj else rows


def _experts(mlp: Any, config: Any) -> int:
    """Multiply-adds per token of an FFN of experts: of stacked weights [experts, ...], those that a token uses."""
    used = int(getattr(config, "num_experts_per_tok", 1))
    weights = [p for p in mlp.parameters() if p.ndim > 1]
    return sum(p.numel() * used // p.shape[0] if p.ndim == 3 else p.numel() for p in weights)

"""What each layer of a routed model would use on this machine, and why."""

from __future__ import annotations

from typing import Any

import torch

from widellm.config import KINDS
from widellm.kernels import cpu, dispatch
from widellm.kernels.cost_table import OpShape
from widellm.modeling.attach import Width, width_of
from widellm.modeling.linears import int8, is_input_major
from widellm.modeling.routed_attention import ATTENTION_NAME
from widellm.modeling.routed_layer import RoutedLayer, bind, maps_of, obstacle
from widellm.modeling.swap import is_routed, special_weight

ROWS = (1, 8, 512)


def op_shapes(model: Any) -> list[OpShape]:
    """The ops of an attached model, one of each shape: what `dispatch.tune` measures for it."""
    return list(
        dict.fromkeys(shape for layer in range(len(width_of(model).layout.layers)) for shape in _ops(model, layer))
    )


def _ops(model: Any, layer: int) -> list[OpShape]:
    width = width_of(model)
    modules, layout = width.layout.layers[layer], width.layout
    hidden, channels, dtype = layout.hidden_size, layout.intermediate_size, modules.o_proj.weight.dtype
    heads = layout.num_attention_heads * layout.head_dim
    ops = []
    for sub in width.sublayers:
        if sub.layer_index != layer:
            continue
        if sub.kind == "attention":
            groups, rows = (
                (sub.groups, heads) if sub.blocks is None else (len(sub.blocks), len(sub.blocks) * layout.head_dim)
            )
            if sub.skips_in:
                ops.append(OpShape("routed_in", hidden, rows, groups, dtype))
            ops.append(OpShape("routed_out", hidden, heads, sub.groups, dtype, is_input_major(modules.o_proj)))
            continue
        input_major, gated = is_input_major(modules.down_proj), modules.gate_proj is not None
        if modules.mlp is None:
            ops.append(OpShape("routed_in", hidden, channels, sub.groups, dtype))
            ops.append(OpShape("routed_out", hidden, channels, sub.groups, dtype, input_major))
        else:
            ops.append(OpShape("routed_ffn", hidden, channels, sub.groups, dtype, input_major, gated))
    return ops


def explain(model: Any, budget: float = 0.5) -> dict[str, Any]:
    """{"budget", "table", "layers": [{"layer", "decode", "ops": {op: {rows: [backend, why]}}}]} of an attached model.

    budget: taken as each layer's density, since what a layer keeps depends on the text. Ops are for calls that the
    whole-layer decode does not take (more rows, or a layer that cannot be bound). Nothing is run or changed.
    """
    width = width_of(model)
    path, why = dispatch.table_state()
    layers = []
    for index in range(len(width.layout.layers)):
        backend, dtype = width.sublayers[0].backend, width.layout.layers[index].o_proj.weight.dtype
        special = special_weight(width.layout.layers[index].o_proj)
        kind, in_int8 = _device(width, index), _is_int8(width, index)
        on_cpu = cpu.availability()[0] and dtype in cpu.NATIVE_TYPES and kind == "cpu"
        native = on_cpu and special is None
        ops: dict[str, dict[str, list[str]]] = {}
        for shape in _ops(model, index):
            ops[shape.op] = {}
            for rows in ROWS:
                if in_int8 and cpu.availability()[0] and backend in ("auto", "cpu"):
                    decided = ("cpu", "rule: int8 weights are read natively, below budget 1")
                elif special is not None:
                    decided = ("whole", f"the weight is an {special}: its own library multiplies all, then we drop")
                elif backend != "auto":
                    decided = (backend, "asked for by name")
                elif kind == "cuda":
                    decided = dispatch.choose_on_gpu(shape.op, rows, shape.width // shape.groups)
                else:
                    sizes = (shape.op, shape.read, shape.width, shape.groups, dtype, rows)
                    dense = budget >= 1.0 and native
                    decided = (
                        dispatch.decide_dense(*sizes, shape.input_major)
                        if dense
                        else dispatch.decide(*sizes, budget, native)
                    )
                ops[shape.op][str(rows)] = list(decided)
        attention = ["cpu", "rule: skips dropped heads"] if on_cpu else ["masked", "no native kernels for this layer"]
        if kind == "cuda":
            name, why_not = dispatch.choose_on_gpu("routed_attention", 1, 1)
            keys = f"rule, not measured: over {dispatch.TRITON_MIN_KEYS} keys or more, else dense"
            attention = [name, keys if name == "triton" else why_not]
        if model.config._attn_implementation != ATTENTION_NAME:
            attention = ["masked", f"attention is transformers' {model.config._attn_implementation}: all heads run"]
        ops["routed_attention"] = {str(rows): attention for rows in ROWS}
        layers.append({"layer": index, "decode": list(decode_form(width, index)), "ops": ops})
    return {"budget": budget, "table": f"{path}" if not why else f"none ({why}): rules decide", "layers": layers}


def _device(width: Width, index: int) -> str:
    return str(width.layout.layers[index].o_proj.weight.device.type)


def _is_int8(width: Width, index: int) -> bool:
    return all(int8(module) is not None for module in maps_of(width.layout.layers[index]))


def decode_form(width: Width, index: int) -> tuple[str, str]:
    """("native layer" or "ops", why): whether a few rows run through this layer natively."""
    modules, layout = width.layout.layers[index], width.layout
    in_int8 = _is_int8(width, index)
    if special_weight(modules.o_proj) is not None and not in_int8:
        return "ops", obstacle(modules) or "its weights are quantised"
    available, reason = cpu.availability()
    if not available:
        return "ops", reason
    if not layout.family.plain_block:
        return "ops", f"family {layout.model_type}'s block is not one that the native layer computes"
    if not is_routed(modules.layer, RoutedLayer):
        if width.config.kinds != KINDS:
            return "ops", "the native layer has attention and FFN routed, not one of them"
        return "ops", "the native backend was missing when routers were attached"
    weight = modules.o_proj.weight
    if weight.device.type != "cpu" or weight.dtype not in cpu.NATIVE_TYPES:
        return "ops", f"weights are {weight.dtype} on {weight.device}; the native layer is float32 or bfloat16 on cpu"
    reason_not = obstacle(modules)
    if reason_not is not None:
        return "ops", reason_not
    try:
        fused = bind(modules, layout)
    except ValueError as error:
        return "ops", str(error)
    if fused is None:
        return "ops", "the layout of its weights has no native form"
    most = f"{fused.max_rows} rows{' of activations on int8 weights' if in_int8 else ''}"
    if torch.equal(width.permutations[index], torch.arange(layout.intermediate_size)):
        return "native layer", f"up to {most}, below budget 1 (its channels keep the base model's order)"
    return "native layer", f"up to {most}"

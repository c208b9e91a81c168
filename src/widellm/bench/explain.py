"""What each layer of a routed model would use on this machine, and why."""

from __future__ import annotations

from typing import Any

import torch

from widellm.kernels import cpu, dispatch
from widellm.kernels.cost_table import OpShape
from widellm.modeling.attach import Width, width_of
from widellm.modeling.routed_layer import RoutedLayer, bind, obstacle
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
    attention, ffn = width.sublayers[2 * layer], width.sublayers[2 * layer + 1]
    down, o = modules.down_proj.weight, modules.o_proj.weight
    heads = layout.num_attention_heads * layout.head_dim
    hidden, dtype, gated = layout.hidden_size, down.dtype, modules.gate_proj is not None
    return [
        OpShape("routed_in", hidden, heads, attention.groups, dtype),
        OpShape("routed_out", hidden, heads, attention.groups, dtype, o.stride(0) == 1),
        OpShape("routed_ffn", hidden, layout.intermediate_size, ffn.groups, dtype, down.stride(0) == 1, gated),
    ]


def explain(model: Any, budget: float = 0.5) -> dict[str, Any]:
    """{"budget", "table", "layers": [{"layer", "decode", "ops": {op: {rows: [backend, why]}}}]} of an attached model.

    budget: taken as each layer's density, since what a layer keeps depends on the text. Ops are for calls that the
    whole-layer decode does not take (more rows, or a layer that cannot be bound). Nothing is run or changed.
    """
    width = width_of(model)
    path, why = dispatch.table_state()
    layers = []
    for index in range(len(width.layout.layers)):
        sub, dtype = width.sublayers[2 * index], width.layout.layers[index].down_proj.weight.dtype
        special = special_weight(width.layout.layers[index].down_proj)
        on_cpu = cpu.availability()[0] and dtype in cpu.NATIVE_TYPES and _on_cpu(width, index)
        native = on_cpu and special is None
        ops: dict[str, dict[str, list[str]]] = {}
        for shape in _ops(model, index):
            ops[shape.op] = {}
            for rows in ROWS:
                if special is not None:
                    decided = ("whole", f"the weight is an {special}: its own library multiplies all, then we drop")
                elif sub.backend != "auto":
                    decided = (sub.backend, "asked for by name")
                else:
                    decided = dispatch.decide(
                        shape.op, shape.read, shape.width, shape.groups, dtype, rows, budget, native
                    )
                ops[shape.op][str(rows)] = list(decided)
        attention = ["cpu", "rule: skips dropped heads"] if on_cpu else ["masked", "no native kernels for this layer"]
        ops["routed_attention"] = {str(rows): attention for rows in ROWS}
        layers.append({"layer": index, "decode": list(decode_form(width, index)), "ops": ops})
    return {"budget": budget, "table": f"{path}" if not why else f"none ({why}): rules decide", "layers": layers}


def _on_cpu(width: Width, index: int) -> bool:
    return bool(width.layout.layers[index].down_proj.weight.device.type == "cpu")


def decode_form(width: Width, index: int) -> tuple[str, str]:
    """("native layer" or "ops", why): whether a few rows run through this layer as two native calls."""
    modules, layout = width.layout.layers[index], width.layout
    available, reason = cpu.availability()
    if not available:
        return "ops", reason
    if not layout.family.plain_block:
        return "ops", f"family {layout.model_type}'s block is not one that the native layer computes"
    if not is_routed(modules.layer, RoutedLayer):
        return "ops", "the native backend was missing when routers were attached"
    weight = modules.down_proj.weight
    if special_weight(modules.down_proj) is not None:
        return "ops", obstacle(modules) or "its weights are quantised"
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
    most = fused.max_rows
    if torch.equal(width.permutations[index], torch.arange(layout.intermediate_size)):
        return "native layer", f"up to {most} rows, below budget 1 (its channels keep the base model's order)"
    return "native layer", f"up to {most} rows"

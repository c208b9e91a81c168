"""Random routers and an independent oracle, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from widellm.config import WidthConfig
from widellm.families import locate
from widellm.modeling.attach import Width, attach, set_budget, set_dial
from widellm.routing.budget import Dial

WAYS: dict[str, dict[str, Any]] = {
    "normed": {},
    "residual": {"router_input": "residual"},
    "one-decision": {"decision": "layer", "head_group_size": 4, "ffn_group_size": 48},
    "layer-skip": {"router_input": "residual", "decision": "layer", "head_group_size": 4, "ffn_group_size": 48},
}
"""What routers of a tiny model can read and decide: settings of `route`."""


def route(
    model: Any,
    head_group_size: int = 1,
    ffn_group_size: int = 8,
    regroup: bool = True,
    seed: int = 0,
    router_input: str = "normed",
    decision: str = "sublayer",
) -> Width:
    """Attach random routers whose logits scatter around 0, with a dial that keeps about half at budget 0.5."""
    generator = torch.Generator().manual_seed(seed)
    layout = locate(model)
    layers, channels = len(layout.layers), layout.intermediate_size
    permutations = None
    if regroup:
        permutations = torch.stack([torch.randperm(channels, generator=generator) for _ in range(layers)])
    config = WidthConfig(
        layout.model_type,
        layers,
        head_group_size,
        ffn_group_size,
        router_rank=4,
        kinds=layout.family.kinds,
        router_input=router_input,
        decision=decision,
    )
    width = attach(model, config, permutations)
    for sub in width.sublayers:
        router = width.router(sub)
        with torch.no_grad():
            router.down.copy_(torch.randn(router.down.shape, generator=generator) * 0.5)
            router.up.copy_(torch.randn(router.up.shape, generator=generator))
            router.bias.copy_(torch.randn(router.bias.shape, generator=generator) * 0.1)
    thresholds = torch.tensor([[3.0, 0.0, -3.0]]).repeat(len(width.sublayers), 1)
    set_dial(model, Dial(torch.tensor([0.2, 0.5, 0.99], dtype=torch.float64), thresholds))
    set_budget(model, 0.5)
    return width


def oracle_logits(dense: Any, width: Width, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits of `dense` (the unpermuted model) when each token's dropped heads and channels are zeroed, and the masks.

    Written with hooks on an untouched model and a loop over rows and groups: nothing of the routed modules is used
    but the routers' own weights.
    """
    keeps: list[Tensor] = []
    handles = []
    stream: dict[tuple[int, str], Tensor] = {}
    first_of: dict[int, list[Tensor]] = {}

    def zero(state: Any, order: Tensor | None, layer: int) -> None:
        modules = locate(dense).layers[layer]
        last = modules.o_proj if state.kind == "attention" else modules.down_proj
        decided: list[Tensor] = []
        leads = first_of.setdefault(layer, decided)

        def see(module: Any, args: Any) -> None:
            stream[layer, state.kind] = args[0]

        def decide(module: Any, args: Any) -> None:
            if width.config.decision == "layer" and leads is not decided:
                decided.append(leads[-1])
                keeps.append(keeps[-1])
                return
            router, x = width.router(state), stream.get((layer, state.kind), args[0])
            rows = [router.up @ (router.down @ row.float()) + router.bias for row in x.reshape(-1, x.shape[-1])]
            decided.append(torch.stack(rows) > state.threshold)
            keeps.append(decided[-1].view(*ids.shape, state.groups))

        def drop(module: Any, args: Any) -> Any:
            h = args[0].clone().reshape(-1, args[0].shape[-1])
            size = h.shape[-1] // state.groups
            columns = torch.arange(h.shape[-1]) if order is None else order
            for row, group in (~decided[-1]).nonzero().tolist():
                h[row, columns[group * size : (group + 1) * size]] = 0
            return (h.view(args[0].shape),)

        if width.config.router_input == "residual":
            norm = modules.attention_norm if state.kind == "attention" else modules.ffn_norm
            handles.append(norm.register_forward_pre_hook(see))
        handles.append(modules.entrance(state.kind).register_forward_pre_hook(decide))
        handles.append(last.register_forward_pre_hook(drop))

    for sub in width.sublayers:
        zero(sub, width.permutations[sub.layer_index] if sub.kind == "ffn" else None, sub.layer_index)
    try:
        with torch.no_grad():
            logits = dense(ids).logits
    finally:
        for handle in handles:
            handle.remove()
    # a parallel block may run its sub-layers in either order; these ran attention first, as the sub-layers are listed
    return logits, keeps

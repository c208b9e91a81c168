"""Random routers and an independent oracle, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from widellm.config import WidthConfig
from widellm.modeling.attach import Width, attach, set_budget, set_dial
from widellm.routing.budget import Dial


def route(model: Any, head_group_size: int = 1, ffn_group_size: int = 8, regroup: bool = True, seed: int = 0) -> Width:
    """Attach random routers whose logits scatter around 0, with a dial that keeps about half at budget 0.5."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    layers, channels = config.num_hidden_layers, config.intermediate_size
    permutations = None
    if regroup:
        permutations = torch.stack([torch.randperm(channels, generator=generator) for _ in range(layers)])
    width = attach(
        model,
        WidthConfig(config.model_type, layers, head_group_size, ffn_group_size, router_rank=4),
        permutations,
    )
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

    def decide(sub: Any, x: Tensor) -> Tensor:
        router = width.router(sub)
        keep = torch.zeros(*x.shape[:2], sub.groups, dtype=torch.bool)
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                logits = router.up @ (router.down @ x[b, t].float()) + router.bias
                keep[b, t] = logits > sub.threshold
        keeps.append(keep)
        return keep

    for index, layer in enumerate(dense.model.layers):
        attention, ffn = width.sublayers[2 * index], width.sublayers[2 * index + 1]
        order = width.permutations[index]

        def note_attention(module: Any, args: Any, state: Any = attention) -> None:
            state.test_keep = decide(state, args[0])

        def zero_heads(module: Any, args: Any, state: Any = attention) -> Any:
            h = args[0].clone()
            size = h.shape[-1] // state.groups
            for b, t, g in (~state.test_keep).nonzero().tolist():
                h[b, t, g * size : (g + 1) * size] = 0
            return (h,)

        def note_ffn(module: Any, args: Any, state: Any = ffn) -> None:
            state.test_keep = decide(state, args[0])

        def zero_channels(module: Any, args: Any, state: Any = ffn, order: Tensor = order) -> Any:
            h = args[0].clone()
            for b, t, g in (~state.test_keep).nonzero().tolist():
                h[b, t, order[g * state.group_size : (g + 1) * state.group_size]] = 0
            return (h,)

        handles.append(layer.self_attn.q_proj.register_forward_pre_hook(note_attention))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(zero_heads))
        handles.append(layer.mlp.register_forward_pre_hook(note_ffn))
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(zero_channels))
    try:
        with torch.no_grad():
            logits = dense(ids).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits, keeps

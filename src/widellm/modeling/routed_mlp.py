"""A routed FFN: the model's own MLP, computing only the channel groups that each token's router keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from widellm.families import LayerModules
from widellm.kernels import int8, masked, registry
from widellm.kernels.reference import activate
from widellm.modeling import linears
from widellm.modeling.decide import decide, decide_softly, weigh
from widellm.modeling.linears import is_int8_linear, is_plain_linear, matrix, readable
from widellm.modeling.swap import live
from widellm.routing.router import Router
from widellm.routing.state import SubLayer

__all__ = ["RoutedMLP", "channels", "is_plain_linear", "parts_of"]

Parts = tuple[Any, Any, Any, str]
"""(gate or None, up, down, activation). A gate that is up itself is fused with it: its rows come first."""


class RoutedMLP:
    """Behaviour put before the class of a model's MLP; see `swap`. x `[B, T, D]` -> `[B, T, D]`."""

    router: Router
    _width: SubLayer
    _parts: Parts

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sub = self._width
        gate, up, down = (live(self, part) for part in self._parts[:3])  # type: ignore[arg-type]
        parts = (gate, up, down, self._parts[3])
        plain = all(m is None or is_plain_linear(m) for m in (gate, up, down))
        rows = x.reshape(-1, x.shape[-1])
        if sub.threshold is None:
            sub.keep = sub.weights = sub.residual = None
            width = sub.groups * sub.group_size
            if not plain or not registry.native_when_dense("routed_ffn", rows, matrix(down), width, sub):
                return super().forward(x, *args, **kwargs)  # type: ignore[misc]
            keep = torch.ones(rows.shape[0], sub.groups, dtype=torch.bool)
        elif sub.gate is not None:
            return down(weigh(channels(x, parts), decide_softly(sub, self.router, x), sub.groups))
        else:
            keep = decide(sub, self.router, x)
        skips = not plain and all(m is None or is_int8_linear(m) for m in (gate, up, down))
        skips = skips and int8.takes(rows, sub.backend)
        if not plain and not skips:
            # more than a weight (an adapter, quantised): call it, then drop; nothing is skipped
            h = channels(x, parts)
            return down(masked.drop(h.reshape(-1, h.shape[-1]), keep).view(h.shape))
        w_gate, b_gate, w_up, b_up = _weights(gate, up)
        w_down: Any = readable(down)
        if skips:
            w_down = linears.by_inputs(down, w_down)
            return int8.routed_ffn(rows, w_gate, w_up, w_down, keep, parts[3], b_gate, b_up, down.bias).view(x.shape)
        y = registry.routed_ffn(rows, w_gate, w_up, w_down, keep, parts[3], b_gate, b_up, down.bias, sub.backend)
        return y.view(x.shape)


def channels(x: Tensor, parts: Parts) -> Tensor:
    """All FFN activations [..., F] of x [..., D]: what down multiplies when nothing is dropped."""
    gate, up, _, act = parts
    if gate is None:
        return activate(up(x), act)
    if gate is up:
        gated, plain = up(x).chunk(2, -1)
        return activate(gated, act) * plain
    return activate(gate(x), act) * up(x)


def _weights(gate: Any, up: Any) -> tuple[Any, Tensor | None, Any, Tensor | None]:
    """(gate's weight and bias, up's weight and bias): views of one weight where they are fused."""
    w_up, b_up = readable(up), up.bias
    if gate is None:
        return None, None, w_up, b_up
    if gate is not up:
        return readable(gate), gate.bias, w_up, b_up
    half = w_up.shape[0] // 2
    b_gate, b_up = (None, None) if b_up is None else (b_up[:half], b_up[half:])
    return w_up[:half], b_gate, w_up[half:], b_up


def parts_of(modules: LayerModules, activation: str) -> Parts:
    """What RoutedMLP needs of a layer, as a tuple so that torch does not register the modules a second time."""
    return (modules.gate_proj, modules.up_proj, modules.down_proj, activation)

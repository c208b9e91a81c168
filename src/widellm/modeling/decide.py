"""A sub-layer's decision in a forward: plain, or weighted while a gate trains it; and norms that let routers see."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from widellm.kernels import registry
from widellm.routing.router import Router
from widellm.routing.state import SubLayer


def decide(sub: SubLayer, router: Router, x: Tensor) -> Tensor:
    """Write `sub.keep` for the input x `[B, T, D]` and return it as bool `[B*T, G]`."""
    assert sub.threshold is not None
    if sub.follows is not None:
        assert sub.follows.keep is not None
        sub.keep = sub.follows.keep
        return sub.keep.reshape(-1, sub.groups)
    read = sub.router_input(x)
    lead = sub.lead or x.shape[:-1]
    keep = registry.decide(router, read.reshape(-1, read.shape[-1]), lead, sub)
    sub.keep = keep.view(*lead, sub.groups)
    return keep


def decide_softly(sub: SubLayer, router: Router, x: Tensor) -> Tensor:
    """Write `sub.weights` (with its graph) and `sub.keep` as the gate says, for x `[B, T, D]`; return the weights."""
    assert sub.gate is not None
    if sub.follows is not None:
        assert sub.follows.weights is not None
        sub.weights = sub.follows.weights
    else:
        logits = router(sub.router_input(x))
        sub.weights = sub.gate(sub, logits.view(*(sub.lead or x.shape[:-1]), sub.groups))
    sub.weighed = False
    sub.keep = sub.weights.detach() > 0.5
    return sub.weights


def weigh(h: Tensor, weights: Tensor, groups: int) -> Tensor:
    """Multiply each group of h `[..., N]` by its weight `[..., G]`, in h's dtype."""
    by_group = h.view(*h.shape[:-1], groups, h.shape[-1] // groups)
    return (by_group * weights.to(h.dtype).unsqueeze(-1)).view(h.shape)


class ResidualTap:
    """Behaviour of a norm whose sub-layer's router reads the stream before it. `[B, T, D]` -> `[B, T, D]`."""

    _width: SubLayer

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._width.residual = x
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]

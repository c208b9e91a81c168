"""What one routed sub-layer holds besides its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from widellm.routing.router import agreed


class Gate(Protocol):
    """How a decision is made while training: differentiable, everything computed, groups weighted by 1 or 0."""

    def __call__(self, sub: SubLayer, logits: Tensor) -> Tensor:
        """Logits float32 `[B, T, G]` -> weights of the same shape, 1 = computed, with a gradient to the logits."""


@dataclass
class SubLayer:
    """One routed attention or FFN. A forward writes `keep` (and `lead`); attach and the dial set the rest."""

    kind: str
    """"attention" or "ffn"."""
    layer_index: int
    groups: int
    group_size: int
    """Query heads or FFN channels per group."""
    group_cost: int
    """Multiply-adds that keeping one group of one token costs (weights of q and o, or of gate, up and down)."""
    threshold: float | None = None
    """A group is kept where its logit exceeds this; None: everything is kept and the router does not run."""
    backend: str = "auto"
    """Which kernels to use: a name of `kernels.registry.backends()`, or "auto"."""
    blocks: Tensor | None = None
    """int64 [H + 2K], of a fused q, k, v: the group that each head's rows belong to, or `groups`: always computed."""
    skips_in: bool = True
    """Whether the projection into the groups may leave out what is dropped."""
    lead: tuple[int, ...] | None = None
    """[B, T] where the sub-layer itself sees them flattened."""
    shared: bool = False
    """Whether the sequences of a batch agree on one set of groups per decoded token."""
    keep: Tensor | None = None
    """bool [B, T, G] of the last forward, True = computed; None after a dense one."""
    gate: Gate | None = None
    """Set while the model is trained: decides in the place of the plain threshold, and no kernel skips anything."""
    weights: Tensor | None = None
    """float32 [B, T, G] that `gate` gave in the last routed forward, with its graph; None without a gate."""
    weighed: bool = False
    """Whether those weights have been multiplied on in this forward, by the attention function."""
    residual: Tensor | None = None
    """[B, T, D] before the norm, from the norm to the router of one forward, where routers read that."""
    follows: SubLayer | None = None
    """The sub-layer whose decision this one takes over; its own router is not used then."""

    def router_input(self, x: Tensor) -> Tensor:
        """What the router reads: the residual where the model's norms hand it over (it is let go here), else x."""
        residual, self.residual = self.residual, None
        return x if residual is None else residual


def decide(logits: Tensor, lead: Sequence[int], sub: SubLayer) -> Tensor:
    """Which groups each row keeps: bool [M, G] from logits [M, G] of rows that are laid out as `lead`, `[B, T]`."""
    assert sub.threshold is not None
    if sub.shared and len(lead) == 2 and lead[0] > 1 and lead[1] == 1:
        return agreed(logits, sub.threshold)
    return logits > sub.threshold

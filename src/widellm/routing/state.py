"""What one routed sub-layer holds besides its weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Size, Tensor

from widellm.routing.router import agreed


@dataclass
class SubLayer:
    """One routed attention or FFN. A forward writes `keep` and nothing else; attach and the dial set the rest."""

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
    shared: bool = False
    """Whether the sequences of a batch agree on one set of groups per decoded token."""
    keep: Tensor | None = None
    """bool [B, T, G] of the last forward, True = computed; None after a dense one."""


def decide(logits: Tensor, shape: Size, sub: SubLayer) -> Tensor:
    """Which groups each row keeps: bool [M, G] from logits [M, G] of an input of this shape `[B, T, D]`."""
    assert sub.threshold is not None
    if sub.shared and len(shape) == 3 and shape[0] > 1 and shape[1] == 1:
        return agreed(logits, sub.threshold)
    return logits > sub.threshold

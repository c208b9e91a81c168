"""The decision while training: hard forward, smooth backward."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from widellm.routing.state import SubLayer

Key = tuple[int, str]
"""(layer index, "attention" or "ffn")."""


@dataclass
class StraightThroughGate:
    """weight = [m > 0] forward, sigmoid(m / tau) backward, with m = logit - threshold + shift + noise * logistic.

    The difference of two Gumbel variables is logistic, so that noise 1 is the straight-through Gumbel-softmax over two
    classes (Jang et al. 2017, arXiv 1611.01144) on the difference of their logits. The weight multiplies what every
    group computed: dropped groups pass a gradient to the router (what they would have added), kept ones to router and
    backbone.

    One gate serves all sub-layers. A forward changes nothing but `logits` and `slope`; the trainer sets the rest. The
    noise is a function of (seed, draw, sub-layer), so that a forward repeated by activation checkpointing decides alike
    and a resumed run needs no generator's state.
    """

    seed: int = 0
    temperature: float = 1.0
    """tau: how far from the threshold a logit still gets a gradient."""
    noise: float = 0.0
    """Scale of the logistic noise; 0 decides deterministically."""
    draw: int = 0
    """Number of the present batch: another one, other noise."""
    shift: Tensor | None = None
    """float32 [], added to every margin: its gradient says what a common shift of all logits would do."""
    logits: dict[Key, Tensor] = field(default_factory=dict)
    """Of the last forward, detached, without noise: float32 [B, T, G]."""
    slope: dict[Key, Tensor] = field(default_factory=dict)
    """Of the last forward: mean over tokens and groups of d weight / d logit, float32 []."""

    def __call__(self, sub: SubLayer, logits: Tensor) -> Tensor:
        """Logits float32 `[..., G]` -> weights of the same shape, exactly 0 or 1."""
        assert sub.threshold is not None
        key = (sub.layer_index, sub.kind)
        self.logits[key] = logits.detach()
        margin = logits - sub.threshold
        if self.shift is not None:
            margin = margin + self.shift
        if self.noise:
            margin = margin + self.noise * self._logistic(key, logits)
        soft = torch.sigmoid(margin / self.temperature)
        with torch.no_grad():
            self.slope[key] = (soft * (1 - soft)).mean() / self.temperature
        return (margin > 0).to(soft.dtype) + (soft - soft.detach())

    def _logistic(self, key: Key, like: Tensor) -> Tensor:
        generator = torch.Generator(like.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.draw} {key}".encode()))
        uniform = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)
        return torch.logit(uniform, eps=1e-6)

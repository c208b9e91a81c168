"""What can go wrong while training, seen as early as possible and said by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from widellm.modeling.attach import Width

RARE = 0.001
"""A group kept by fewer tokens than this is dead, one dropped by fewer is always on."""
FAR = 0.1
"""Distance between asked and spent share of work that is worth a warning."""


class Usage:
    """How often each group was kept, over the batches since `take`."""

    def __init__(self, width: Width) -> None:
        self.width = width
        self.kept = [torch.zeros(s.groups) for s in width.sublayers]
        self.tokens = 0
        self.off = 0.0
        self.batches = 0

    @torch.no_grad()
    def add(self, decisions: Sequence[Tensor], wanted: float) -> None:
        """Count a batch: each sub-layer's decisions, bool [B, T, G]; `wanted`: the share of work to be spent."""
        spent = cost = 0.0
        rows = decisions[0].shape[:-1].numel()
        for kept, sub, keep in zip(self.kept, self.width.sublayers, decisions, strict=True):
            part = keep.flatten(0, -2).float().sum(0).cpu()
            kept += part
            spent += float(part.sum()) / rows * sub.group_cost
            cost += sub.groups * sub.group_cost
        self.tokens += rows
        self.off += spent / max(cost, 1.0) - wanted
        self.batches += 1

    def take(self) -> dict[str, float]:
        """Figures of all that was counted, and start again. Empty when nothing was.

        density_KIND: kept over all groups; dead, always_on: shares of all groups; entropy: mean over groups of the
        entropy of being kept, in bits (0: never undecided); drift: spent minus wanted share of work.
        """
        if self.tokens == 0:
            return {}
        figures: dict[str, float] = {}
        rates = [k / self.tokens for k in self.kept]
        for kind in self.width.config.kinds:
            of_kind = torch.cat([r for r, s in zip(rates, self.width.sublayers, strict=True) if s.kind == kind])
            figures[f"density_{kind}"] = float(of_kind.mean())
        rate = torch.cat(rates).double()
        figures["dead"] = float((rate < RARE).double().mean())
        figures["always_on"] = float((rate > 1.0 - RARE).double().mean())
        p = rate.clamp(1e-9, 1.0 - 1e-9)
        figures["entropy"] = float(-(p * p.log2() + (1 - p) * (1 - p).log2()).mean())
        figures["drift"] = self.off / self.batches
        self.__init__(self.width)  # type: ignore[misc]
        return figures


def warnings_of(figures: dict[str, float]) -> list[str]:
    """What of `Usage.take`'s figures a user should know."""
    found = []
    if figures.get("dead", 0.0) > 0.5:
        found.append(f"{figures['dead']:.0%} of the groups are kept by no token: raise the budgets or lower the rate")
    if figures.get("always_on", 0.0) > 0.5:
        found.append(f"{figures['always_on']:.0%} of the groups are kept by every token: the routers choose little")
    drift = figures.get("drift", 0.0)
    if abs(drift) > FAR:
        more = "more" if drift > 0 else "less"
        found.append(f"the model spends {abs(drift):.2f} of the work {more} than asked: train longer")
    return found


@torch.no_grad()
def first_not_finite(model: Any, width: Width, ids: Tensor) -> str:
    """Run the batch int64 [B, T] again and name the first module of a layer whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            first = output if isinstance(output, Tensor) else output[0]
            if not found and not bool(torch.isfinite(first).all()):
                found.append(name)

        return note

    for sub in width.sublayers:
        router = width.router(sub)
        if not all(bool(torch.isfinite(p).all()) for p in router.parameters()):
            return f"the router of layer {sub.layer_index}'s {sub.kind}"
    with ExitStack() as hooks:
        for index, modules in enumerate(width.layout.layers):
            named = {"attention": modules.attention, "ffn": modules.mlp or modules.down_proj, "output": modules.layer}
            for name, module in named.items():
                hooks.callback(module.register_forward_hook(watch(f"layer {index}'s {name}")).remove)
        model(input_ids=ids, use_cache=False)
    return found[0] if found else "the output head or the loss"


def gradient_not_finite(model: nn.Module) -> str | None:
    """Name of the first parameter whose gradient is not finite; None when all are. One look for all of them."""
    named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    if not named:
        return None
    norm = torch.nn.utils.get_total_norm([g for _, g in named])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if bool(torch.isfinite(norm)):
        return None
    return next((n for n, g in named if not bool(torch.isfinite(g).all())), "all of them together")

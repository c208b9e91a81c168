"""From one shared threshold to the dial: what share of the work each threshold really spends, on the routed stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from widellm.errors import ConfigError
from widellm.modeling.attach import Width, width_of
from widellm.routing.budget import Dial
from widellm.routing.state import SubLayer

SETTINGS = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.83, 0.9, 0.95, 0.975, 0.99)
"""Shares that the dial's settings aim at; each is stored with the share that was really spent."""


def work_above(sublayers: Sequence[SubLayer], logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """All logits, descending, and the share of the routable work that lies at or above each, float64.

    logits: of each sub-layer in turn [n], over any tokens; a sub-layer's work is spread evenly over them.
    """
    work = [torch.full_like(v, s.groups * s.group_cost / v.numel()) for s, v in zip(sublayers, logits, strict=True)]
    value, order = torch.cat(list(logits)).sort(descending=True)
    share = torch.cat(work)[order].double().cumsum(0)
    return value, share / share[-1]


class Collector:
    """Logits of every router over some forwards, thinned to a sample that does not grow with the text."""

    def __init__(self, width: Width, per_sublayer: int = 20000) -> None:
        self.width = width
        self.limit = per_sublayer
        self.logits: list[list[Tensor]] = [[] for _ in width.sublayers]

    def _sorted(self) -> tuple[Tensor, Tensor]:
        """All logits, descending, and the share of the routable work that lies at or above each."""
        return work_above(self.width.sublayers, [torch.cat(seen) for seen in self.logits])

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Thresholds above which these shares of the routable work lie, by the logits that were seen."""
        value, share = self._sorted()
        index = torch.searchsorted(share, torch.tensor(shares, dtype=torch.float64)).clamp(max=value.numel() - 1)
        return [float(v) for v in value[index]]

    def shares(self, thresholds: Sequence[float]) -> list[float]:
        """Shares of the routable work above these thresholds, by the logits that were seen."""
        value, share = self._sorted()
        index = torch.searchsorted(-value, -torch.tensor(thresholds, dtype=value.dtype))  # how many are above
        return [0.0 if i == 0 else float(share[i - 1]) for i in index.tolist()]


@torch.inference_mode()
def router_logits(model: Any, windows: Tensor) -> Collector:
    """Run windows int64 [n, T] and collect every router's logits on the stream as it is (dense or routed)."""
    width = width_of(model)
    collector = Collector(width)

    def note(place: int, logits: Tensor) -> None:
        # Whole rows: a stride over single logits could fall in step with the groups and miss some of them. Not from the
        # first row on: the first token of a window is unlike any other, and would count as often as `step` of those.
        step = max(1, windows.numel() * logits.shape[-1] // collector.limit)
        collector.logits[place].append(logits.flatten(0, -2)[step // 2 :: step].flatten().cpu())

    with width.watch(note):
        for window in windows:
            model(window[None].to(model.device), use_cache=False, logits_to_keep=1)
    return collector


def set_threshold(model: Any, threshold: float | None) -> None:
    """One threshold for all sub-layers: logits are log(importance / cost), so that it is a price of work."""
    for sub in width_of(model).sublayers:
        sub.threshold = threshold
        sub.keep = None


@torch.inference_mode()
def spent(model: Any, windows: Tensor) -> float:
    """Share of routable work that the model spends on windows int64 [n, T] at its present thresholds."""
    counter = width_of(model).counter()
    for window in windows:
        model(window[None].to(model.device), use_cache=False, logits_to_keep=1)
        counter.add(None, (1, window.numel()))
    return 1.0 - counter.work(1.0).saved_routable


def measure_dial(model: Any, windows: Tensor, probes: Tensor, progress: Any) -> Dial:
    """Find the share of routable work that each setting's threshold spends; windows and probes int64 [n, T].

    Dropping work changes what later layers see, so a share differs from the quantile on the dense stream. Running every
    setting on much text would take long; so the quantiles come from `windows`, and `probes`, run at every setting,
    only say how far routed and dense streams differ at that threshold: on the same text that differs little.
    `progress` is called with (done, total). Thresholds are left at None (dense).
    """
    set_threshold(model, None)
    dense = router_logits(model, windows)
    thresholds = dense.quantiles(SETTINGS)
    on_probes = router_logits(model, probes).shares(thresholds)
    points: list[tuple[float, float]] = []
    for i, threshold in enumerate(thresholds):
        set_threshold(model, threshold)
        points.append((SETTINGS[i] + spent(model, probes) - on_probes[i], threshold))
        progress(i + 1, len(SETTINGS))
    set_threshold(model, None)
    # a setting that spends no more than a stingier one says nothing new
    kept = [points[0]]
    for share, threshold in points[1:]:
        if share > kept[-1][0] + 1e-4:
            kept.append((share, threshold))
    if len(kept) < 2:
        raise ConfigError("the routers cannot be told apart by any threshold: calibrate on more text")
    budgets = torch.tensor([share for share, _ in kept], dtype=torch.float64)
    row = torch.tensor([threshold for _, threshold in kept], dtype=torch.float32)
    return Dial(budgets, row.repeat(len(width_of(model).sublayers), 1))

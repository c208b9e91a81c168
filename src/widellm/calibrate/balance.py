"""One offset per sub-layer, found by what really happens to the model's predictions.

The fits judge every sub-layer by itself, near the dense model. Where half of everything is dropped, errors add up and
meet: some sub-layers matter more than their own curvature says. Sixty numbers (two a layer) correct that: a few steps
of descent on KL(dense || routed), through straight-through masks, with the budget held where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from widellm.calibrate.dial import Collector, set_threshold
from widellm.calibrate.stream import CHUNK, Sample, walk_back
from widellm.modeling.attach import Width
from widellm.modeling.linears import matrix

SAVED = 0.5
"""Share of routable work saved while balancing: the middle of the dial's useful range."""
STEP = 0.05
"""Largest step, in units of a logit (natural log of importance); it falls to 0 over the second half of the steps."""
MEAN_DECAY, SQUARE_DECAY = 0.9, 0.98
"""Adam's two decay rates."""
STEP_TOKENS, MOST_STEPS = 512, 12
"""More steps overshoot: the gradient is that of a soft mask, not of the real one."""


def balance(
    model: Any, width: Width, windows: Tensor, threshold: float, progress: Callable[[int, int], None]
) -> dict[int, float]:
    """Add an offset to the bias of every router; returns it by place in `width.sublayers`.

    windows int64 [n, T]: one step each. threshold: one that saves about SAVED. Thresholds are left at None (dense).
    """
    count = len(width.sublayers)
    offsets, mean, square = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
    place = {(s.layer_index, s.kind): i for i, s in enumerate(width.sublayers)}
    for step, window in enumerate(windows):
        set_threshold(model, None)
        target = _log_probabilities(model, window)
        set_threshold(model, threshold)
        pull = torch.zeros(count, dtype=torch.float64)
        weight = torch.zeros(count, dtype=torch.float64)
        seen = Collector(width)
        for samples in walk_back(model, width.layout, window, partial(_kl_gradient, target)):
            for sample in samples:
                i = place[sample.layer_index, sample.kind]
                logits = width.router(width.sublayers[i])(sample.x)
                seen.logits[i].append(logits.flatten().cpu())
                # derivative of a soft mask sigmoid(logit - threshold): how much of a group an offset would move
                soft = torch.sigmoid(logits - threshold)
                soft = soft * (1 - soft)
                pull[i] = float((_mask_gradient(width, sample, soft.shape[1]) * soft).sum())
                weight[i] = float(soft.sum()) * width.sublayers[i].group_cost
        # what shifting the common threshold would do is taken out: the budget stays put
        gradient = pull - pull.sum() / weight.sum() * weight
        mean = MEAN_DECAY * mean + (1.0 - MEAN_DECAY) * gradient
        square = SQUARE_DECAY * square + (1.0 - SQUARE_DECAY) * gradient * gradient
        direction = mean / (1 - MEAN_DECAY ** (step + 1))
        direction /= (square / (1 - SQUARE_DECAY ** (step + 1))).sqrt().clamp_min(1e-30)
        change = -STEP * min(1.0, 2.0 * (len(windows) - step) / len(windows)) * direction
        offsets += change
        with torch.no_grad():
            for i, sub in enumerate(width.sublayers):
                width.router(sub).bias.add_(float(change[i]))
        threshold = (threshold + seen.quantiles([1.0 - SAVED])[0]) / 2
        progress(step + 1, len(windows))
    set_threshold(model, None)
    return {i: float(o) for i, o in enumerate(offsets)}


@torch.inference_mode()
def _log_probabilities(model: Any, window: Tensor) -> Tensor:
    """The model's own prediction, [T, V] in its dtype."""
    logits = model(window[None].to(model.device), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1).to(logits.dtype)


def _kl_gradient(target: Tensor, logits: Tensor) -> Tensor:
    """Gradient of the summed KL(target || softmax(logits)) with respect to logits [T, V]."""
    out = torch.empty_like(logits)
    for start in range(0, logits.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        out[part] = (torch.softmax(logits[part].float(), -1) - target[part].float().exp()).to(out.dtype)
    return out


def _mask_gradient(width: Width, sample: Sample, groups: int) -> Tensor:
    """[T, G]: derivative of the loss with respect to a mask of 1s and 0s multiplied onto the groups."""
    modules = width.layout.layers[sample.layer_index]
    linear = modules.o_proj if sample.kind == "attention" else modules.down_proj
    back = sample.g @ matrix(linear).float()
    return (back * sample.h).view(sample.h.shape[0], groups, -1).sum(-1)

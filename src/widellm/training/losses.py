"""Losses: prediction against labels and against the dense model, work against its target, hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from widellm.config import KINDS
from widellm.routing.state import SubLayer

_CHUNK = 128
"""Rows of logits that exist at a time, in float32: 128 x vocabulary, three such arrays at most."""
IGNORED = -100
"""Label of a position that predicts nothing (torch's own)."""


class _HeadLoss(torch.autograd.Function):
    """Projection to the vocabulary and loss in one, by chunks of rows: no [N, V] array, neither now nor for backward.

    The gradient of the loss is linear in that of the logits, so it is found in the forward, while the chunk is there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor | None,
        labels: Tensor | None,
        label_share: float,
        temperature: float,
        divisor: float,
        cap: float | None,
    ) -> Tensor:
        wants_gradient = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(hidden) if wants_gradient else None
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = hidden.shape[0]
        counted = 0 if labels is None else int((labels != IGNORED).sum())
        for start in range(0, rows, _CHUNK):
            part = slice(start, min(start + _CHUNK, rows))
            logits, bend = _finished(nn.functional.linear(hidden[part], weight, bias).float(), divisor, cap)
            slope = None
            if target is not None and label_share < 1.0:
                scale = (1.0 - label_share) / rows
                dense, _ = _finished(nn.functional.linear(target[part], weight, bias).float(), divisor, cap)
                # the arrays are large and few passes over them are the point: no division by 1, no log_softmax
                routed = logits if temperature == 1.0 else logits / temperature
                dense = dense if temperature == 1.0 else dense.div_(temperature)
                q, p = torch.softmax(routed, -1), torch.softmax(dense, -1)
                kl = _log_sum(routed, q) - _log_sum(dense, p)
                kl += torch.linalg.vecdot(p, dense.sub_(routed))
                total += scale * temperature**2 * kl.sum()
                if wants_gradient:
                    slope = q.sub_(p).mul_(scale * temperature)
            if labels is not None and counted and label_share > 0.0:
                known = labels[part] != IGNORED
                label = labels[part].clamp_min(0)[:, None]
                log_q = torch.log_softmax(logits, -1)
                scale = label_share / counted
                total -= scale * (log_q.gather(1, label)[:, 0] * known).sum()
                if wants_gradient:
                    q = log_q.exp_().scatter_add_(1, label, torch.full_like(label, -1.0, dtype=torch.float32))
                    q.mul_(scale * known[:, None])
                    slope = q if slope is None else slope.add_(q)
            if gradient is not None and slope is not None:
                slope = slope if bend is None else slope.mul_(bend)
                slope = slope if divisor == 1.0 else slope.div_(divisor)
                gradient[part] = slope.to(weight.dtype) @ weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad.to(gradient.dtype), *[None] * 8)


def _finished(logits: Tensor, divisor: float, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """(what the model makes of its head's float32 output, the derivative of the cap or None), in place."""
    logits = logits if divisor == 1.0 else logits.div_(divisor)
    if cap is None:
        return logits, None
    bent = logits.div_(cap).tanh_()
    return bent * cap, 1.0 - bent.square()


def _log_sum(logits: Tensor, softmax: Tensor) -> Tensor:
    """log sum exp of each row, read off at its largest logit, whose probability is never tiny."""
    largest, place = logits.max(-1, keepdim=True)
    return (largest - softmax.gather(-1, place).log())[..., 0]


def head_loss(
    hidden: Tensor,
    head: Any,
    target: Tensor | None = None,
    labels: Tensor | None = None,
    label_share: float = 0.0,
    temperature: float = 1.0,
    divisor: float = 1.0,
    cap: float | None = None,
) -> Tensor:
    """Mean over rows of (1 - label_share) * T^2 KL(softmax(dense / T) || softmax(routed / T)) + label_share * NLL.

    hidden [N, D]: what the frozen `head` (a linear with `weight` [V, D]) projects; target [N, D]: the same of the dense
    model, needed where label_share < 1; labels int64 [N], IGNORED where there is none. Logits are what the head gives
    over `divisor`, then squeezed into +-`cap` by tanh (None: not), see `after_head`. float32 [], in nats; the gradient
    goes to `hidden` alone. T^2 keeps the gradient's size (Hinton et al. 2015, arXiv 1503.02531).
    """
    weight, bias = (None if w is None else _whole(w.detach()) for w in (head.weight, head.bias))
    loss: Tensor = _HeadLoss.apply(hidden, weight, bias, target, labels, label_share, temperature, divisor, cap)
    return loss


def after_head(config: Any) -> tuple[float, float | None]:
    """(divisor, cap) that a model puts between its head and its logits: Granite's scaling, Gemma 2's soft cap."""
    return float(getattr(config, "logits_scaling", None) or 1.0), getattr(config, "final_logit_softcapping", None)


def _whole(weight: Tensor) -> Tensor:
    """A weight that FSDP has sharded, gathered."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@contextmanager
def head_input(model: Any) -> Iterator[list[Tensor]]:
    """Inside the block, each forward appends what the output head receives, [B, T, D]; the head projects one row."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0])
        return (args[0][:, :1], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def layer_outputs(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Inside the block, a forward appends what each of `layers` gives, [B, T, D]."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output if isinstance(output, Tensor) else output[0])

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def feature_loss(routed: Sequence[Tensor], dense: Sequence[Tensor]) -> Tensor:
    """Mean over layers and tokens of |routed - dense|^2 / |dense|^2, both [B, T, D] per layer.

    Relative to each token: a few tokens have norms a thousand times the others'.
    """
    terms = []
    for r, d in zip(routed, dense, strict=True):
        d = d.float()
        terms.append(((r.float() - d).square().sum(-1) / d.square().sum(-1).clamp_min(1e-6)).mean())
    return torch.stack(terms).mean()


def spent_share(sublayers: Sequence[SubLayer]) -> Tensor:
    """Share of routable work that the last training forward kept, float32 [], with a gradient to the gates."""
    weights = [(s, s.weights) for s in sublayers]
    kept = sum(s.groups * s.group_cost * w.mean() for s, w in weights if w is not None)
    assert isinstance(kept, Tensor)
    return kept / sum(s.groups * s.group_cost for s in sublayers)


Target = float | tuple[float, float]
"""Share to be skipped: one of both kinds together, or one of attention and one of FFN."""


def skip_penalty(sublayers: Sequence[SubLayer], target: Target, unit: str = "groups") -> Tensor:
    """|target - share skipped| of the last training forward, float32 [], with a gradient to the gates.

    unit "groups": mean over layers and kinds of the rate of skipped groups, as published; "work": share of
    multiply-adds saved. Two targets: the mean of one distance each.
    """
    if isinstance(target, tuple):
        of_kind = [([s for s in sublayers if s.kind == k], t) for k, t in zip(KINDS, target, strict=True)]
        parts = [(found, wanted) for found, wanted in of_kind if found]
    else:
        parts = [(list(sublayers), target)]
    distances = []
    for part, wanted in parts:
        if unit == "work":
            skipped = 1.0 - spent_share(part)
        else:
            skipped = torch.stack([1.0 - s.weights.mean() for s in part if s.weights is not None]).mean()
        distances.append((wanted - skipped).abs())
    return torch.stack(distances).mean()


def wanted_share(sublayers: Sequence[SubLayer], target: Target) -> float:
    """Share of the routable work that a target leaves, were every group skipped as often as the others of its kind."""
    by_kind = dict(zip(KINDS, target if isinstance(target, tuple) else (target, target), strict=True))
    cost = sum(s.groups * s.group_cost for s in sublayers)
    return sum(s.groups * s.group_cost * (1.0 - by_kind[s.kind]) for s in sublayers) / cost

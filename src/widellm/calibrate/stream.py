"""Walk a model backwards, one layer's graph at a time, and hand out what each sub-layer saw and how much it mattered.

Memory: the hidden state before every layer for one window, the logits, and one layer's activations. The model's
parameters get no gradients and are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widellm.families import LayerModules, Layout
from widellm.modeling.routed_mlp import channels, parts_of
from widellm.routing.state import SubLayer

CHUNK = 128
"""Rows of logits turned into float32 probabilities at a time."""

LogitGradient = Callable[[Tensor], Tensor]
"""Logits [T, V] -> gradient of a loss with respect to them, same shape and dtype."""


@dataclass(frozen=True)
class Sample:
    """One sub-layer over the T tokens of a window, all float32."""

    layer_index: int
    kind: str
    x: Tensor
    """[T, D]: what the sub-layer (and its router) receives."""
    h: Tensor
    """[T, H*d] heads' outputs or [T, F] activations: what o or down multiplies, before anything is dropped."""
    g: Tensor
    """[T, D]: gradient of the loss with respect to the sub-layer's output."""


def sampled_label_gradient(generator: torch.Generator) -> LogitGradient:
    """Gradient of the summed negative log-likelihood of labels drawn from the model's own prediction.

    Its outer products average to the Fisher information, which is the Hessian of KL(model || changed model) at no
    change: what leaving something out costs, to second order.
    """

    def gradient(logits: Tensor) -> Tensor:
        out = torch.empty_like(logits)
        for start in range(0, logits.shape[0], CHUNK):
            p = torch.softmax(logits[start : start + CHUNK].float(), -1)
            # by the inverse of the distribution function: torch.multinomial draws a number per word of the vocabulary
            below = p.cumsum(-1)
            drawn = torch.rand(len(p), 1, generator=generator).to(p.device) * below[:, -1:]
            label = torch.searchsorted(below, drawn).clamp_max(p.shape[-1] - 1)
            p.scatter_add_(1, label, torch.full_like(p[:, :1], -1.0))
            out[start : start + CHUNK] = p.to(out.dtype)
        return out

    return gradient


def walk_back(
    model: Any, layout: Layout, window: Tensor, logit_gradient: LogitGradient, lowest: int = 0
) -> Iterator[list[Sample]]:
    """Yield the samples of each layer (attention, FFN, as far as its family can route them), from the last down to
    `lowest`, for one window int64 [T].

    The model runs at whatever thresholds it is set to; kernels are replaced by their differentiable form.
    """
    with _frozen(model):
        inputs, calls, top = _forward(model, layout, window)
        logits = top["logits"]
        grad = torch.autograd.grad(logits, top["hidden"], logit_gradient(logits[0].detach())[None])[0]
        del logits, top["logits"]
        for index in range(len(layout.layers) - 1, lowest - 1, -1):
            samples, grad = _layer_back(layout, index, inputs.pop(), calls.pop(), grad)
            yield samples


def _forward(model: Any, layout: Layout, window: Tensor) -> tuple[list[Tensor], list[Any], dict[str, Tensor]]:
    """Run the model; return every layer's input, how it was called, and the graph from the last layer's output on."""
    inputs: list[Tensor] = []
    calls: list[Any] = []
    top: dict[str, Tensor] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden, *rest = args if args else (kwargs["hidden_states"],)
        inputs.append(hidden.detach())
        calls.append((rest, {k: v for k, v in kwargs.items() if k != "hidden_states"}))

    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        # the graph starts here: nothing below needs one
        top["hidden"] = _tensor(output).detach().requires_grad_(True)
        return top["hidden"] if isinstance(output, Tensor) else (top["hidden"], *output[1:])

    with ExitStack() as hooks, torch.enable_grad():
        for modules in layout.layers:
            hooks.callback(modules.layer.register_forward_pre_hook(note, with_kwargs=True).remove)
        hooks.callback(layout.layers[-1].layer.register_forward_hook(cut).remove)
        top["logits"] = model(window[None].to(model.device), use_cache=False).logits
    return inputs, calls, top


def _layer_back(layout: Layout, index: int, hidden: Tensor, call: Any, grad: Tensor) -> tuple[list[Sample], Tensor]:
    """Run layer `index` again with a graph; return its samples and the gradient of its input."""
    modules = layout.layers[index]
    seen: dict[str, Tensor] = {}

    def before(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            seen[name] = args[0]

        return hook

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen[name] = _tensor(output)

        return hook

    def note_call(module: nn.Module, args: Any, kwargs: Any) -> None:
        attention_calls.append((args, kwargs))

    rest, kwargs = call
    attention_calls: list[tuple[Any, Any]] = []
    hidden = hidden.requires_grad_(True)
    with ExitStack() as hooks, torch.enable_grad():
        hooks.callback(modules.attention.register_forward_pre_hook(note_call, with_kwargs=True).remove)
        hooks.callback(modules.o_proj.register_forward_pre_hook(before("attention_h")).remove)
        for kind in layout.family.kinds:
            hooks.callback(modules.entrance(kind).register_forward_pre_hook(before(f"{kind}_x")).remove)
            hooks.callback(modules.exit(kind).register_forward_hook(after(f"{kind}_out")).remove)
        output = _tensor(modules.layer(hidden, *rest, **kwargs))
    wanted = [seen[f"{kind}_out"] for kind in layout.family.kinds]
    *gradients, g_hidden = torch.autograd.grad(output, (*wanted, hidden), grad)
    samples = []
    with torch.no_grad():
        for kind, g in zip(layout.family.kinds, gradients, strict=True):
            x = seen[f"{kind}_x"].detach()
            with _nothing_dropped(getattr(modules.entrance(kind), "_width", None)) as routed:
                if kind == "ffn":
                    h = channels(x, parts_of(modules, layout.activation))
                else:
                    h = _all_heads(modules, *attention_calls[0]) if routed else seen["attention_h"]
            samples.append(Sample(index, kind, _rows(x), _rows(h), _rows(g)))
    return samples, g_hidden


@contextmanager
def _nothing_dropped(sub: SubLayer | None) -> Iterator[bool]:
    """Inside the block this sub-layer is dense; says whether it is routed outside."""
    if sub is None or sub.threshold is None:
        yield False
        return
    threshold, keep = sub.threshold, sub.keep
    try:
        sub.threshold = None
        yield True
    finally:
        sub.threshold, sub.keep = threshold, keep


def _all_heads(modules: LayerModules, args: Any, kwargs: Any) -> Tensor:
    """What o would multiply if no head were dropped: dropped heads have no query, so the attention runs once more."""
    seen: list[Tensor] = []
    handle = modules.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        modules.attention(*args, **kwargs)
    finally:
        handle.remove()
    return seen[0]


def _rows(t: Tensor) -> Tensor:
    return t.detach().reshape(-1, t.shape[-1]).float()


def _tensor(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else output[0]
    assert isinstance(found, Tensor)
    return found


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter needs a gradient inside the block."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)

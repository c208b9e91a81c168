"""Native decode of several layers in one call, while transformers' loop still asks for one layer at a time.

The first layer of a run computes the later ones too, and leaves each its result with what it was computed from. A later
layer hands it out when it is called with exactly that (the very tensor, the same other arguments, a cache and
thresholds that are as they were); else it forgets it and computes for itself. Until then nothing shows: new keys and
values lie in the room behind the cache's tensors. So a wrong guess costs time, never a result, and a layer that is
mostly called otherwise is not guessed at again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.modules import module as torch_module

from widellm.kernels.fused_stack import FusedStack
from widellm.modeling.roomy_cache import Room, room_behind

_PATIENCE = 3
"""Guesses in a row that may be wrong."""


@dataclass(slots=True)
class Ahead:
    """A result, and the call that it answers."""

    x: Tensor
    kwargs: dict[str, Any]
    index: int
    room: Room
    setting: tuple[float | None, float | None, bool]
    out: Tensor
    keep: Tensor
    ffn_keep: Tensor

    def take(self, x: Tensor, args: Any, kwargs: dict[str, Any], setting: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """(out, keep, ffn_keep), and the cache layer is extended; None when this is another call."""
        if x is not self.x or args or setting != self.setting or len(kwargs) != len(self.kwargs):
            return None
        if not (x.is_inference() or x._version == 0):  # written to since
            return None
        if any(self.kwargs.get(name, self) is not value for name, value in kwargs.items()):
            return None
        layer, tokens = cache_in(kwargs).layers[self.index], x.shape[1]
        if not self.room.holds(layer, tokens):
            return None
        self.room.extend(layer, tokens)
        return self.out, self.keep, self.ffn_keep


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache that a layer is called with, or None."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def rotates(modules: Any, layout: Any) -> bool:
    """Whether a layer's heads are rotated by their position."""
    switch = layout.family.rope_switch
    return switch is None or bool(getattr(modules.attention, switch))


def followers(layer: Any, room: Room, x: Tensor, kwargs: dict[str, Any]) -> list[tuple[Any, Room]]:
    """The layers after `layer` that its call may compute too, each with the room behind its cache."""
    modules, layout, *_, binding = layer._native
    index, (batch, tokens, _) = modules.attention.layer_idx, x.shape
    if _watched(layer) or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return []
    if index >= len(layout.layers) or layout.layers[index].layer is not layer:
        return []
    cache, turns = cache_in(kwargs), rotates(modules, layout)
    found: list[tuple[Any, Room]] = []
    for after in layout.layers[index + 1 :]:
        native = getattr(after.layer, "_native", None)
        if native is None or _watched(after.layer) or not _wanted(native[-1]):
            break
        if rotates(after, layout) != turns or not after.layer._follows(x, kwargs):
            break
        behind = room_behind(cache, after.attention.layer_idx, batch, tokens)
        if behind is None or behind.form != room.form or behind.length != room.length:
            break
        if native[-1].fused.sizes != binding.fused.sizes:
            break
        found.append((after.layer, behind))
    return found


def stack_step(
    layer: Any, room: Room, others: list[tuple[Any, Room]], x: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `layer` and `others` on x; the others keep their results for their own calls. -> `layer`'s own."""
    modules, layout, *_, binding = layer._native
    fused = tuple(m._native[-1].ready(m._native[2], m._native[3]) for m in (layer, *(m for m, _ in others)))
    stack = binding.stack
    if stack is None or stack.layers != fused:
        stack = binding.stack = FusedStack(fused)
    rooms = [room, *(behind for _, behind in others)]
    cos, sin = kwargs["position_embeddings"] if rotates(modules, layout) else (None, None)
    k, v = ([r.buffers[i] for r in rooms] for i in (0, 1))
    keys = room.length + x.shape[1]
    results = stack.step(x, cos, sin, k, v, keys, mask=kwargs.get("attention_mask"))
    outs, keeps, ffn_keeps = (t.unbind(0) for t in results)
    for i, (other, behind) in enumerate(others, start=1):
        own, index = other._native[-1], other._native[0].attention.layer_idx
        own.ahead = Ahead(outs[i - 1], kwargs, index, behind, own.setting, outs[i], keeps[i], ffn_keeps[i])
    room.extend(cache_in(kwargs).layers[modules.attention.layer_idx], x.shape[1])
    return outs[0], keeps[0], ffn_keeps[0]


def _wanted(binding: Any) -> bool:
    """Whether a layer has mostly taken what was computed for it; what it never asked for counts as not taken."""
    if binding.ahead is not None:
        binding.ahead = None
        binding.misses += 1
    return bool(binding.misses < _PATIENCE)


def _watched(layer: Any) -> bool:
    """Whether something may see or change what goes into a layer or comes out of it, or replaces its forward."""
    hooked = layer._forward_pre_hooks or layer._forward_hooks
    return bool(hooked or "forward" in layer.__dict__ or layer._compiled_call_impl is not None)

"""Room at the end of transformers' DynamicCache, so that a decoded token does not copy the whole cache.

A DynamicLayer joins old and new keys into a fresh tensor at every token. Here its `keys` and `values` become views of
larger buffers, and a token is written behind them. Everything else that touches the cache (crop, beam search, copies)
sees ordinary tensors; whatever replaces them makes the next token start a new buffer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_SPARE = 64
"""Positions of room at least; a sixteenth of the length when that is more."""


class Room:
    """Buffers [B, K, capacity, d] behind a cache layer, and the views of them that it was last given.

    A shallow copy of the cache layer shares this object: after one of the two has moved on, the other's tensors are
    not the views named here, and it starts its own buffers.
    """

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        length = keys.shape[2]
        capacity = length + tokens + max(_SPARE, length // 16)
        self.buffers = tuple(t.new_empty(*t.shape[:2], capacity, t.shape[3]) for t in (keys, values))
        for buffer, t in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, :length].copy_(t)
        self.keys, self.values = keys, values
        self.length = length
        self.form = (self.buffers[0].shape, self.buffers[1].shape)

    def holds(self, layer: Any, tokens: int) -> bool:
        """Whether a cache layer's tensors are the views named here, with `tokens` unwritten positions behind them."""
        mine = self.keys is layer.keys and self.values is layer.values
        return mine and self.length + tokens <= self.form[0][2]

    def extend(self, layer: Any, tokens: int) -> tuple[Tensor, Tensor]:
        """Give a cache layer, whose tensors are the views named here, views with `tokens` positions more."""
        self.length += tokens
        self.keys, self.values = (buffer.narrow(2, 0, self.length) for buffer in self.buffers)
        layer.keys, layer.values = self.keys, self.values
        return self.keys, self.values


def room_behind(cache: Any, index: int, batch: int, tokens: int) -> Room | None:
    """The buffers behind layer `index`, made if need be, with room for `tokens` more; what the cache holds stays.

    None unless the layer is a plain DynamicLayer on the CPU with at least one token in it: `cache.update` is the way
    then.
    """
    if type(cache) is not DynamicCache or cache.offloading or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    if type(layer) is not DynamicLayer or not layer.is_initialized:
        return None
    room: Room | None = layer.__dict__.get("_widellm_room")
    if room is not None and room.form[0][0] == batch and room.holds(layer, tokens):
        return room
    keys, values = layer.keys, layer.values
    if keys.ndim != 4 or keys.shape[0] != batch or keys.device.type != "cpu" or keys.shape[:3] != values.shape[:3]:
        return None
    room = layer._widellm_room = Room(keys, values, tokens)
    return room


def drop_last(cache: Any, tokens: int) -> None:
    """Drop the last `tokens` positions of a cache that nothing else shares; room that is behind them stays."""
    for layer in cache.layers:
        room: Room | None = layer.__dict__.get("_widellm_room")
        if room is not None and room.holds(layer, 0):
            room.extend(layer, -tokens)
        else:
            layer.crop(-tokens)

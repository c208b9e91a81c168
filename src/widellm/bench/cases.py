"""The ops that are timed: per op, shape and number of rows, the dense ways and the routed one as calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from widellm.kernels import cpu, masked, registry
from widellm.kernels.cost_table import noise
from widellm.routing.router import Router

Call = Callable[[], Any]
QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one layer of a real model, and the group sizes that suit it."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_group: int
    layers: int
    vocabulary: int


SHAPES = {
    s.name: s
    for s in (
        ModelShape("smollm2-135m", 576, 1536, 9, 3, 64, 64, 30, 49152),
        ModelShape("llama-3.2-1b", 2048, 8192, 32, 8, 64, 128, 16, 128256),
        ModelShape("llama-3.1-8b", 4096, 14336, 32, 8, 128, 128, 32, 128256),
    )
}
_MEMORY = 128 * 2**20
"""Weights are copied until the copies together exceed the caches: a model's weights come from memory at each token."""


@dataclass
class Case:
    """One op at one shape and number of rows."""

    shape: str
    """The sizes, as rows of the table show them."""
    kind: str
    """Whose masks: "attention" or "ffn"."""
    groups: int
    dense: dict[str, Call]
    """Backend -> the dense layer, computed by it: "torch" as transformers does, "cpu" by the native kernels."""
    routed: Callable[[Tensor, str], Call]
    """(keep bool [M, G], backend) -> a call of the routed op."""
    choice: Callable[[Tensor], str]
    """What `auto` takes for this mask."""
    reference: Callable[[Tensor, int], Tensor]
    """The right answer for a mask, in float32 and plain torch: the first rows of it, as many as asked for."""


def copies(bytes_each: int) -> int:
    """How many sets of weights of this size are used in turn."""
    return max(1, min(32, -(-_MEMORY // bytes_each)))


def in_turn(function: Callable[..., Any], sets: list[Any]) -> Call:
    """A call of a function with the next set of weights each time."""
    turns = itertools.cycle(sets)
    return lambda: function(next(turns))


def native_ready(dtype: torch.dtype) -> bool:
    """Whether the native kernels can be timed here in this dtype."""
    return cpu.availability()[0] and dtype in cpu.NATIVE_TYPES


def _input_major(w: Tensor) -> Tensor:
    return w.t().contiguous().t()


class Weights:
    """Random weights of one op at one shape, made once for all numbers of rows."""

    def __init__(self, op: str, s: ModelShape, dtype: torch.dtype) -> None:
        self.op, self.s, self.dtype = op, s, dtype
        attention = s.heads * s.head_dim
        sizes = {
            "routed_ffn": 3 * s.hidden * s.inner,
            "routed_in": s.hidden * attention,
            "routed_out": s.hidden * attention,
        }
        self.sets: list[tuple[Tensor, ...]] = []
        if op not in sizes:
            return
        for _ in range(copies(sizes[op] * dtype.itemsize)):
            if op == "routed_ffn":
                down = noise(s.hidden, s.inner, dtype=dtype)
                up, gate = (noise(s.inner, s.hidden, dtype=dtype) for _ in range(2))
                self.sets.append((gate, up, down, _input_major(down)))
            elif op == "routed_in":
                self.sets.append((noise(attention, s.hidden, dtype=dtype),))
            else:
                w = noise(s.hidden, attention, dtype=dtype)
                self.sets.append((w, _input_major(w)))


def ffn_case(weights: Weights, rows: int) -> Case:
    """The whole FFN; down is row-major for torch's dense side and input-major for the others, as `attach` stores it."""
    s, sets, dtype = weights.s, weights.sets, weights.dtype
    x = noise(rows, s.hidden, dtype=dtype, scale=1.0)
    groups = s.inner // s.ffn_group
    full = torch.ones(rows, groups, dtype=torch.bool)
    dense: dict[str, Call] = {
        "torch": in_turn(lambda w: linear(silu(linear(x, w[0])).mul_(linear(x, w[1])), w[2]), sets),
    }
    if native_ready(dtype):
        dense["cpu"] = in_turn(lambda w: cpu.routed_ffn(x, w[0], w[1], w[3], full, "silu"), sets)

    def routed(keep: Tensor, backend: str) -> Call:
        return in_turn(lambda w: registry.routed_ffn(x, w[0], w[1], w[3], keep, "silu", backend=backend), sets)

    def reference(keep: Tensor, first: int) -> Tensor:
        gate, up, down, _ = (t.float() for t in sets[0])
        return masked.routed_ffn(x[:first].float(), gate, up, down, keep[:first], "silu")

    def choice(keep: Tensor) -> str:
        return registry.dispatch.choose("routed_ffn", x, keep, s.inner)

    return Case(f"{s.hidden}x{s.inner} g{s.ffn_group}", "ffn", groups, dense, routed, choice, reference)


def in_case(weights: Weights, rows: int) -> Case:
    """The q projection, a head a group."""
    s, sets, dtype = weights.s, weights.sets, weights.dtype
    x, width = noise(rows, s.hidden, dtype=dtype, scale=1.0), s.heads * s.head_dim
    dense: dict[str, Call] = {"torch": in_turn(lambda w: linear(x, w[0]), sets)}
    if native_ready(dtype):
        dense["cpu"] = in_turn(lambda w: cpu.linear(x, w[0]), sets)
    return Case(
        f"{s.hidden}x{width} g{s.head_dim}",
        "attention",
        s.heads,
        dense,
        lambda keep, backend: in_turn(lambda w: registry.routed_in(x, w[0], keep, backend=backend), sets),
        lambda keep: registry.dispatch.choose("routed_in", x, keep, width),
        lambda keep, n: masked.routed_in(x[:n].float(), sets[0][0].float(), keep[:n]),
    )


def out_case(weights: Weights, rows: int) -> Case:
    """The o projection, a head a group."""
    s, sets, dtype = weights.s, weights.sets, weights.dtype
    width = s.heads * s.head_dim
    h = noise(rows, width, dtype=dtype, scale=1.0)
    full = torch.ones(rows, s.heads, dtype=torch.bool)
    dense: dict[str, Call] = {"torch": in_turn(lambda w: linear(h, w[0]), sets)}
    if native_ready(dtype):
        dense["cpu"] = in_turn(lambda w: cpu.routed_out(h, w[1], full), sets)
    return Case(
        f"{width}x{s.hidden} g{s.head_dim}",
        "attention",
        s.heads,
        dense,
        lambda keep, backend: in_turn(lambda w: registry.routed_out(h, w[1], keep, backend=backend), sets),
        lambda keep: registry.dispatch.choose("routed_out", h, keep, width),
        lambda keep, n: masked.routed_out(h[:n].float(), sets[0][0].float(), keep[:n]),
    )


def attention_case(weights: Weights, rows: int) -> Case:
    """Few rows: each is the newest token of its own sequence (cache 4096 for one, else 1024); many: one prompt."""
    s, dtype = weights.s, weights.dtype
    few = rows < 64
    batch, queries = (rows, 1) if few else (1, rows)
    keys = rows if not few else 4096 if rows == 1 else 1024
    size = 2 * batch * s.kv_heads * keys * s.head_dim * dtype.itemsize

    def made(heads: int, tokens: int) -> Tensor:
        return noise(batch, heads, tokens, s.head_dim, dtype=dtype, scale=1.0)

    sets = [
        (made(s.heads, queries), made(s.kv_heads, keys), made(s.kv_heads, keys))
        for _ in range(copies(size) if few else 1)
    ]
    full = torch.ones(batch, queries, s.heads, dtype=torch.bool)

    def sdpa(w: QKV) -> Tensor:
        return (
            scaled_dot_product_attention(w[0], w[1], w[2], is_causal=queries > 1, enable_gqa=True)
            .transpose(1, 2)
            .contiguous()
        )

    def rows_first(w: QKV) -> QKV:
        return w[0].transpose(1, 2), w[1].transpose(1, 2), w[2].transpose(1, 2)

    dense: dict[str, Call] = {"torch": in_turn(sdpa, sets)}
    if native_ready(dtype):
        dense["cpu"] = in_turn(lambda w: cpu.routed_attention(*rows_first(w), full), sets)

    def routed(keep: Tensor, backend: str) -> Call:
        shaped = keep.view(batch, queries, s.heads)
        if backend == "masked":  # what a routed model runs then: transformers' own attention
            return in_turn(sdpa, sets)
        return in_turn(
            lambda w: registry.routed_attention(*rows_first(w), shaped, backend=backend).flatten(0, 1).flatten(1), sets
        )

    def reference(keep: Tensor, first: int) -> Tensor:
        q, k, v = (t.float() for t in rows_first(sets[0]))
        return masked.routed_attention(q, k, v, keep.view(batch, queries, s.heads)).flatten(0, 1)[:first].flatten(1)

    return Case(
        f"H{s.heads} K{s.kv_heads} d{s.head_dim} keys {keys}",
        "attention",
        s.heads,
        dense,
        routed,
        lambda keep: registry.dispatch.choose_attention(sets[0][0], sets[0][1]),
        reference,
    )


CASES: dict[str, Callable[[Weights, int], Case]] = {
    "routed_ffn": ffn_case,
    "routed_in": in_case,
    "routed_out": out_case,
    "routed_attention": attention_case,
}


def random_router(hidden: int, groups: int, rank: int = 32) -> Router:
    """A router with random weights."""
    router = Router(hidden, groups, rank)
    with torch.no_grad():
        router.down.normal_(0, hidden**-0.5)
        router.up.normal_()
    return router

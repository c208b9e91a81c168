"""Times of more than one op: a whole decoder layer at decode, an attention step over a long cache, the routers, and
native ops in turn with torch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from widellm.bench.cases import Call, ModelShape, copies, in_turn, native_ready, random_router
from widellm.bench.masks import random_mask
from widellm.bench.rows import OpRow
from widellm.kernels import cpu
from widellm.kernels.cost_table import noise
from widellm.kernels.fused import FusedLayer
from widellm.kernels.timing import Timing, alternate
from widellm.routing.router import Router

STEP_KEYS = 4096
LAYER_KEYS = 1024


class _Layer:
    """Random weights of one layer, row-major for torch and input-major (o, down) for the native kernels."""

    def __init__(self, s: ModelShape, dtype: torch.dtype) -> None:
        self.s, self.dtype = s, dtype
        heads, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.q, self.k, self.v = (noise(n, s.hidden, dtype=dtype) for n in (heads, kv, kv))
        self.o = noise(s.hidden, heads, dtype=dtype)
        self.gate, self.up = (noise(s.inner, s.hidden, dtype=dtype) for _ in range(2))
        self.down = noise(s.hidden, s.inner, dtype=dtype)
        self.norm = torch.ones(s.hidden, dtype=dtype)
        self.o_in, self.down_in = self.o.t().contiguous().t(), self.down.t().contiguous().t()

    def cache(self, batch: int, keys: int) -> tuple[Tensor, Tensor]:
        s = self.s
        k, v = (noise(batch, s.kv_heads, keys, s.head_dim, dtype=self.dtype, scale=1.0) for _ in range(2))
        return k, v

    def attention_linears(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Torch's way: x [B, D] -> [B, D]; the new keys and values are made, the cache is read as it is."""
        s, batch = self.s, x.shape[0]
        q = linear(x, self.q).view(batch, s.heads, 1, s.head_dim)
        linear(x, self.k), linear(x, self.v)
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return linear(out.reshape(batch, -1), self.o)

    def torch_call(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The whole layer in torch, without rotary embedding."""
        x = x + self.attention_linears(rms_norm(x, (self.s.hidden,), self.norm), k, v)
        h = rms_norm(x, (self.s.hidden,), self.norm)
        return x + linear(silu(linear(h, self.gate)).mul_(linear(h, self.up)), self.down)

    def fused(self, routers: tuple[Router, Router]) -> FusedLayer:
        native = [cpu.Router(r.down.detach(), r.up.detach(), r.bias.detach(), 0.0) for r in routers]
        return FusedLayer.bind(
            attn_norm=self.norm,
            ffn_norm=self.norm,
            w_q=self.q,
            w_k=self.k,
            w_v=self.v,
            w_o=self.o_in,
            w_gate=self.gate,
            w_up=self.up,
            w_down=self.down_in,
            head_dim=self.s.head_dim,
            act="silu",
            attn_eps=1e-5,
            ffn_eps=1e-5,
            attn_router=native[0],
            ffn_router=native[1],
        )


def _row(
    op: str,
    s: ModelShape,
    sizes: str,
    rows: int,
    density: float,
    kept: float,
    masks: str,
    took: Timing,
    dense: dict[str, Timing],
) -> OpRow:
    best = min(dense, key=lambda name: dense[name].ms)
    return OpRow(
        op, s.name, sizes, rows, density, kept, masks, "cpu", best, took.ms, dense[best].ms, took.spread,
        dense[best].spread,
    )  # fmt: skip


def layer_rows(
    s: ModelShape, dtype: torch.dtype, rows: Sequence[int], densities: Sequence[float], rounds: int
) -> Iterator[OpRow]:
    """One decoder layer at decode as native calls, routers included; nothing without them.

    All rows share a mask (for one row: a random one): the routers run, and their biases decide.
    """
    few = [m for m in rows if native_ready(dtype) and m <= cpu.few_rows()]
    if not few:
        return
    layer = _Layer(s, dtype)
    routers = (random_router(s.hidden, s.heads), random_router(s.hidden, s.inner // s.ffn_group))
    for router in routers:
        router.up.zero_()
    # routable work of a head and of a group of channels: q and o; gate, up and down
    costs = (2 * s.head_dim, 3 * s.ffn_group)
    for count in few:
        kept: dict[float, float] = {}
        x, (k, v) = noise(count, 1, s.hidden, dtype=dtype, scale=1.0), layer.cache(count, LAYER_KEYS)
        calls: dict[str, Call] = {"torch": lambda x=x, k=k, v=v: layer.torch_call(x[:, 0], k, v)}  # type: ignore[misc]
        for density in (None, *densities):
            own = tuple(random_router(s.hidden, r.bias.numel()) for r in routers)
            for router in own:
                router.up.zero_()
                if density is not None:
                    router.bias.copy_(random_mask(1, router.bias.numel(), density)[0].float() - 0.5)
            if density is not None:
                spent = sum(int((r.bias > 0).sum()) * cost for r, cost in zip(own, costs, strict=True))
                kept[density] = spent / sum(r.bias.numel() * cost for r, cost in zip(own, costs, strict=True))
            fused = layer.fused((own[0], own[1]))
            fused.set_thresholds(*((None, None) if density is None else (0.0, 0.0)))
            calls["cpu" if density is None else f"routed {density}"] = _step(fused, x, k, v)
        times = alternate(calls, rounds)
        dense = {name: times[name] for name in ("torch", "cpu")}
        for density in densities:
            masks = "random" if count == 1 else "shared"
            took = times[f"routed {density}"]
            sizes = f"{s.hidden} keys {LAYER_KEYS}"
            yield _row("layer", s, sizes, count, density, kept[density], masks, took, dense)


def _step(fused: FusedLayer, x: Tensor, k: Tensor, v: Tensor) -> Call:
    def call() -> Tensor:
        q, _, _, keep = fused.qkv(x, None, None)
        return fused.rest(x, q, keep, k, v)[0]

    return call


def step_rows(
    s: ModelShape, dtype: torch.dtype, rows: Sequence[int], densities: Sequence[float], rounds: int
) -> Iterator[OpRow]:
    """The attention step of one row in one native call: norm, router, q, k, v, attention over 4096 cached tokens, o.

    Nothing without native kernels. Masks: random heads, and random groups of the heads that share keys and values
    ("kv_groups"): a dropped group's part of the cache is not read.
    """
    if not native_ready(dtype) or 1 not in rows:
        return
    layer, x = _Layer(s, dtype), noise(1, 1, s.hidden, dtype=dtype, scale=1.0)
    k, v = layer.cache(1, STEP_KEYS)
    ffn = random_router(s.hidden, s.inner // s.ffn_group)

    shares: dict[str, float] = {}

    def native(keep: Tensor | None, name: str = "") -> Call:
        router = random_router(s.hidden, s.heads)
        router.up.zero_()
        if keep is not None:
            router.bias.copy_(keep.float() - 0.5)
            shares[name] = float(keep.float().mean())
        fused = layer.fused((router, ffn))
        fused.set_thresholds(None if keep is None else 0.0, None)
        return lambda: fused.step(x, None, None, k, v, ffn=False)

    calls: dict[str, Call] = {
        "torch": lambda: x[:, 0] + layer.attention_linears(rms_norm(x[:, 0], (s.hidden,), layer.norm), k, v),
        "cpu": native(None),
    }
    for density in densities:
        heads, groups = random_mask(1, s.heads, density)[0], random_mask(1, s.kv_heads, density)[0]
        whole = groups.repeat_interleave(s.heads // s.kv_heads)
        for name, keep in ((f"random {density}", heads), (f"kv_groups {density}", whole)):
            calls[name] = native(keep, name)
    times = alternate(calls, max(rounds, 7))
    dense = {name: times[name] for name in ("torch", "cpu")}
    sizes = f"H{s.heads} K{s.kv_heads} keys {STEP_KEYS}"
    for density in densities:
        for masks in ("random", "kv_groups"):
            name = f"{masks} {density}"
            yield _row("attention_step", s, sizes, 1, density, shares[name], masks, times[name], dense)


def router_rows(s: ModelShape, dtype: torch.dtype, rows: Sequence[int], rounds: int) -> Iterator[OpRow]:
    """What routers that keep everything add to a layer: `ms` with them, `dense_ms` without.

    Few rows: the native layer with and without. Many: the layer's linears in torch, and the routers' time on top.
    """
    layer = _Layer(s, dtype)
    routers = (random_router(s.hidden, s.heads), random_router(s.hidden, s.inner // s.ffn_group))
    for count in rows:
        x = noise(count, s.hidden, dtype=dtype, scale=1.0)
        if native_ready(dtype) and count <= cpu.few_rows():
            k, v = layer.cache(count, LAYER_KEYS)
            bare, full = layer.fused(routers), layer.fused(routers)
            bare.set_thresholds(None, None)
            full.set_thresholds(-1e30, -1e30)
            calls = {"cpu": _step(bare, x[:, None], k, v), "with": _step(full, x[:, None], k, v)}
            times = alternate(calls, max(rounds, 7))
            yield _row("router", s, f"{s.hidden}", count, 1.0, 1.0, "random", times["with"], {"cpu": times["cpu"]})
            continue

        def linears(x: Tensor = x) -> Tensor:
            q = linear(x, layer.q)
            linear(x, layer.k), linear(x, layer.v)
            return linear(q, layer.o) + linear(silu(linear(x, layer.gate)).mul_(linear(x, layer.up)), layer.down)

        def routing(x: Tensor = x) -> list[Tensor]:
            return [router(x) > 0.0 for router in routers]

        times = alternate({"torch": linears, "routers": routing}, rounds)
        dense, extra = times["torch"], times["routers"]
        both = Timing(dense.ms + extra.ms, dense.spread)
        yield _row("router", s, f"{s.hidden}", count, 1.0, 1.0, "random", both, {"torch": dense})


def interleaved_rows(s: ModelShape, dtype: torch.dtype, rows: Sequence[int], rounds: int) -> Iterator[OpRow]:
    """What it costs that native ops and torch's take turns on one pool of threads: nothing, when the speed-up is 1.

    `ms` is a pair, one of each; `dense_ms` the sum of the two when each kind runs back to back. Each kind has weights
    of its own that exceed the caches, used in turn: else those that run back to back would find theirs near, which
    says nothing of threads.
    """
    if not native_ready(dtype):
        return
    sets = [noise(s.inner, s.hidden, dtype=dtype) for _ in range(copies(s.inner * s.hidden * dtype.itemsize))]
    others = [w.clone() for w in sets]
    for count in rows:
        x, keep = noise(count, s.hidden, dtype=dtype, scale=1.0), random_mask(count, s.inner // s.ffn_group, 0.5)
        native = in_turn(lambda w, x=x, keep=keep: cpu.routed_in(x, w, keep), sets)
        dense = in_turn(lambda w, x=x: linear(x, w), others)
        calls: dict[str, Call] = {
            "pair": lambda native=native, dense=dense: [f() for f in (native, dense) * 4],  # type: ignore[misc]
            "apart": lambda native=native, dense=dense: [f() for f in (native,) * 4 + (dense,) * 4],  # type: ignore[misc]
        }
        times = alternate(calls, max(rounds, 5), limit=2.0)
        pair, apart = (Timing(times[name].ms / 4, times[name].spread) for name in ("pair", "apart"))
        yield _row("interleaved", s, f"{s.hidden}x{s.inner}", count, 0.5, 0.5, "random", pair, {"cpu": apart})

"""A random-weight Llama-3.1-8B, dense and routed at 50 %, prefill and decode, under one harness of plain torch.

Both share everything but the routed parts: the dense one runs the best dense linears and SDPA; the routed one runs the
routers and the Triton ops. Weights are random and so are the routers: the decisions of different tokens are nearly
independent, which is the hardest case for many rows. Both are timed as replayed CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_timing import Machine
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from widellm.kernels import dispatch
from widellm.kernels import triton_ops as ops


class Decoder:
    """Llama's arithmetic on random weights."""

    def __init__(self, machine: Machine, layers: int) -> None:
        self.machine, self.group = machine, 16 if machine.dry else 128
        self.d, self.f, self.heads, self.kv, self.dim, self.vocabulary = (
            (32, 64, 4, 2, 8, 64) if machine.dry else (4096, 14336, 32, 8, 128, 128256)
        )
        self.groups = {"attention": self.kv, "ffn": self.f // self.group}
        self.embedding = machine.noise(self.vocabulary, self.d)
        self.norm = torch.ones(self.d, dtype=machine.dtype, device=machine.device)
        self.layers = [self._layer() for _ in range(layers)]

    def _layer(self) -> dict[str, Any]:
        d, f, n, k, noise = self.d, self.f, self.heads * self.dim, self.kv * self.dim, self.machine.noise

        def router(groups: int) -> tuple[Tensor, Tensor, Tensor]:
            device = self.machine.device
            return (
                torch.randn(16, d, device=device) * d**-0.5,
                torch.randn(groups, 16, device=device),
                torch.zeros(groups, device=device),
            )

        both = noise(2 * f, d, scale=d**-0.5)
        return {
            "qkv": noise(n + 2 * k, d, scale=d**-0.5),
            "o": noise(n, d, scale=0.1 * n**-0.5).t(),
            "both": both,
            "gate": both[:f],
            "up": both[f:],
            "down": noise(f, d, scale=0.1 * f**-0.5).t(),
            "attention": router(self.groups["attention"]),
            "ffn": router(self.groups["ffn"]),
        }

    def caches(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """Zeros [1, length, K, d], one pair a layer."""
        shape = (1, length, self.kv, self.dim)
        return [
            tuple(torch.zeros(shape, dtype=self.machine.dtype, device=self.machine.device) for _ in "kv")
            for _ in self.layers
        ]  # type: ignore[misc]

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, cache: list[Any], at: int, routed: bool) -> Tensor:
        """ids [T] at positions at..at+T-1 -> logits of the last token. cos, sin [T, d / 2]."""
        x = embedding(ids, self.embedding)
        for layer, (k_cache, v_cache) in zip(self.layers, cache, strict=True):
            x = x + self._attention(layer, self._norm(x), cos, sin, k_cache, v_cache, at, routed)
            x = x + self._ffn(layer, self._norm(x), routed)
        return linear(self._norm(x[-1:]), self.embedding)

    def _norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, (self.d,), self.norm, 1e-5)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _attention(
        self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, at: int, routed: bool
    ) -> Tensor:
        t, n, k = x.shape[0], self.heads * self.dim, self.kv * self.dim
        through = routed and self._skips("routed_in", t, n // self.kv)
        if routed:
            keep = ops.routed_keep(x, *layer["attention"], 0.0)
            plan = ops.shared_plan(keep[None], layer["qkv"][:n])
        if through:
            q, kv = ops.routed_in(x, layer["qkv"][:n], keep, plan=plan), linear(x, layer["qkv"][n:])
        else:
            q, kv = linear(x, layer["qkv"]).split((n, 2 * k), 1)
        key, value = kv.view(t, 2, self.kv, self.dim).unbind(1)
        q = self._rotate(q.view(t, self.heads, self.dim), cos, sin)
        k_cache[0, at : at + t] = self._rotate(key, cos, sin)
        v_cache[0, at : at + t] = value
        k_seen, v_seen = k_cache[:, : at + t], v_cache[:, : at + t]
        if routed:
            h = ops.routed_attention(q[None], k_seen, v_seen, keep[None], plan=plan).view(t, n)
            # what is dropped is 0 in h, so the dense product is the same function
            return (
                ops.routed_out(h, layer["o"], keep)
                if self._skips("routed_out", t, n // self.kv)
                else linear(h, layer["o"])
            )
        a, b, c = (part.transpose(1, 2) for part in (q[None], k_seen, v_seen))
        h = scaled_dot_product_attention(a, b, c, is_causal=t > 1, enable_gqa=True).transpose(1, 2).reshape(t, n)
        return linear(h, layer["o"])

    def _skips(self, op: str, rows: int, channels: int) -> bool:
        """Whether `auto` would take the Triton kernel here."""
        return self.machine.dry or dispatch.choose_on_gpu(op, rows, channels)[0] == "triton"

    def _ffn(self, layer: Any, x: Tensor, routed: bool) -> Tensor:
        if routed and self._skips("routed_ffn", x.shape[0], self.group):
            keep = ops.routed_keep(x, *layer["ffn"], 0.0)
            return ops.routed_ffn(x, layer["gate"], layer["up"], layer["down"], keep, "silu")
        gate, up = linear(x, layer["both"]).chunk(2, 1)
        return linear(silu(gate) * up, layer["down"])


def run(machine: Machine, left: Callable[[], float]) -> list[dict[str, Any]]:
    """Prefill of 512..8192 tokens and decode at 1k and 8k of context; tokens/s, dense and routed."""
    layers = 2 if machine.dry else 32
    if not machine.dry:
        free = torch.cuda.mem_get_info()[0] / 2**30
        layers = max(1, min(32, int((free - 6) / 0.45)))  # a layer has 0.41 GB of weights, and caches
    model, rows = Decoder(machine, layers), []
    for phase, tokens in (("decode", 1024), ("prefill", 2048), ("decode", 8192), ("prefill", 8192), ("prefill", 512)):
        if left() <= 0:
            break
        tokens = tokens // 128 if machine.dry else tokens
        t = 1 if phase == "decode" else tokens
        cache, at = model.caches(tokens + 1), tokens if phase == "decode" else 0
        ids = torch.randint(0, model.vocabulary, (t,), device=machine.device)
        angle = torch.arange(at, at + t, device=machine.device)[:, None] * (
            500000 ** -(torch.arange(model.dim // 2, device=machine.device) / (model.dim // 2))
        )
        cos, sin = angle.cos().to(machine.dtype), angle.sin().to(machine.dtype)
        ms = {}
        with torch.inference_mode():
            for routed in (False, True):
                call = lambda r=routed, a=(ids, cos, sin, cache, at): model.forward(*a, r)  # noqa: E731
                ms[routed] = machine.ms(call, cold=False, seconds=0.5)
        rows.append(
            {
                "model": "Llama-3.1-8B, random weights" + ("" if layers == 32 else f", {layers} of 32 layers"),
                "phase": phase,
                "tokens": tokens,
                "dense_ms": round(ms[False], 4),
                "routed_ms": round(ms[True], 4),
                "dense_tokens_per_s": round(t / ms[False] * 1e3, 1),
                "routed_tokens_per_s": round(t / ms[True] * 1e3, 1),
                "speedup": round(ms[False] / ms[True], 3),
            }
        )
    return rows

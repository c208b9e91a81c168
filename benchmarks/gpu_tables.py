"""Speed of every op against the best dense way of doing the same layer: the tables."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpu_timing import Machine
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from widellm.kernels import dispatch
from widellm.kernels import triton_ops as ops

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DENSITIES = (0.75, 0.5, 0.25)
D, F = 4096, 14336


def _blas(machine: Machine, call: Callable[[], Tensor]) -> dict[str, Callable[[], Tensor]]:
    """`call` with each library that torch can take for a matrix product."""
    if machine.dry:
        return {"torch": call}

    def with_library(name: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            before = torch.backends.cuda.preferred_blas_library()
            torch.backends.cuda.preferred_blas_library(name)
            try:
                return call()
            finally:
                torch.backends.cuda.preferred_blas_library(before)

        return run

    return {name: with_library(name) for name in ("cublas", "cublaslt")}


def _activation(machine: Machine) -> Callable[[Tensor], Tensor]:
    """silu(gate) * up of [M, 2 F], in one kernel where torch.compile works."""

    def plain(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, 1)
        return silu(gate) * up

    if machine.dry:
        return plain
    try:
        compiled: Callable[[Tensor], Tensor] = torch.compile(plain, dynamic=True)
        compiled(machine.noise(4, 64))
        compiled(machine.noise(512, 64))
        return compiled
    except Exception:  # no compiler on this machine: two kernels
        return plain


def projections(machine: Machine, size: int, left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """FFN, gate alone (into the groups) and down alone (out of the groups), for groups of `size` channels."""
    rows: Sequence[int] = ((1, 66) if size == 32 else (3,)) if machine.dry else ROWS
    d, f = (32, 64) if machine.dry else (D, F)
    both = machine.noise(2 * f, d, scale=d**-0.5)
    gate, up = both[:f], both[f:]
    down = machine.noise(f, d, scale=f**-0.5).t()  # input-major, as a regrouped model stores it
    dense_down = down.contiguous()
    act, item = _activation(machine), both.element_size()
    for m in rows:
        if left() <= 0:
            return
        x, h = machine.noise(m, d), machine.noise(m, f)
        dense = {
            "routed_ffn": machine.best(_blas(machine, lambda x=x: linear(act(linear(x, both)), dense_down))),
            "routed_in": machine.best(_blas(machine, lambda x=x: linear(x, gate))),
            "routed_out": machine.best(_blas(machine, lambda h=h: linear(h, dense_down))),
        }
        for density in (0.5,) if machine.dry else DENSITIES:
            keep = machine.mask(m, f // size, density=density)
            kept, union = float(keep.float().mean()), float(keep.any(0).float().mean())
            calls: dict[str, tuple[Callable[[], Tensor], int]] = {
                "routed_ffn": (lambda x=x, k=keep: ops.routed_ffn(x, gate, up, down, k, "silu"), 3),
                "routed_in": (lambda x=x, k=keep: ops.routed_in(x, gate, k), 1),
                "routed_out": (lambda h=h, k=keep: ops.routed_out(h, down, k), 1),
            }
            for op, (call, matrices) in calls.items():
                ms = machine.ms(call)
                chosen = dispatch.choose_on_gpu(op, m, size)[0]
                yield {
                    "op": op,
                    "rows": m,
                    "shape": f"{d}x{f}/{size}",
                    "group": size,
                    "density": density,
                    "kept": round(kept, 3),
                    "union": round(union, 3),
                    "ms": round(ms, 5),
                    "dense_ms": round(dense[op][0], 5),
                    "dense": dense[op][1],
                    "speedup": round(dense[op][0] / ms, 3),
                    "auto": chosen,
                    "auto_speedup": round(dense[op][0] / ms, 3) if chosen == "triton" else 1.0,
                    **machine.share(ms, 2 * m * d * f * matrices * kept, d * f * matrices * item * union),
                }


def _dense_prefill(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Tensor]]:
    """Every way that this machine has for dense attention; q [B, T, H, d], k and v [B, Tk, K, d]."""
    a, b, c = (t.transpose(1, 2) for t in (q, k, v))
    shared = q.shape[2] // k.shape[2]
    wide = [t.repeat_interleave(shared, 1) for t in (b, c)]  # for kernels that do not take grouped heads

    def sdpa(backend: SDPBackend, grouped: bool) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                if grouped:
                    return scaled_dot_product_attention(a, b, c, is_causal=causal, enable_gqa=True)
                return scaled_dot_product_attention(a, *wide, is_causal=causal)

        return run

    names = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    if q.shape[1] * k.shape[1] > 1 << 22:
        del names["math"]  # it holds all scores
    calls = {f"sdpa {n}{' gqa' * g}": sdpa(b, g) for n, b in names.items() for g in (True, False)}
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_func, flash_attn_with_kvcache  # type: ignore[import-not-found]

        calls["flash_attn"] = lambda: flash_attn_func(q, k, v, causal=causal)
        if q.shape[1] == 1:  # split-KV
            calls["flash_attn kvcache"] = lambda: flash_attn_with_kvcache(q, k, v)
    if importlib.util.find_spec("flashinfer") is not None and q.shape[:2] == (1, 1):
        import flashinfer  # type: ignore[import-not-found]

        decode = flashinfer.single_decode_with_kv_cache
        calls["flashinfer"] = lambda: decode(q[0, 0], k[0], v[0], use_tensor_cores=True)
    return calls


def attention(machine: Machine, left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Causal prefill, and decode over a cache: 32 query heads on 8 KV heads of 128, groups of 4 heads and of 1."""
    heads, kv, dim = (4, 2, 16) if machine.dry else (32, 8, 128)
    lengths = (70,) if machine.dry else (1024, 2048, 4096, 8192, 16384, 32768)
    item = machine.noise(1).element_size()
    for phase, batch in (("decode", 1), ("prefill", 1), ("decode", 2 if machine.dry else 8)):
        for tk in lengths:
            if left() <= 0:
                return
            if phase == "prefill" and tk > 16384:
                continue
            tq = tk if phase == "prefill" else 1
            q, k, v = machine.noise(batch, tq, heads, dim), *(machine.noise(batch, tk, kv, dim) for _ in range(2))
            dense, name = machine.best(_dense_prefill(q, k, v, causal=tq > 1))
            for groups in (kv, heads):
                for density in (0.5,) if machine.dry else DENSITIES:
                    keep = machine.mask(batch, tq, groups, density=density)
                    ms = machine.ms(lambda q=q, k=k, v=v, keep=keep: ops.routed_attention(q, k, v, keep))
                    kept = float(keep.float().mean())
                    cache = float(keep.view(batch, tq, kv, -1).any(3).any(1).float().mean())
                    pairs = tq * (tq + 1) / 2 if tq > 1 else tk
                    yield {
                        "op": f"attention {phase}",
                        "rows": tk,
                        "batch": batch,
                        "shape": f"{heads}/{kv} heads of {dim}",
                        "group": heads // groups,
                        "density": density,
                        "kept": round(kept, 3),
                        "ms": round(ms, 5),
                        "dense_ms": round(dense, 5),
                        "dense": name,
                        "speedup": round(dense / ms, 3),
                        **machine.share(
                            ms, 4 * batch * heads * dim * pairs * kept, 2 * batch * tk * kv * dim * item * cache
                        ),
                    }

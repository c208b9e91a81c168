"""Measure block sizes at Llama-3.1-8B's shapes and keep the fastest in the user's cache: `benchmarks/gpu.sh --tune`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_timing import Machine

from widellm.kernels import triton_ops as ops
from widellm.kernels import triton_tuning as tuning
from widellm.kernels.triton_launch import device_of


def run(machine: Machine, left: Callable[[], float]) -> dict[str, list[int]]:
    """The table after measuring, by case. Density 0.5; a case that does not fit into the time keeps its default."""
    d, f, size = (32, 64, 32) if machine.dry else (4096, 14336, 128)
    item, cases = machine.noise(1).element_size(), {}
    gate, up = (machine.noise(f, d, scale=d**-0.5) for _ in range(2))
    down = machine.noise(f, d, scale=f**-0.5).t()
    for m in (1, 70) if machine.dry else (1, 2, 4, 1024, 4096, 512, 2048, 8192, 16384):
        x, h, keep = machine.noise(m, d), machine.noise(m, f), machine.mask(m, f // size, density=0.5)
        out = machine.noise(m, f) * 0

        def into(config: tuning.Config, x: Any = x, keep: Any = keep, out: Any = out) -> float:
            return timed(lambda: ops.project_in(x, gate, up, keep, "silu", None, None, out, False, config))

        def single(config: tuning.Config, x: Any = x, keep: Any = keep, out: Any = out) -> float:
            return timed(lambda: ops.project_in(x, None, up, keep, "none", None, None, out, True, config))

        def back(config: tuning.Config, h: Any = h, keep: Any = keep) -> float:
            return timed(lambda: ops.project_out(h, down, keep, None, config))

        for kind, measure in (("ffn_in", into), ("out", back), ("in", single)):
            configs = tuning.candidates(kind, device_of(x), m)
            configs = [c if c == tuning.DENSE else tuning.fit(c, kind, size, d, item) for c in configs]
            cases[tuning.key(kind, m, size, item)] = (list(dict.fromkeys(configs)), measure)

    heads, kv, dim, tk = (4, 2, 16, 70) if machine.dry else (32, 8, 128, 8192)
    k, v = (machine.noise(1, tk, kv, dim) for _ in range(2))
    for tq in (1, 70) if machine.dry else (1, 2, 4, 1024, 2048, 4096, 8192):
        q, keep = machine.noise(1, tq, heads, dim), machine.mask(1, tq, kv, density=0.5)
        kind, rows = ("decode", tq * heads // kv) if tq * heads // kv <= tuning.FEW else ("attention", tq)

        def attend(config: tuning.Config, q: Any = q, keep: Any = keep) -> float:
            return timed(lambda: ops.routed_attention(q, k, v, keep, config=config))

        configs = [tuning.fit(c, kind, dim, dim, item) for c in tuning.candidates(kind, device_of(q), rows)]
        cases[tuning.key(kind, rows, dim, item)] = (list(dict.fromkeys(configs)), attend)

    def timed(call: Callable[[], Any]) -> float:
        if left() <= 0:
            raise RuntimeError("out of time")
        return machine.ms(call, seconds=0.03)

    return {name: list(config) for name, config in tuning.tune(cases).items()}

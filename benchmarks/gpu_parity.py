"""Every op against the same formula in float32, at odd and at real shapes, and inside a replayed CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_timing import Machine
from torch import Tensor

from widellm.kernels import masked
from widellm.kernels import triton_ops as ops

LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value; infinite where something is not a number."""
    if got.numel() == 0:
        return 0.0
    gap = (got.float() - want).abs().max() / want.abs().max().clamp(min=1.0)
    return float(gap.nan_to_num(torch.inf))


def _upcast(*tensors: Any) -> list[Any]:
    return [t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]


def _poisoned(h: Tensor, keep: Tensor) -> Tensor:
    return h.masked_fill(~keep.repeat_interleave(h.shape[1] // keep.shape[1], 1), torch.nan)


def cases(machine: Machine, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], float]]]:
    """(name, function that gives the error)."""

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        return machine.noise(*shape, scale=scale).to(dtype)

    def ffn(m: int, d: int, f: int, size: int, density: float, input_major: bool) -> float:
        x, keep = noise(m, d), machine.mask(m, f // size, density=density)
        gate, up, down = noise(f, d, scale=d**-0.5), noise(f, d, scale=d**-0.5), noise(d, f, scale=f**-0.5)
        down = down.t().contiguous().t() if input_major else down
        got = ops.routed_ffn(x, gate, up, down, keep, "silu")
        return _error(got, masked.routed_ffn(*_upcast(x, gate, up, down, keep, "silu")))

    def projections(m: int, d: int, n: int, size: int) -> float:
        x, w, keep = noise(m, d), noise(n, d, scale=d**-0.5), machine.mask(m, n // size, density=0.5)
        h, back, bias = noise(m, n), noise(d, n, scale=n**-0.5), noise(d)
        first = _error(ops.routed_in(x, w, keep), masked.routed_in(*_upcast(x, w, keep)))
        got = ops.routed_out(_poisoned(h, keep), back, keep, bias)
        return max(first, _error(got, masked.routed_out(*_upcast(h, back, keep, bias))))

    def attention(batch: int, tq: int, tk: int, heads: int, kv: int, dim: int, groups: int, padded: bool) -> float:
        q, k, v = noise(batch, tq, heads, dim), noise(batch, tk, kv, dim), noise(batch, tk, kv, dim)
        keep, mask, extra = machine.mask(batch, tq, groups, density=0.5), None, {}
        if padded:
            start = torch.arange(batch, device=machine.device) * 3
            key, query = torch.arange(tk, device=machine.device), torch.arange(tq, device=machine.device)[:, None]
            mask = (key <= query + tk - tq) & (key >= start[:, None, None, None])
            extra = {"start": start}
        want = masked.routed_attention(*_upcast(q, k, v), keep, mask)
        errors = [_error(ops.routed_attention(q, k, v, keep, **extra), want)]
        if padded:
            errors.append(_error(ops.routed_attention(q, k, v, keep, mask), want))
        return max(errors)

    def router(m: int, d: int, groups: int) -> float:
        x = noise(m, d)
        down, up, bias = (torch.randn(*s, device=machine.device) for s in ((16, d), (groups, 16), (groups,)))
        logits = (x.double() @ down.double().t()) @ up.double().t() + bias.double()
        sure = (logits - 0.1).abs() > 1e-2
        return float((ops.routed_keep(x, down, up, bias, 0.1) != (logits > 0.1))[sure].any())

    big = not machine.dry
    for m in (1, 2, 3, 7, 8, 17, 64, 129, 1024) if big else (1, 3, 65):
        for size in ((32, 64, 128) if m in (7, 129) else (128,)) if big else (16,):
            d, f = (1024, 12 * size) if big else (24, 3 * size)
            for density in (0.0, 0.5, 1.0):
                name = f"ffn {m} rows {d}x{f}/{size} density {density:g}"
                yield name, lambda a=(m, d, f, size, density, m % 2 == 0): ffn(*a)
        yield f"projections {m} rows", lambda m=m: projections(m, 520 if big else 20, 480 if big else 48, 48)
        yield f"router {m} rows", lambda m=m: router(m, 4096 if big else 40, 112 if big else 5)
    if big:
        for m in (1, 4, 300, 4096):
            yield f"ffn {m} rows 4096x14336/128", lambda m=m: ffn(m, 4096, 14336, 128, 0.5, True)
    for shape in (
        (2, 1, 5, 4, 2, 16, 2),
        (3, 5, 70, 6, 6, 24, 3),
        (2, 70, 130, 8, 2, 32, 4),
        *(((2, 513, 513, 32, 8, 128, 8), (2, 1, 4096, 32, 8, 128, 32), (1, 2048, 2048, 32, 8, 128, 8)) if big else ()),
    ):
        for padded in (False, True):
            yield f"attention {shape} {'padded' if padded else ''}", lambda s=shape, p=padded: attention(*s, p)


def graph_error(machine: Machine) -> float:
    """A captured FFN is replayed with other masks and inputs: the plan must follow them."""
    d, f, worst = 512, 2048, 0.0
    for m in (1, 16, 300):
        x, keep = machine.noise(m, d), machine.mask(m, f // 128, density=0.5)
        up, down = machine.noise(f, d, scale=d**-0.5), machine.noise(d, f, scale=f**-0.5)
        ops.routed_ffn(x, up, up, down, keep, "silu")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = ops.routed_ffn(x, up, up, down, keep, "silu")
        for density in (0.2, 0.9, 0.0):
            x.copy_(machine.noise(m, d))
            keep.copy_(machine.mask(m, f // 128, density=density))
            graph.replay()
            torch.cuda.synchronize()
            worst = max(worst, _error(got, masked.routed_ffn(*_upcast(x, up, up, down, keep, "silu"))))
    return worst


def run(machine: Machine, left: Callable[[], float]) -> dict[str, Any]:
    """All cases in every dtype while there is time: how many passed, and those that did not."""
    dtypes = (torch.float32,) if machine.dry else (torch.bfloat16, torch.float16)
    done, failed = 0, []
    for dtype in dtypes:
        for name, error in cases(machine, dtype):
            if left() <= 0:
                failed.append("out of time: the rest was not run")
                break
            try:
                found = error()
                if not found <= LIMITS[dtype]:
                    failed.append(f"{name} {dtype}: error {found:.3g}, limit {LIMITS[dtype]:g}")
            except Exception as problem:  # the table of the others is still worth having
                failed.append(f"{name} {dtype}: {type(problem).__name__}: {str(problem)[:300]}")
            done += 1
    if not machine.dry:
        found = graph_error(machine)
        done += 1
        if not found <= LIMITS[machine.dtype]:
            failed.append(f"replayed CUDA graph: error {found:.3g}")
    return {"cases": done, "failed": failed}

"""Which backend `auto` takes for an op: the fastest by measurement, dense included. Time changes, results never do
(beyond rounding).

Without a table for this machine (`tune`, `widellm doctor --tune DIR`) the rules below decide. They are constants, so
that two processes on equal machines choose, and round, alike. Nothing is ever measured during a forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from widellm.errors import BackendError
from widellm.kernels import cost_table, cpu, gpu
from widellm.kernels.cost_table import CostTable, OpShape
from widellm.kernels.cpu import NATIVE_TYPES

_SAMPLE = 8192

# The rules, measured on 2 cores with AVX512-BF16 (docs/bench.md). The native backend is taken wherever it can run: it
# is no slower than dense, then drop, whatever the density. Only where nothing is dropped (budget 1.0), torch's bare
# linear is faster for small maps out of the groups and many rows.
DENSE_OUT_ROWS = 256
DENSE_MAX_OUT = 2048  # inputs N
# Plain torch's one GEMM per group: below this many rows a group's share of them is too small, above this density the
# gathers cost more than the skipped work saves.
GROUPED_MIN_ROWS = 256
GROUPED_MAX_DENSITY = 0.6
# On a GPU the density is not looked at: reading it would wait for the device and could not be captured in a CUDA graph.
# These are estimates from bytes and multiply-adds, not measurements (docs/gpu.md). Up to TRITON_FEW rows the union of
# what they keep leaves weights unread; from TRITON_MANY rows on the skipped multiply-adds outweigh the plan. Between,
# independent masks keep every group and dense wins.
TRITON_FEW = 4
TRITON_MANY = 512
TRITON_MIN_CHANNELS = 64
TRITON_MIN_KEYS = 1024


def choose(op: str, x: Tensor, keep: Tensor, width: int) -> str:
    """Name of the backend for `op` on x `[M, ...]` with keep `[M, G]` over `width` outputs or channels.

    For routed_attention x is q `[B, Tq, H, d]` and keep `[B, Tq, G]`. Takes a microsecond; some more where it counts
    what is kept. A mask of no use gets a backend too, whose caller then says what is wrong with it.
    """
    device = x.device.type
    if keep.ndim < 2 or not keep.shape[-1]:
        return "masked"
    if device == "cuda":
        return choose_on_gpu(op, keep.shape[0], width // keep.shape[-1])[0]
    native = device == "cpu" and x.dtype in NATIVE_TYPES and cpu.availability()[0]
    if op == "routed_attention":
        return "cpu" if native else "masked"
    if native and _no_table():
        return "cpu"  # what the rules say of any density
    rows, groups = x.shape[0], keep.shape[-1]
    return decide(op, x.shape[-1], width, groups, x.dtype, rows, density_of(keep), native)[0]


def _no_table() -> bool:
    return active_table(torch.get_num_threads()) is None


def density_of(keep: Tensor) -> float:
    """Share of keep bool [M, G] that is True, 1 of an empty one; of many rows, a sample that one thread counts."""
    if keep.numel() == 0:
        return 1.0
    step = max(1, keep.numel() // _SAMPLE)
    sample = keep[:: step + 1 - step % 2]  # odd, so that it does not walk in step with a pattern of the rows
    return int(sample.count_nonzero()) / sample.numel()


def native_when_dense(op: str, x: Tensor, weight: Tensor, width: int, groups: int) -> bool:
    """Whether the native kernels should do what keeps everything: x `[..., N]`, weight `[D, N]` of down or o."""
    graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    ready = weight.device.type == "cpu" and x.dtype == weight.dtype and x.dtype in NATIVE_TYPES
    if graph or not ready or torch.compiler.is_compiling() or not cpu.availability()[0]:
        return False
    rows = x.numel() // x.shape[-1]
    return decide_dense(op, x.shape[-1], width, groups, x.dtype, rows, weight.stride(0) == 1)[0] == "cpu"


def decide_dense(
    op: str, inputs: int, width: int, groups: int, dtype: torch.dtype, rows: int, input_major: bool
) -> tuple[str, str]:
    """("cpu" or "module", why) where nothing is dropped and the native kernels could run; as `decide`.

    Only for many rows and input-major weights of FFNs and o; the module's own torch linear is the other way.
    """
    own = "module", "rule: nothing is dropped: the module's own linear"
    if op == "routed_in" or rows <= cpu.few_rows() or not input_major:
        return own
    if _no_table() and op == "routed_out" and inputs <= DENSE_MAX_OUT and rows > DENSE_OUT_ROWS:
        return own
    backend, why = decide(op, inputs, width, groups, dtype, rows, 1.0, True)
    return (backend, why) if backend == "cpu" else ("module", why)


def choose_on_gpu(op: str, rows: int, channels: int) -> tuple[str, str]:
    """(backend, why) on a GPU, from shapes alone: `rows` rows, groups of `channels` (attention: any)."""
    works, why = gpu.availability()
    if not works:
        return "masked", f"rule: dense, then drop: {why}"
    if op == "routed_out" and rows > TRITON_FEW:
        return "masked", f"rule, not measured: more than {TRITON_FEW} rows keep every group between them"
    few = rows <= TRITON_FEW
    if op == "routed_attention" or (channels >= TRITON_MIN_CHANNELS and (few or rows >= TRITON_MANY)):
        return "triton", f"rule, not measured: up to {TRITON_FEW} rows or from {TRITON_MANY}, groups of 64 or more"
    return "masked", f"rule, not measured: dense between {TRITON_FEW} and {TRITON_MANY} rows and for narrow groups"


def choose_attention(query: Tensor, key: Tensor) -> str:
    """Name of the backend for attention of query `[B,H,Tq,d]` over key `[B,K,Tk,d]`."""
    if query.device.type == "cuda":
        return choose_on_gpu("routed_attention", 1, 1)[0] if key.shape[2] >= TRITON_MIN_KEYS else "masked"
    native = query.device.type == "cpu" and query.dtype in NATIVE_TYPES and key.dtype == query.dtype
    return "cpu" if native and cpu.availability()[0] else "masked"


def decide(
    op: str, inputs: int, width: int, groups: int, dtype: torch.dtype, rows: int, density: float, native: bool
) -> tuple[str, str]:
    """(backend, why) for an op of these sizes; see `cost_table.OpShape`. native: whether `cpu` can run it.

    A measured time decides where there is one, else a rule.
    """
    table = active_table(torch.get_num_threads())
    if table is not None:
        name = cost_table.key(op, inputs, width, groups, dtype, rows, density)
        measured = table.costs.get(name, {})
        usable = {b: ms for b, ms in measured.items() if b in ("masked", "grouped") or (b == "cpu" and native)}
        if "masked" in usable:
            best = min(usable, key=usable.__getitem__)
            times = ", ".join(f"{b} {ms:.3g} ms" for b, ms in sorted(usable.items(), key=lambda item: item[1]))
            return best, f"measured: {times}"
    if native:
        return "cpu", "rule: native kernels where they can run"
    if op == "routed_ffn" and rows >= GROUPED_MIN_ROWS and density <= GROUPED_MAX_DENSITY:
        return "grouped", f"rule: grouped from {GROUPED_MIN_ROWS} rows up to density {GROUPED_MAX_DENSITY:g}"
    return "masked", "rule: dense, then drop"


@functools.lru_cache(maxsize=8)
def active_table(threads: int) -> CostTable | None:
    """This machine's table at this number of threads, read once a process; None where there is no usable one."""
    head = {**cost_table.machine(), "threads": threads}
    return cost_table.read(cost_table.default_path(head), head)[0]


def table_state() -> tuple[Path, str]:
    """(the table's file, "" or why it is not in use)."""
    head = cost_table.machine()
    path = cost_table.default_path(head)
    return path, cost_table.read(path, head)[1]


def tune(
    shapes: Sequence[OpShape],
    rows: Sequence[int] = cost_table.ROWS,
    densities: Sequence[float] = cost_table.DENSITIES,
    rounds: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
    again: bool = False,
) -> CostTable:
    """Measure these ops, add them to this machine's table in the user's cache, and use it from now on.

    What the table already holds is not measured again unless `again`. A corrupt or foreign table is replaced.
    Raises BackendError for a dtype without kernels, WidellmError where the cache cannot be written.
    """
    for shape in shapes:
        if shape.dtype not in NATIVE_TYPES:
            raise BackendError(f"tuning is for float32 and bfloat16 on the CPU, got {shape.dtype}")
    head = cost_table.machine()
    path = cost_table.default_path(head)
    table = (cost_table.read(path, head)[0] if path.exists() else None) or CostTable(head)
    wanted = [s for s in dict.fromkeys(shapes) if again or not _covered(table, s, rows, densities)]
    total, done = len(wanted) * len(rows) * len(densities), 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for shape in wanted:
            cost_table.measure_op(shape, table, rows, densities, rounds, step)
    if wanted:
        cost_table.write(table, path)
    active_table.cache_clear()
    return table


def _covered(table: CostTable, s: OpShape, rows: Sequence[int], densities: Sequence[float]) -> bool:
    return all(
        cost_table.key(s.op, s.read, s.width, s.groups, s.dtype, m, d) in table.costs for m in rows for d in densities
    )

"""What each backend costs on this machine: measured when asked to, kept as JSON in the user's cache.

One file a machine: its name holds a digest of what a time depends on (processor, threads, versions), and the file
repeats it in full. A file that is corrupt, of another format or of another machine counts as absent; `tune` writes a
new one. Nothing is ever measured in the middle of a forward.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from widellm._version import __version__
from widellm.files import atomic_write_json
from widellm.kernels import cpu, grouped, masked
from widellm.kernels.timing import alternate
from widellm.sources.gguf import cache_directory

FORMAT = 1
ROWS = (1, 8, 32, 64, 128, 512, 1024)
DENSITIES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class OpShape:
    """One op of a layer, as its weights are."""

    op: str
    hidden: int
    """D"""
    width: int
    """What the groups cut: F of routed_ffn, N of the projections."""
    groups: int
    dtype: torch.dtype
    input_major: bool = True
    """Whether down and o are stored input-major, as `attach` stores them in a regrouped model."""
    gated: bool = True

    @property
    def read(self) -> int:
        """Columns of the op's input: N of routed_out, D of the others."""
        return self.width if self.op == "routed_out" else self.hidden


def row_bucket(rows: int) -> int:
    """The power of two at or above `rows`."""
    return 1 << max(0, rows - 1).bit_length()


def density_bucket(density: float) -> float:
    """The nearest of 0.25, 0.5, 0.75 and 1."""
    return min(4, max(1, round(density * 4))) / 4


def key(op: str, inputs: int, width: int, groups: int, dtype: torch.dtype, rows: int, density: float) -> str:
    """The table's name of a case: `routed_ffn 4096x14336/112 bfloat16 rows 512 density 0.5`."""
    kind = str(dtype).removeprefix("torch.")
    return f"{op} {inputs}x{width}/{groups} {kind} rows {row_bucket(rows)} density {density_bucket(density):g}"


def processor() -> str:
    """The CPU's name: from /proc/cpuinfo where there is one."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def machine() -> dict[str, Any]:
    """What a measured time depends on; a table with anything else in its head is not used."""
    return {
        "format": FORMAT,
        "cpu": processor(),
        "instructions": cpu.availability()[1],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "widellm": __version__,
    }


@dataclass
class CostTable:
    """Milliseconds of each backend per case; see `key`."""

    machine: dict[str, Any]
    costs: dict[str, dict[str, float]] = field(default_factory=dict)


def default_path(head: dict[str, Any] | None = None) -> Path:
    """The table's file for this machine (or for `head`), in the user's cache directory."""
    digest = hashlib.sha256(json.dumps(head or machine(), sort_keys=True).encode()).hexdigest()[:12]
    return cache_directory() / f"costs-{digest}.json"


def read(path: Path, head: dict[str, Any]) -> tuple[CostTable | None, str]:
    """(the table, "") or (None, why it cannot be used). Never raises: a bad table is as good as none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, "not measured on this machine"
    except (OSError, ValueError) as error:
        return None, f"{path} cannot be read ({type(error).__name__}): it will be measured again"
    if not isinstance(data, dict) or not isinstance(data.get("machine"), dict):
        return None, f"{path} is not a cost table: it will be measured again"
    if data["machine"] != head:
        other = sorted(k for k in {*data["machine"], *head} if data["machine"].get(k) != head.get(k))
        return None, f"{path} was measured with another {', '.join(other)}: it will be measured again"
    costs = data.get("costs")
    if not isinstance(costs, dict) or not all(_valid(entry) for entry in costs.values()):
        return None, f"{path} is damaged: it will be measured again"
    return CostTable(head, costs), ""


def _valid(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(ms, (int, float)) and not isinstance(ms, bool) and math.isfinite(ms) and ms > 0
        for ms in entry.values()
    )


def write(table: CostTable, path: Path) -> None:
    """Write the table in one step. Raises WidellmError when the disk is full or not writable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_json(path, {"machine": table.machine, "costs": table.costs})


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 0.05) -> Tensor:
    """Normal values in seconds even for gigabytes: one drawn block, repeated at odd offsets."""
    block = (torch.randn(1_000_003) * scale).to(dtype)
    out = torch.empty(*shape, dtype=dtype)
    flat = out.view(-1)
    for start in range(0, flat.numel(), block.numel()):
        part = flat[start : start + block.numel()]
        part.copy_(block[: part.numel()])
    return out


def measure_op(
    shape: OpShape,
    table: CostTable,
    rows: Sequence[int] = ROWS,
    densities: Sequence[float] = DENSITIES,
    rounds: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Time every usable backend of one op into `table`, on random inputs and random masks. float32 or bfloat16."""
    d, n, dtype = shape.hidden, shape.width, shape.dtype
    backends: dict[str, ModuleType] = {"masked": masked, "grouped": grouped}
    if cpu.availability()[0] and dtype in cpu.NATIVE_TYPES:
        backends["cpu"] = cpu
    w_in = [noise(n, d, dtype=dtype) for _ in range(2 if shape.gated and shape.op == "routed_ffn" else 1)]
    w_out = noise(d, n, dtype=dtype)
    if shape.input_major:
        w_out = w_out.t().contiguous().t()
    for count in rows:
        x = noise(count, shape.read, dtype=dtype, scale=1.0)
        for density in densities:
            keep = torch.rand(count, shape.groups) < density
            calls = {}
            for name, backend in backends.items():
                if name == "grouped" and (count < 64 or density > 0.75):
                    continue
                if shape.op == "routed_ffn":
                    gate = w_in[0] if shape.gated else None
                    calls[name] = _bound(backend.routed_ffn, x, gate, w_in[-1], w_out, keep, "silu")
                elif shape.op == "routed_in":
                    calls[name] = _bound(backend.routed_in, x, w_in[0], keep)
                else:
                    calls[name] = _bound(backend.routed_out, x, w_out, keep)
            times = alternate(calls, rounds, limit=0.3)
            name = key(shape.op, shape.read, n, shape.groups, dtype, count, density)
            table.costs[name] = {backend: round(t.ms, 5) for backend, t in times.items()}
            progress()


def _bound(function: Callable[..., Tensor], *arguments: Any) -> Callable[[], Tensor]:
    return lambda: function(*arguments)

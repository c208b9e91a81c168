"""Launching a Triton kernel, or, for tensors on the meta device, writing down what would have been launched.

Everything that decides which kernel runs with which block sizes is plain Python over shapes, so on meta tensors the
very same code yields the list of launches without a GPU: it is what the ahead-of-time compilation check compiles and
what the test of the number of compiled variants counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from widellm.errors import BackendError
from widellm.files import one_line

VARYING = ("m", "tq", "tk", "splits", "chunk", "batch")
"""Names of kernel arguments that change from call to call. Kernels do not specialise on them: one compiled variant
serves every number of rows and keys."""

TARGETS = ("sm80", "sm90", "sm100", "sm120", "gfx942")
"""What defaults are shipped for. Other GPUs use those of the nearest kind: see `target_of`."""


@dataclass(frozen=True)
class Device:
    """What choices depend on."""

    target: str
    """One of TARGETS."""
    programs: int
    """Streaming multiprocessors or compute units."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch that was written down."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """By name: tensors, numbers, None; constexprs among them."""
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)


_records: ContextVar[list[Launch] | None] = ContextVar("widellm_triton_records", default=None)
_pretended: ContextVar[str] = ContextVar("widellm_triton_pretended", default="sm90")
_META_PROGRAMS = {"sm80": 108, "sm90": 132, "sm100": 148, "sm120": 170, "gfx942": 304}


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Inside the block, ops on meta tensors append what they would launch on `target` to the list."""
    if target not in TARGETS:
        raise BackendError(f"target {target!r} is not known; known: {', '.join(TARGETS)}")
    launches: list[Launch] = []
    records, pretended = _records.set(launches), _pretended.set(target)
    try:
        yield launches
    finally:
        _records.reset(records)
        _pretended.reset(pretended)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: decided by TRITON_INTERPRET=1 when they are first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def nearest_target(major: int, minor: int) -> str:
    """The target whose defaults suit an NVIDIA GPU of this compute capability.

    8.6 and 8.9 have the small shared memory of 12.0 rather than the large one of 8.0. BackendError below 8.0.
    """
    if major < 8:
        raise BackendError(
            f"backend 'triton' needs an NVIDIA GPU of compute capability 8.0 or newer, got {major}.{minor}"
        )
    if major in (9, 10, 11):
        return "sm90" if major == 9 else "sm100"
    return "sm80" if (major, minor) in ((8, 0), (8, 7)) else "sm120"


@lru_cache(maxsize=16)
def _of_cuda(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    target = "gfx942" if torch.version.hip else nearest_target(found.major, found.minor)
    return Device(target, found.multi_processor_count)


def device_of(tensor: Tensor) -> Device:
    """The device that kernels over `tensor` run on. BackendError for one that Triton has no compiler for."""
    if tensor.device.type == "cuda":
        return _of_cuda(tensor.device.index)
    if tensor.device.type == "meta":
        return Device(_pretended.get(), _META_PROGRAMS[_pretended.get()])
    if tensor.device.type == "cpu" and interpreted():
        return Device("sm80", 3)  # few programs, so that each of a persistent kernel sees several tiles
    raise BackendError(
        f"backend 'triton' runs on a GPU, got tensors on {tensor.device.type} (for tests: TRITON_INTERPRET=1)"
    )


def launch(kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **arguments: Any) -> None:
    """Run `kernel` over `grid`; arguments by name. On meta tensors: write it down if `recording`, and do nothing."""
    tensors = [a for a in arguments.values() if isinstance(a, Tensor)]
    if tensors[0].device.type == "meta":
        records = _records.get()
        if records is not None:
            records.append(Launch(kernel, grid, arguments, warps, stages))
        return
    if 0 in grid:
        return
    index = tensors[0].device.index
    elsewhere = tensors[0].device.type == "cuda" and index != torch.cuda.current_device()
    try:
        with torch.cuda.device(index) if elsewhere else nullcontext():  # Triton launches on the current device
            kernel[grid](num_warps=warps, num_stages=stages, **arguments)
    except triton.runtime.errors.OutOfResources as error:
        raise BackendError(f"{kernel.__name__}: its block sizes do not fit this GPU: {one_line(error)}") from error


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(0, n - 1).bit_length()

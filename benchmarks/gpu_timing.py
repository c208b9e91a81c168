"""Times on a GPU: CUDA graphs, a cold L2 cache, medians. And what the hardware could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Dense bf16 with float32 sums, TFLOP/s, and memory, TB/s: from the vendors' data sheets. Others: measured by `Machine`.
DATA_SHEETS = {
    "H200": (989, 4.8),
    "H100 PCIe": (756, 2.0),
    "H100 NVL": (835, 3.9),
    "H100": (989, 3.35),
    "A100-SXM4-80GB": (312, 2.04),
    "A100 80GB PCIe": (312, 1.94),
    "A100": (312, 1.56),
    "B200": (2250, 8.0),
    "L40S": (362, 0.864),
    "RTX 4090": (165, 1.008),
    "RTX 5090": (209, 1.792),
}


@dataclass
class Machine:
    """The device under test and its limits."""

    device: torch.device
    dtype: torch.dtype
    dry: bool
    """On the CPU, in the interpreter: everything runs, no time means anything."""
    tflops: float = 0.0
    terabytes: float = 0.0
    peak_source: str = "none"

    def __post_init__(self) -> None:
        self._flush: Tensor | None = None
        if self.dry:
            self.tflops = self.terabytes = 1.0
            return
        name = torch.cuda.get_device_name()
        for part, peak in DATA_SHEETS.items():
            if part in name:
                (self.tflops, self.terabytes), self.peak_source = peak, "data sheet"
                return
        a = self.noise(8192, 8192)
        self.tflops = 2 * 8192**3 / self.ms(lambda: a @ a, cold=False) / 1e9
        big, other = (torch.empty(1 << 29, dtype=torch.uint8, device=self.device) for _ in range(2))
        self.terabytes = 2 * big.numel() / self.ms(lambda: other.copy_(big)) / 1e9
        self.peak_source = "measured: 8192^3 matmul, 512 MB copy"

    def noise(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values of the device and dtype under test."""
        return (torch.randn(*shape, device=self.device, dtype=torch.float32) * scale).to(self.dtype)

    def mask(self, *shape: int, density: float) -> Tensor:
        """Independent random decisions."""
        return torch.rand(*shape, device=self.device) < density

    def ms(self, call: Callable[[], Any], cold: bool = True, seconds: float = 0.06) -> float:
        """Median milliseconds of one call: captured in a CUDA graph and replayed, the L2 cache overwritten before."""
        if self.dry:
            start = time.perf_counter()
            call()
            return max(1e-6, (time.perf_counter() - start) * 1e3)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and lets libraries allocate, before the capture
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()
        if self._flush is None:
            size = 4 * getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 64 << 20)
            self._flush = torch.empty(max(size, 256 << 20), dtype=torch.uint8, device=self.device)
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - began < seconds and len(times) < 50):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if cold:
                self._flush.zero_()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        del kept, graph
        return statistics.median(times)

    def best(self, calls: Mapping[str, Callable[[], Any]]) -> tuple[float, str]:
        """(milliseconds, name) of the fastest call that works here; RuntimeError when none does."""
        times, errors = {}, {}
        for name, call in calls.items():
            try:
                times[name] = self.ms(call)
            except Exception as error:  # a library that lacks a kernel for this shape or GPU is not a candidate
                errors[name] = f"{type(error).__name__}: {error}"
        if not times:
            raise RuntimeError(f"no dense baseline runs: {errors}")
        name = min(times, key=times.__getitem__)
        return times[name], name

    def share(self, ms: float, flops: float, size: float) -> dict[str, float]:
        """Share of the peak that is reached: FLOP/s and bytes/s."""
        return {
            "share_of_flops": round(flops / ms / 1e9 / self.tflops, 4),
            "share_of_bandwidth": round(size / ms / 1e9 / self.terabytes, 4),
        }


def describe(machine: Machine) -> dict[str, Any]:
    """Device, clocks and versions, for the head of the results."""
    import triton

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": str(machine.dtype),
        "dry_run": machine.dry,
        "peak_tflops": round(machine.tflops, 1),
        "peak_terabytes_per_s": round(machine.terabytes, 3),
        "peaks_from": machine.peak_source,
    }
    if not machine.dry:
        properties = torch.cuda.get_device_properties(machine.device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
        try:
            facts["clock_mhz"] = torch.cuda.clock_rate()
        except Exception as error:  # needs nvidia-ml-py, which may be absent
            facts["clock_mhz"] = f"unknown ({type(error).__name__})"
    return facts

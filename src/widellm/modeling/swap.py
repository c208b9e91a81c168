"""Give a live module routed behaviour by changing its class, and give the old class back.

A routed class is `class RoutedX(Behaviour, X)`: parameters, their names, hooks and isinstance checks stay what they
were, and `super().forward` is the untouched dense module. Nothing is copied from any modelling code.
"""

from __future__ import annotations

import functools

from torch import nn

from widellm.errors import UnsupportedModelError


@functools.cache
def _routed_class(behaviour: type, base: type) -> type:
    members = {"__module__": behaviour.__module__, "_widellm_dense": base}
    return type(f"Routed{base.__name__}", (behaviour, base), members)


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


def check_swappable(module: nn.Module, where: str) -> None:
    """Raise UnsupportedModelError when something has replaced the module's forward: it would bypass the class's."""
    if "forward" in vars(module):
        raise UnsupportedModelError(
            f"{where} has its forward replaced by another library (offloading hooks?): attach widellm first"
        )


def dense_class(module: nn.Module) -> type:
    """The class a module had before `routed`, or has."""
    found: type = getattr(type(module), "_widellm_dense", type(module))
    return found

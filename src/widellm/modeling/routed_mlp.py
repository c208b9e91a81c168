"""A routed FFN: the model's own MLP, computing only the channel groups that each token's router keeps."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from widellm.families import LayerModules
from widellm.kernels import masked, registry
from widellm.kernels.reference import activate
from widellm.modeling.swap import live, special_weight
from widellm.routing.router import Router
from widellm.routing.state import SubLayer


class RoutedMLP:
    """Behaviour put before the class of a model's MLP; see `swap`. x `[B, T, D]` -> `[B, T, D]`."""

    router: Router
    _width: SubLayer
    _parts: tuple[Any, Any, Any, str]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sub = self._width
        if sub.threshold is None:
            sub.keep = None
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        rows = x.reshape(-1, x.shape[-1])
        keep = self.router(rows) > sub.threshold
        sub.keep = keep.view(*x.shape[:-1], sub.groups)
        gate, up, down = (live(self, part) for part in self._parts[:3])  # type: ignore[arg-type]
        act = self._parts[3]
        if not all(m is None or is_plain_linear(m) for m in (gate, up, down)):
            return _by_modules(x, gate, up, down, act, keep)
        y = registry.routed_ffn(
            rows,
            None if gate is None else gate.weight,
            up.weight,
            down.weight,
            keep,
            act,
            None if gate is None else gate.bias,
            up.bias,
            down.bias,
            sub.backend,
        )
        return y.view(x.shape)


def _by_modules(x: Tensor, gate: Any, up: Any, down: Any, act: str, keep: Tensor) -> Tensor:
    """Projections that are more than a weight (adapters, quantised): call them, then drop; nothing is skipped."""
    h = activate(up(x), act) if gate is None else activate(gate(x), act) * up(x)
    return down(masked.drop(h.reshape(-1, h.shape[-1]), keep).view(h.shape))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a bare nn.Linear, whose weight a kernel may read instead of calling the module."""
    hooked = module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)  # accelerate's offloading
    return type(module) is nn.Linear and special_weight(module) is None and not hooked


def parts_of(modules: LayerModules, activation: str) -> tuple[Any, Any, Any, str]:
    """What RoutedMLP needs of a layer, as a tuple so that torch does not register the modules a second time."""
    return (modules.gate_proj, modules.up_proj, modules.down_proj, activation)

"""widellm: each token chooses, layer by layer, which head groups and FFN channel groups it computes.

model, tokenizer = widellm.load("DIR")      # a directory that `widellm prune` wrote
widellm.set_budget(model, 0.6)              # share of routable work that may be spent
widellm.detach(model)                       # the dense model again, bit for bit

After `import widellm`, transformers' AutoModelForCausalLM.from_pretrained("DIR") loads such a directory too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from widellm import hooks
from widellm._version import __version__

if TYPE_CHECKING:
    from widellm.config import WidthConfig
    from widellm.modeling.attach import attach, detach, get_budget, set_backend, set_batch_shared, set_budget
    from widellm.modeling.checkpoint import export, load, save
    from widellm.modeling.speculative import Speculative
    from widellm.static_export import export_static

_HOMES = {
    "Speculative": "widellm.modeling.speculative",
    "WidthConfig": "widellm.config",
    "attach": "widellm.modeling.attach",
    "detach": "widellm.modeling.attach",
    "get_budget": "widellm.modeling.attach",
    "set_backend": "widellm.modeling.attach",
    "set_batch_shared": "widellm.modeling.attach",
    "set_budget": "widellm.modeling.attach",
    "export": "widellm.modeling.checkpoint",
    "export_static": "widellm.static_export",
    "load": "widellm.modeling.checkpoint",
    "save": "widellm.modeling.checkpoint",
}

__all__ = [
    "Speculative",
    "WidthConfig",
    "__version__",
    "attach",
    "detach",
    "export",
    "export_static",
    "get_budget",
    "load",
    "save",
    "set_backend",
    "set_batch_shared",
    "set_budget",
]


def __getattr__(name: str) -> Any:
    # torch and transformers load on first use, so that `widellm --help` answers at once
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'widellm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


hooks.install()

"""Make widellm's names known to libraries when, and only when, those libraries are imported.

`import widellm` stays light: nothing is imported for a registration. A library module that is loaded already is told at
once; one that is not is told at the end of its own import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

REGISTRATIONS = {
    "transformers.quantizers.auto": "widellm.modeling.quantizer:register_loader",
    "transformers.models.auto.configuration_auto": "widellm.modeling.register:register_config",
    "transformers.models.auto.modeling_auto": "widellm.modeling.register:register_model",
    "lm_eval.models": "widellm.integrations.lm_eval:register",
}
"""Library module -> our function to call once it is there; each may be called again without harm."""


def install() -> None:
    """Register with what is loaded, and watch for the rest; again and again is fine."""
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())
    for name in REGISTRATIONS:
        module = sys.modules.get(name)
        # a module that is still being imported gets its call from the watcher
        if module is not None and not _half_imported(module):
            _register(name)


def _register(name: str) -> None:
    module, _, function = REGISTRATIONS[name].partition(":")
    if module in sys.modules and _half_imported(sys.modules[module]):
        return  # it is what imports the library, and registers at its own end
    getattr(importlib.import_module(module), function)()


def _half_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, with a loader that registers afterwards."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in REGISTRATIONS:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Watcher) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Registering(spec.loader)
                return spec
        return None


class _Registering(importlib.abc.Loader):
    """A loader as it was, and a registration at its end."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # the module keeps no trace of us: tools that ask for its loader's source find the real one
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module.__name__)

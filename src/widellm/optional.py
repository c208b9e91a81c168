"""The only place where optional packages are imported."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from widellm.errors import MissingDependencyError


def available(module: str) -> bool:
    """Whether `module` (dotted names allowed) is installed; nothing of it is run."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except ValueError:  # a half-initialised module without __spec__, such as one a test put into sys.modules
        return False


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import `module` and return it.

    extra: which of widellm's extras installs it. purpose: what was asked for, as the subject of the message.

    Raises MissingDependencyError when it is not installed, or is installed and does not import.
    """
    package = module.partition(".")[0]
    install = f'pip install "widellm[{extra}]"'
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package:
            raise MissingDependencyError(f"{purpose} needs the package {package}: {install}") from None
        reason = " ".join(str(error).split())
        raise MissingDependencyError(
            f"{purpose} needs the package {package}, which is installed but does not import ({reason}): {install}"
        ) from error

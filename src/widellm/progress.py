"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Say nothing."""

"""Versions that belong beside every result."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from widellm._version import __version__


def versions() -> dict[str, str]:
    """widellm (with its git commit when it runs from a checkout), Python, torch and transformers."""
    found = {"widellm": __version__, "python": platform.python_version()}
    commit = git_commit()
    if commit is not None:
        found["commit"] = commit
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def git_commit() -> str | None:
    """Commit of the checkout this package runs from, `+` when files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()

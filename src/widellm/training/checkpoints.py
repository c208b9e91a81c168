"""Checkpoints of a run in progress: each carries the hashes of its files, so that a damaged one is never resumed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from widellm.errors import CheckpointError
from widellm.files import atomic_write_json, one_line

MANIFEST = "manifest.json"
_RUN = "run.json"
_SHOWN = ("stage", "tokens", "window", "micro_batch", "seed", "save_every", "streaming", "column")
_NAME = re.compile(r"checkpoint-(\d+)")


def seal(folder: str | Path) -> None:
    """Write the manifest of a checkpoint whose other files are all there: size and SHA-256 of each."""
    folder = Path(folder)
    files = {str(p.relative_to(folder)): _describe(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    files.pop(MANIFEST, None)
    atomic_write_json(folder / MANIFEST, files)


def damage(folder: str | Path) -> str | None:
    """What is wrong with a checkpoint, in words; None when every file is as it was sealed."""
    folder = Path(folder)
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it was not finished"
    except ValueError:
        return f"{MANIFEST} is not valid JSON"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected[0]:
            return f"{name} has {path.stat().st_size} bytes, expected {expected[0]}"
        if _describe(path) != expected:
            return f"{name} has changed"
    return None


def saved(run: str | Path) -> list[Path]:
    """The checkpoints of a run, newest first, whole or not."""
    found = [(int(m[1]), p) for p in Path(run).glob("checkpoint-*") if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def newest_good(run: str | Path) -> tuple[Path | None, list[str]]:
    """(the newest undamaged checkpoint of a run, what is wrong with each newer one)."""
    problems: list[str] = []
    for path in saved(run):
        problem = damage(path)
        if problem is None:
            return path, problems
        problems.append(f"{path.name} is damaged ({problem})")
    return None, problems


def to_resume(run: str | Path) -> tuple[Path, list[str]]:
    """As `newest_good`; CheckpointError when there is none."""
    path, problems = newest_good(run)
    if path is None:
        detail = "; ".join(problems) or "it has no checkpoint"
        raise CheckpointError(f"{run} cannot be resumed: {detail}; run again without --resume")
    return path, problems


def begin(run: str | Path, described: dict[str, Any], resume: bool) -> None:
    """Note what a run is made of, or (to resume) raise CheckpointError where that is not what it was made of.

    A fresh run starts without what one before it left unfinished.
    """
    run = Path(run)
    if not resume:
        for leftover in saved(run):
            shutil.rmtree(leftover)
        run.mkdir(parents=True, exist_ok=True)
        atomic_write_json(run / _RUN, described)
        return
    try:
        before = json.loads((run / _RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{run / _RUN} cannot be read ({one_line(error, 100)}): remove {run} and start again"
        ) from None
    for name in described:
        if before.get(name) != described[name]:
            shown = f": {before.get(name)!r} then, {described[name]!r} now" if name in _SHOWN else ""
            raise CheckpointError(f"{run} was made with another {name}{shown}; resume as it began, or remove it")


def _describe(path: Path) -> list[int | str]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return [path.stat().st_size, digest.hexdigest()]

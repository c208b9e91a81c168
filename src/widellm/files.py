"""Writing so that a result appears whole under its name, or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from widellm.errors import CheckpointError, WidellmError

INCOMPLETE = ".incomplete"
"""Marker inside a directory that is still being written: a killed run leaves it behind, and loaders refuse it."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# what `overwrite` may replace: a saved model, never somebody's home directory
_REPLACEABLE = ("config.json", "width_config.json")


def one_line(error: BaseException, limit: int = 240) -> str:
    """The message of `error` on one line of at most `limit` characters; its type where there is no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check_new_directory(path: str | Path, overwrite: bool = False) -> Path:
    """Return `path` if a directory can be made there; nothing is written.

    Raises WidellmError when something exists there (with `overwrite`: something other than a saved model or an empty
    directory), or its parent cannot be written to. Call it before the long work whose result goes to `path`.
    """
    path = Path(path)
    if os.path.lexists(path):
        if not path.is_dir():
            raise WidellmError(f"{path} exists and is not a directory: choose another name")
        if not overwrite:
            raise WidellmError(f"{path} exists: choose another directory, or pass --overwrite")
        if any(path.iterdir()) and not any((path / name).is_file() for name in _REPLACEABLE):
            raise WidellmError(f"{path} is not a saved model (no config.json in it): it will not be overwritten")
    parent = _nearest_parent(path)
    if not parent.is_dir():
        raise WidellmError(f"{path} cannot be made: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise WidellmError(f"{path} cannot be made: no permission to write to {parent}")
    return path


@contextmanager
def atomic_directory(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory beside `path`, which takes the name `path` when the block ends without an error.

    Everything in it is flushed to the disk before the renaming. When the block raises, KeyboardInterrupt included, it
    is removed, and so are the parents made for it; an existing `path` stays as it was. `overwrite` replaces a saved
    model that is there. Parents that are missing are made.

    Raises WidellmError on entry as `check_new_directory` does, and in the place of an error that says that the disk is
    full or not writable.
    """
    path = check_new_directory(path, overwrite)
    made = _make_parents(path)
    temporary = path.parent / f".{path.name}.tmp-{secrets.token_hex(4)}"
    try:
        temporary.mkdir()
        (temporary / INCOMPLETE).touch()
        yield temporary
        _flush_tree(temporary)
        (temporary / INCOMPLETE).unlink()
        _take_name(temporary, path, overwrite)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in reversed(made):
            _remove_if_empty(parent)
        _raise_as_user_error(error, path)
        raise
    _flush_directory(path.parent)


def refuse_incomplete(path: str | Path) -> None:
    """Raise CheckpointError if `path` is a directory that a killed run left half-written."""
    if (Path(path) / INCOMPLETE).exists():
        raise CheckpointError(f"{path} was left half-written by an interrupted run: remove it and run again")


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write `text` (UTF-8) to the file `path`, replacing it in one step; links are followed, pipes written to.

    Raises WidellmError when the directory is missing, is not writable or the disk is full.
    """
    path = Path(path)
    if path.is_dir():
        raise WidellmError(f"{path} is a directory: give the name of a file")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        path.write_text(text, encoding="utf-8")  # /dev/stdout and the like must not be renamed over
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise WidellmError(f"{path} cannot be written: {target.parent} is not a directory")
    temporary = target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"
    try:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _raise_as_user_error(error, path)
        raise


def atomic_write_json(path: str | Path, data: Any) -> None:
    """Write `data` as indented JSON with `atomic_write_text`. ValueError for NaN and infinities: they are not JSON."""
    atomic_write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _nearest_parent(path: Path) -> Path:
    parent = path.absolute().parent
    while not os.path.lexists(parent):
        parent = parent.parent
    return parent


def _make_parents(path: Path) -> list[Path]:
    """Make the missing parents of `path`; returns those made, outermost first."""
    missing: list[Path] = []
    parent = path.absolute().parent
    while not parent.exists():
        missing.insert(0, parent)
        parent = parent.parent
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _raise_as_user_error(error, path)
        raise
    return missing


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # another process put something there
        pass


def _take_name(temporary: Path, path: Path, overwrite: bool) -> None:
    old = None
    if overwrite and path.exists():
        old = path.parent / f".{path.name}.old-{secrets.token_hex(4)}"
        os.rename(path, old)
    try:
        if os.path.lexists(path):
            raise WidellmError(f"{path} appeared while it was being written: choose another directory")
        os.rename(temporary, path)
    except BaseException:
        if old is not None:
            os.rename(old, path)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _raise_as_user_error(error: BaseException, path: Path) -> None:
    """Raise WidellmError if `error` means that the disk is full or read-only; else return."""
    code = error.errno if isinstance(error, OSError) else None
    # safetensors is written in Rust and reports the system's error as text
    text = str(error) if isinstance(error, Exception) and not isinstance(error, WidellmError) else ""
    if code in _FULL or any(f"(os error {number})" in text for number in _FULL):
        raise WidellmError(f"no space left while writing {path}: free some, or choose another disk") from error
    if code in _DENIED:
        raise WidellmError(f"{path} cannot be written: {one_line(error)}") from error
    if code == errno.ENOTEMPTY or code == errno.EEXIST:
        raise WidellmError(f"{path} appeared while it was being written: choose another directory") from error


def _flush_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _flush_directory(Path(folder))


def _flush_directory(path: Path) -> None:
    if os.name != "posix":  # directories cannot be opened elsewhere
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Atomic writing: a result appears whole under its name, or nothing is left of it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from widellm.errors import CheckpointError, WidellmError
from widellm.files import (
    INCOMPLETE,
    atomic_directory,
    atomic_write_json,
    atomic_write_text,
    check_new_directory,
    one_line,
    refuse_incomplete,
)


def test_directory_appears_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "made" / "for" / "it"
    with atomic_directory(target) as folder:
        (folder / "a.txt").write_text("a")
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text("b")
        assert not target.exists() and folder.parent == target.parent
    assert sorted(p.name for p in target.rglob("*")) == ["a.txt", "b.txt", "sub"]
    assert [p.name for p in target.parent.iterdir()] == ["it"]


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__
)
def test_nothing_is_left_after_an_error(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), atomic_directory(tmp_path / "x" / "out") as folder:
        (folder / "config.json").write_text("{}")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_existing_directory_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(WidellmError, match="exists: choose another directory, or pass --overwrite"):
        with atomic_directory(tmp_path / "out"):
            pytest.fail("the block ran")


def test_overwrite_replaces_a_saved_model_whole(tmp_path: Path) -> None:
    old = tmp_path / "out"
    old.mkdir()
    (old / "config.json").write_text("old")
    (old / "stale.txt").write_text("stale")
    with pytest.raises(RuntimeError), atomic_directory(old, overwrite=True):
        raise RuntimeError
    assert (old / "config.json").read_text() == "old"
    with atomic_directory(old, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert (old / "config.json").read_text() == "new" and not (old / "stale.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_overwrite_does_not_touch_other_directories(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(WidellmError, match="not a saved model"), atomic_directory(tmp_path, overwrite=True):
        pass
    with (
        pytest.raises(WidellmError, match="not a directory"),
        atomic_directory(tmp_path / "thesis.tex", overwrite=True),
    ):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_two_writers_one_wins(tmp_path: Path) -> None:
    with pytest.raises(WidellmError, match="appeared"), atomic_directory(tmp_path / "out"):
        with atomic_directory(tmp_path / "out") as folder:
            (folder / "first").touch()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["first"] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["python", "rust"],
)
def test_full_disk_is_a_user_error(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(WidellmError, match="no space left while writing .*out") as caught:
        with atomic_directory(tmp_path / "out") as folder:
            (folder / "half").touch()
            raise error
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_really_full_disk(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with pytest.raises(WidellmError, match="no space left"), atomic_directory(tmp_path / "out"):
        with open("/dev/full", "w") as file:
            file.write("x")
    assert list(tmp_path.iterdir()) == []


def test_parent_that_is_a_file_or_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WidellmError, match="is not a directory"):
        check_new_directory(tmp_path / "file" / "out")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(WidellmError, match="no permission"):
        check_new_directory(tmp_path / "out")


def test_killed_run_leaves_nothing_that_loads(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom widellm.files import atomic_directory\n"
        "with atomic_directory(sys.argv[1]) as folder:\n"
        "    (folder / 'config.json').write_text('{}')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")]).returncode != 0
    (left,) = tmp_path.iterdir()
    assert left.name != "out" and (left / INCOMPLETE).exists()
    with pytest.raises(CheckpointError, match="half-written"):
        refuse_incomplete(left)


def test_text_and_json(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    atomic_write_json(path, {"a": 1.5, "b": None, "c": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1.5, "b": None, "c": "é"}
    assert path.read_text(encoding="utf-8").endswith("}\n")
    atomic_write_text(path, "again")
    assert path.read_text() == "again" and [p.name for p in tmp_path.iterdir()] == ["r.json"]
    with pytest.raises(ValueError):
        atomic_write_json(path, {"a": float("nan")})
    assert path.read_text() == "again"


def test_text_goes_through_links_and_into_pipes(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    read, write = os.pipe()
    atomic_write_text(f"/proc/self/fd/{write}" if sys.platform == "linux" else f"/dev/fd/{write}", "piped")
    os.close(write)
    assert os.read(read, 10) == b"piped"
    os.close(read)


def test_text_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(WidellmError, match="is a directory"):
        atomic_write_text(tmp_path, "x")
    with pytest.raises(WidellmError, match="missing is not a directory"):
        atomic_write_text(tmp_path / "missing" / "r.json", "x")


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b\tc")) == "a b c"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 999))) == 240

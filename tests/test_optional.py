"""Optional packages: found, missing, or broken, each said in one line; and what doctor makes of them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from widellm import doctor
from widellm.errors import MissingDependencyError
from widellm.optional import available, require


def test_installed() -> None:
    assert available("math") and available("json.decoder")
    assert require("math", "none", "this") is math
    assert require("json.decoder", "none", "this") is json.decoder


def test_missing() -> None:
    assert not available("no_such_package") and not available("no_such_package.part")
    for name in ("no_such_package", "no_such_package.part"):
        with pytest.raises(MissingDependencyError) as caught:
            require(name, "data", "a .parquet file")
        assert str(caught.value) == 'a .parquet file needs the package no_such_package: pip install "widellm[data]"'


def test_installed_but_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import what_it_lacks\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert available("broken_package")
    with pytest.raises(MissingDependencyError, match="installed but does not import .*what_it_lacks") as caught:
        require("broken_package", "data", "this")
    assert "\n" not in str(caught.value)


def test_module_without_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "half_package", type(sys)("half_package"))
    assert not available("half_package")


@pytest.mark.requirement("R44")
def test_doctor_is_json_and_names_every_backend() -> None:
    from widellm.kernels.registry import backends

    found = doctor.diagnose()
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["widellm"] and found["versions"]["torch"] and found["devices"]["cpu"] == "available"
    assert found["backends"].keys() == backends().keys()
    assert all(isinstance(works, bool) and reason for works, reason in found["backends"].values())


def test_doctor_reads_both_kinds_of_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (
        (
            "processor\t: 0\nmodel name\t: Fast 9000\nflags\t\t: fpu avx2 fma\n\nprocessor: 1\n",
            ("Fast 9000", "avx2 fma"),
        ),
        ("processor\t: 0\nFeatures\t: fp asimd sve bf16\n\n", ("", "asimd bf16 sve")),
    ):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        name, flags = doctor._cpuinfo()
        assert (name, " ".join(f for f in doctor._FLAGS if f in flags)) == expected
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError()))
    assert doctor._cpuinfo() == ("", set())

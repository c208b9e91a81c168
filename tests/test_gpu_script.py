"""benchmarks/gpu.sh at toy sizes on the CPU: every section runs, and everything is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from widellm.optional import available

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.requirement("R39")
@pytest.mark.skipif(not available("triton"), reason="triton is not installed")
def test_a_dry_run_goes_through_every_section(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "WIDELLM_CACHE": str(tmp_path / "cache")}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--dry-run", "--tune", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["errors"] == {} and found["parity"]["failed"] == [] and found["machine"]["dry_run"] is True
    sections = {"parity", "tuning", "groups of 128", "groups of 64", "groups of 32", "attention", "model"}
    assert sections <= set(found["seconds"]) and all(found[name] for name in sections)
    text = (tmp_path / "out" / "results.md").read_text()
    assert "DRY RUN" in text and "## attention" in text
    assert all((tmp_path / "out" / name).is_file() for name in found["plots"])
    assert list((tmp_path / "cache").glob("triton-*.json"))

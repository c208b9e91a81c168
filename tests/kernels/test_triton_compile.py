"""What the compiler makes of the kernels, read without a GPU; and how many variants of them there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from widellm.kernels import gpu
from widellm.optional import available

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("sm80", "sm90", "sm100", "sm120", "gfx942")
pytestmark = pytest.mark.skipif(not available("triton"), reason="triton is not installed")


def check(*arguments: str) -> None:
    """In a process of its own: the interpreter and the compiler do not fit into one."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "tools" / "triton_resources.py"), "--check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


@pytest.mark.requirement("R44")
def test_kernels_compile_for_every_target_without_spills_and_within_limits() -> None:
    check("--quick")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_all_block_sizes_compile_for_every_target(target: str) -> None:
    check("--target", target)


@pytest.mark.requirement("R36")
@pytest.mark.skipif(not gpu.availability()[0], reason=gpu.availability()[1])
def test_a_handful_of_variants_serves_all_lengths() -> None:
    """Compiled variants of each kernel over all lengths 1..8192, as Triton tells them apart; nothing is measured."""
    from widellm.kernels import triton_ops as ops
    from widellm.kernels.triton_launch import VARYING, recording

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    w, down, q, k = meta(1024, 512), meta(512, 1024), meta(1, 8192, 8, 64), meta(1, 8192, 2, 64)
    attention, ffn = meta(1, 8192, 8, dtype=torch.bool), meta(8192, 8, dtype=torch.bool)
    x, h = meta(8192, 512), meta(8192, 1024)
    variants: dict[str, set[str]] = {}
    seen: dict[int, int] = {}
    for m in range(1, 8193):
        with recording("sm90") as launches:
            ops.routed_ffn(x[:m], w, w, down, ffn[:m], "silu")
            ops.routed_in(x[:m], w, ffn[:m])
            ops.routed_out(h[:m], down, ffn[:m])
            ops.routed_attention(q[:, :m], k[:, :m], k[:, :m], attention[:, :m])
            ops.routed_attention(q[:, :1], k[:, :m], k[:, :m], attention[:, :1])
        for launch in launches:
            fixed = [launch.warps, launch.stages]
            for name, value in launch.arguments.items():
                if isinstance(value, torch.Tensor):
                    fixed += [name, value.dtype]
                elif name.isupper() or value is None:
                    fixed += [name, value]
                elif name not in VARYING and isinstance(value, int):
                    fixed += [name, value == 1, value % 16 == 0]
            variants.setdefault(launch.name, set()).add(str(fixed))
        seen[m] = len(launches)
    counts = {name: len(found) for name, found in variants.items()}
    assert max(counts.values()) <= 6, counts
    assert sum(counts.values()) <= 36, counts
    assert all(seen.values())

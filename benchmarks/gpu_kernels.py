"""The measurements behind docs/gpu.md; run it through benchmarks/gpu.sh, which says how.

Sections run in the order of their worth, each with a share of the time, and an error in one is written down and does
not stop the others. `--dry-run` must work on any machine: a test runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description="Parity and speed of the Triton kernels on this GPU.")
parser.add_argument("--out", type=Path, default=Path("gpu-results"))
parser.add_argument("--seconds", type=float, default=440, help="time for everything together")
parser.add_argument("--tune", action="store_true", help="measure block sizes first and keep them")
parser.add_argument("--dry-run", action="store_true", help="toy sizes in Triton's interpreter, on the CPU")
parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
OPTIONS = parser.parse_args()
if OPTIONS.dry_run:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton's kernels are imported
else:
    os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402

if not OPTIONS.dry_run and not torch.cuda.is_available():
    sys.exit("no GPU seen by torch: this script measures one (--dry-run checks the script itself)")

import gpu_model  # noqa: E402
import gpu_parity  # noqa: E402
import gpu_tables  # noqa: E402
import gpu_tune  # noqa: E402
from gpu_plots import draw, markdown  # noqa: E402
from gpu_timing import Machine, describe  # noqa: E402

from widellm.files import atomic_write_json, atomic_write_text  # noqa: E402


def sections(machine: Machine) -> list[tuple[str, float, Callable[[Callable[[], float]], Any]]]:
    """(name, seconds at most, function of the time left)."""

    def table(size: int) -> Callable[[Callable[[], float]], Any]:
        return lambda left: list(gpu_tables.projections(machine, size, left))

    tune: list[Any] = [("tuning", 150, lambda left: gpu_tune.run(machine, left))] if OPTIONS.tune else []
    return [
        ("parity", 120, lambda left: gpu_parity.run(machine, left)),
        *tune,
        ("groups of 128", 80, table(32 if machine.dry else 128)),
        ("attention", 90, lambda left: list(gpu_tables.attention(machine, left))),
        ("model", 90, lambda left: gpu_model.run(machine, left)),
        ("groups of 64", 60, table(16 if machine.dry else 64)),
        ("groups of 32", 60, table(8 if machine.dry else 32)),
    ]


def main() -> int:
    began = time.monotonic()
    device = torch.device("cpu" if OPTIONS.dry_run else "cuda")
    dtype = torch.float32 if OPTIONS.dry_run else getattr(torch, OPTIONS.dtype)
    torch.manual_seed(0)
    machine = Machine(device, dtype, OPTIONS.dry_run)
    OPTIONS.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": describe(machine), "errors": {}, "seconds": {}}
    for name, seconds, work in sections(machine):
        start = time.monotonic()
        end = min(start + seconds, began + OPTIONS.seconds)

        def left(end: float = end) -> float:
            return end - time.monotonic()

        if left() <= 0:
            results["errors"][name] = "not run: out of time"
            continue
        print(f"{name} ...", flush=True)
        try:
            results[name] = work(left)
        except KeyboardInterrupt:
            results["errors"][name] = "interrupted"
            break
        except Exception as error:
            results["errors"][name] = f"{type(error).__name__}: {str(error)[:500]}"
            traceback.print_exc()
        results["seconds"][name] = round(time.monotonic() - start, 1)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        atomic_write_json(OPTIONS.out / "results.json", results)
    results["seconds"]["all"] = round(time.monotonic() - began, 1)
    try:
        results["plots"] = draw(results, OPTIONS.out)
    except Exception as error:
        results["errors"]["plots"] = f"{type(error).__name__}: {error}"
    atomic_write_json(OPTIONS.out / "results.json", results)
    text = markdown(results)
    atomic_write_text(OPTIONS.out / "results.md", text)
    print(text)
    print(json.dumps(results["errors"], indent=1))
    return int(bool(results["errors"]) or bool(results.get("parity", {}).get("failed", ["no parity"])))


if __name__ == "__main__":
    sys.exit(main())

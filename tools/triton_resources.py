"""Compile every Triton kernel ahead of time, without a GPU, and read registers, spills and shared memory.

    python tools/triton_resources.py              print what each launch at the default block sizes needs
    python tools/triton_resources.py --check      compare with tests/kernels/triton_resources.json; exit code 1 if worse
    python tools/triton_resources.py --update     write that file
    python tools/triton_resources.py --target sm90 ...   one target only
    python tools/triton_resources.py --quick ...         each kernel once, not at all block sizes

The launches are those that the ops make on meta tensors of Llama-3.1-8B's shapes: what is compiled here is what runs.
It must not run with TRITON_INTERPRET=1: a process has either the interpreter or the compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "TRITON_DEFAULT_FP_FUSION", "1"
)  # a multiply and an add in one rounding, as on every release so far

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from widellm.kernels import triton_ops as ops
from widellm.kernels.triton_launch import TARGETS, VARYING, Launch, device_of, recording
from widellm.kernels.triton_tuning import FEW, candidates

LIMITS = Path(__file__).resolve().parents[1] / "tests" / "kernels" / "triton_resources.json"
SHARED = {"sm80": 163, "sm90": 227, "sm100": 227, "sm120": 99, "gfx942": 64}
"""KiB of shared memory that one program can have."""
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
D, F, HEADS, KV, DIM = 4096, 14336, 32, 8, 128


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def calls(quick: bool) -> Iterator[Tensor]:
    """Every op, at every number of rows that has its own block sizes; only shapes matter. quick: every kernel."""
    sizes = {128: (1, 4096)} if quick else {128: (1, 24, 64, 256, 4096), 64: (1, 4096), 32: (1, 4096)}
    for size, many in sizes.items():
        for m in many:
            keep, x, w = meta(m, F // size, dtype=torch.bool), meta(m, D), meta(F, D)
            yield ops.routed_ffn(x, w, w, meta(F, D).t(), keep, "silu")
    for m in (4096,) if quick else (1, 4096):
        keep = meta(m, 8, dtype=torch.bool)
        yield ops.routed_in(meta(m, D), meta(D, D), keep)
        yield ops.routed_out(meta(m, D), meta(D, D), keep)
        if m > FEW:  # the kernel, also where the vendor's library is the default
            yield ops.project_out(meta(m, D), meta(D, D), keep, None, candidates("out", device_of(keep), m)[0])
        yield ops.routed_keep(meta(m, D), meta(16, D, dtype=torch.float32), meta(112, 16, dtype=torch.float32),
                              meta(112, dtype=torch.float32), 0.0)  # fmt: skip
    if not quick:
        yield ops.routed_in(meta(300, D), meta(D, D), meta(300, 8, dtype=torch.bool))
    for tq in (1, 4096) if quick else (1, 4, 16, 300, 4096):
        q, k, keep = meta(1, tq, HEADS, DIM), meta(1, 8192, KV, DIM), meta(1, tq, 8, dtype=torch.bool)
        yield ops.routed_attention(q, k, k, keep)
    if quick:
        return
    q, k = meta(2, 1, HEADS, DIM), meta(2, 8192, KV, DIM)
    long, keep, one = meta(2, 4096, HEADS, DIM), meta(2, 4096, 8, dtype=torch.bool), meta(2, 1, 8, dtype=torch.bool)
    start, pages = meta(2, dtype=torch.int32), meta(2, 64, dtype=torch.int32)
    yield ops.routed_attention(long, k, k, keep, start=start)
    yield ops.routed_attention(long, k, k, keep, meta(2, 1, 4096, 8192, dtype=torch.bool))
    yield ops.routed_attention(q, k, k, one, meta(2, 1, 1, 8192, dtype=torch.bool))
    pool = meta(512, 16, KV, DIM)
    yield ops.routed_attention(q, pool, pool, one, table=pages, lengths=start)
    yield ops.routed_attention(long, pool, pool, keep, table=pages, lengths=start)


def specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """(signature, constants, alignments) as Triton derives them from the arguments of a call."""
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        if name.isupper() or value is None or (name not in VARYING and not isinstance(value, Tensor) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], attributes[(index,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if value < 1 << 31 else "i64"
            if name not in VARYING and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def describe(launch: Launch, constants: dict[str, Any]) -> str:
    """A short name of a variant: what tells it from the others of its kernel."""
    shown = ("SIZE", "BM", "BN", "BK", "TILE", "PAGE", "GROUPS", "LISTS")
    words = [f"{name.lower()}{constants[name]}" for name in shown if constants.get(name)]
    words += [n for n in ("gate", "mask", "low", "table") if isinstance(launch.arguments.get(n), Tensor)]
    words += [f"of {launch.arguments.get('groups')}"] * (launch.name in ("count_kernel", "fill_kernel"))
    words += ["row-major" if launch.arguments.get("stride_w_n") == 1 else ""] * (launch.name == "out_of_groups")
    return " ".join(filter(None, [launch.name, *words]))


def resources(launch: Launch, target: str) -> dict[str, int]:
    """Compile; registers a thread, bytes spilled a thread, bytes of shared memory a program."""
    signature, constants, attributes = specialised(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    where = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[2:]), 32)
    compiled = triton.compile(source, target=where, options={"num_warps": launch.warps, "num_stages": launch.stages})
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        found = {n: int(re.findall(rf"\.{n}:\s+(\d+)", text)[-1]) for n in ("vgpr_count", "vgpr_spill_count")}
        return {
            "registers": found["vgpr_count"],
            "spills": found["vgpr_spill_count"],
            "shared": compiled.metadata.shared,
        }
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(n) for n in re.findall(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)[0])
    return {"registers": registers, "spills": stack + local, "shared": compiled.metadata.shared}


def measure(target: str, quick: bool = False) -> dict[str, dict[str, int]]:
    """Resources of every variant on `target`, by its name."""
    with recording(target) as launches:
        for _ in calls(quick):
            pass
    found: dict[str, dict[str, int]] = {}
    seen = set()
    for launch in launches:
        signature, constants, attributes = specialised(launch)
        key = str((launch.name, signature, constants, attributes, launch.warps, launch.stages))
        if key not in seen:
            seen.add(key)
            name = describe(launch, constants)
            found[name if name not in found else f"{name} #{len(seen)}"] = resources(launch, target)
    return found


def worse(target: str, found: dict[str, dict[str, int]], limits: dict[str, dict[str, int]]) -> list[str]:
    """What is not as good as the stored limits: a spill, more registers or shared memory, a variant that is new."""
    problems = []
    for name, needs in found.items():
        if needs["spills"]:
            problems.append(f"{target} {name}: spills {needs['spills']} bytes a thread")
        if needs["shared"] > SHARED[target] * 1024:
            problems.append(f"{target} {name}: {needs['shared']} bytes of shared memory do not fit")
        if limits and name not in limits:
            problems.append(f"{target} {name}: has no stored limits: run tools/triton_resources.py --update")
        elif limits:
            for what in ("registers", "shared"):
                if needs[what] > limits[name][what]:
                    problems.append(f"{target} {name}: {what} {needs[what]}, the limit is {limits[name][what]}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    stored = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    if not options.update and stored.get("triton") != triton.__version__:
        print(
            f"limits are of triton {stored.get('triton')}, this is {triton.__version__}: only what must hold is checked"
        )
        stored = {}
    problems = []
    for target in options.target or TARGETS:
        found = measure(target, options.quick)
        problems += worse(target, found, stored.get(target, {}))
        if options.update:
            stored[target] = found
        if not options.check:
            for name, needs in found.items():
                print(f"{target:7} {name:60} {needs['registers']:4} registers {needs['spills']:4} spilled "
                      f"{needs['shared']:7} bytes shared")  # fmt: skip
    if options.update:
        stored["triton"] = triton.__version__
        LIMITS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    print("\n".join(problems))
    return int(bool(problems) and not options.update)


if __name__ == "__main__":
    sys.exit(main())

"""Block sizes: shipped defaults per kind of GPU, and a table of measured ones that is made only when asked for.

A choice depends on the kernel, the power-of-two bucket of rows, the group size and the bytes of a number; never on the
exact number of rows, so that all lengths share a handful of compiled variants. Nothing is measured during a forward.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from widellm._version import __version__
from widellm.errors import ConfigError
from widellm.files import atomic_write_json
from widellm.kernels.triton_launch import Device, power_of_two
from widellm.sources.gguf import cache_directory

FORMAT = 1
FEW = 64
"""Most rows of the decode kernels, which hold all rows in one tile."""
KINDS = ("ffn_in", "in", "out", "attention", "irregular", "decode")
"""What has block sizes: gate and up, one projection in, a projection out, attention of many rows, the same with a mask
tensor or pages, attention over a cache."""
_ATTENTION = KINDS[3:]


class Config(NamedTuple):
    """Block sizes of one kernel: rows, outputs (keys, for attention), inputs; warps; pipeline stages."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    waves: int = 1
    """Programs of a persistent kernel per multiprocessor."""


DENSE = Config(0, 0, 0, 0, 0)
"""For "out" of many rows: zero what was dropped and leave the product to the vendor's library."""

# rows up to -> block sizes. Up to FEW rows, bm is the power of two at or above the rows. Chosen by the resources that
# the compiler reports (tests/kernels/triton_resources.json): no spills, shared memory that fits. Not measured on a GPU.
_FEW = {16: Config(16, 16, 256, 4, 4), 32: Config(32, 16, 256, 4, 3), 64: Config(64, 16, 128, 4, 4)}
_FEW_OUT = {16: Config(16, 16, 128, 4, 6), 32: Config(32, 16, 128, 4, 5), 64: Config(64, 16, 128, 4, 4)}
_ANY = 1 << 30
_BASE: dict[str, dict[int, Config]] = {
    "ffn_in": {**_FEW, 512: Config(64, 64, 64, 4, 3, 2), _ANY: Config(128, 64, 64, 8, 3, 2)},
    "in": {**_FEW, 512: Config(64, 128, 64, 4, 3, 2), _ANY: Config(128, 128, 64, 8, 3)},
    "out": {**_FEW_OUT, 512: Config(64, 128, 64, 4, 3), _ANY: Config(128, 128, 64, 8, 3)},
    "attention": {512: Config(64, 32, 0, 4, 3), _ANY: Config(128, 32, 0, 8, 3)},
    "irregular": {_ANY: Config(64, 32, 0, 8, 2)},
    "decode": {16: Config(16, 32, 0, 4, 4), 32: Config(32, 32, 0, 4, 3), 64: Config(64, 64, 0, 8, 2)},
}
# Where tensor cores are that fast, many rows with masks of their own keep every group between them, and a product
# without gathers is what the vendor's library does best.
_LARGE: dict[str, dict[int, Config]] = {
    **_BASE,
    "ffn_in": {**_FEW, 512: _BASE["ffn_in"][512], _ANY: Config(128, 128, 64, 8, 3)},
    "in": {**_FEW, 512: _BASE["in"][512], _ANY: Config(128, 256, 64, 8, 3)},
    "out": {**_FEW_OUT, 512: _BASE["out"][512], _ANY: DENSE},
    "attention": {512: Config(64, 64, 0, 4, 2), _ANY: Config(128, 64, 0, 8, 2)},
}
# 99 KB of shared memory
_SMALL: dict[str, dict[int, Config]] = {
    **_BASE,
    "in": {**_FEW, 512: Config(64, 64, 64, 4, 3, 2), _ANY: Config(128, 128, 32, 8, 3)},
    "out": {**_FEW_OUT, 512: Config(64, 64, 64, 4, 3), _ANY: Config(128, 128, 32, 8, 4)},
}
# 64 KB of shared memory, and wavefronts of 64: as many warps are twice as many threads
_AMD_FEW = {limit: config._replace(stages=3) for limit, config in _FEW.items()}
_AMD: dict[str, dict[int, Config]] = {
    "ffn_in": {**_AMD_FEW, 512: Config(64, 64, 64, 4, 2, 2), _ANY: Config(128, 64, 64, 4, 2)},
    "in": {**_AMD_FEW, 512: Config(64, 64, 64, 4, 2, 2), _ANY: Config(128, 128, 64, 4, 2)},
    "out": {**_FEW_OUT, 512: Config(64, 64, 64, 4, 2), _ANY: Config(128, 128, 64, 4, 2)},
    "attention": {512: Config(64, 64, 0, 4, 1), _ANY: Config(128, 64, 0, 4, 1)},
    "irregular": {_ANY: Config(64, 32, 0, 4, 1)},
    "decode": {16: Config(16, 64, 0, 4, 2), 32: Config(32, 64, 0, 4, 2), 64: Config(64, 64, 0, 4, 2)},
}
DEFAULTS: dict[str, dict[str, dict[int, Config]]] = {
    "sm80": _BASE,
    "sm90": _LARGE,
    "sm100": _LARGE,
    "sm120": _SMALL,
    "gfx942": _AMD,
}


def candidates(kind: str, device: Device, rows: int) -> list[Config]:
    """What `tune` tries for this kind and number of rows: the default and a few neighbours of it."""
    first = _default(kind, device, rows)
    first = _BASE[kind][_ANY] if first == DENSE else first
    found = [first]
    if kind in _ATTENTION:
        found += [
            first._replace(bn=first.bn * 2),
            first._replace(bn=first.bn // 2),
            first._replace(stages=first.stages + 1),
        ]
    elif rows <= FEW:
        found += [
            first._replace(bn=32),
            first._replace(bk=first.bk // 2, stages=first.stages + 2),
            first._replace(bn=32, bk=first.bk // 2),
        ]
    else:
        found += [
            first._replace(bm=192 - first.bm, warps=12 - first.warps),
            first._replace(bn=first.bn // 2),
            first._replace(bk=32, stages=first.stages + 2),
            first._replace(stages=first.stages + 1, waves=1),
        ]
        found += [DENSE] if kind == "out" else []
    return list(dict.fromkeys(found))


def _default(kind: str, device: Device, rows: int) -> Config:
    table = DEFAULTS[device.target][kind]
    return next((table[limit] for limit in sorted(table) if rows <= limit), table[max(table)])


def choose(kind: str, device: Device, rows: int, size: int, inputs: int, itemsize: int) -> Config:
    """Block sizes for `rows` rows, groups of `size` channels (head size, for attention), `inputs` summed over.

    From the measured table where there is one, else the default; cut down to what the shapes can use.
    """
    measured = active_table(device.target).get(key(kind, rows, size, itemsize))
    config = measured or _default(kind, device, rows)
    return config if config == DENSE else fit(config, kind, size, inputs, itemsize)


def fit(config: Config, kind: str, size: int, inputs: int, itemsize: int) -> Config:
    """`config` with tiles no wider than the group and the inputs, and for float32 half as deep."""
    if kind in _ATTENTION:
        small = config._replace(bm=min(config.bm, 64), bn=max(16, config.bn * 2 // itemsize))
        return small if itemsize > 2 else config
    deep = max(16, min(config.bk * 2 // itemsize, power_of_two(inputs)))
    if kind == "out":
        return config._replace(bk=max(16, _inside(deep, size)))
    return config._replace(bn=max(16, _inside(config.bn, size)), bk=deep)


def _inside(block: int, size: int) -> int:
    """The largest power of two up to `block` that divides `size`; where that is below 16, tiles that mask the rest."""
    divides = math.gcd(block, size)
    return divides if divides >= 16 else min(block, power_of_two(size))


def check(config: Config, kind: str, size: int) -> Config:
    """Return `config`, or raise ConfigError if a tile would straddle groups or is not one that Triton can have.

    A tile of channels must divide the group; only where no power of two from 16 up does, tiles mask the rest.
    """
    sizes = (
        {"bm": config.bm, "bn": config.bn}
        if kind in _ATTENTION
        else dict(zip(("bm", "bn", "bk"), config, strict=False))
    )
    for name, value in sizes.items():
        if value < 16 or value & (value - 1):
            raise ConfigError(f"block size {name} of {kind!r} must be a power of two from 16 up, got {value}")
    block = config.bk if kind == "out" else config.bn
    widest = max(16, power_of_two(size))
    if kind not in _ATTENTION and (block > widest or (size % block and size % 16 == 0)):
        raise ConfigError(f"a block of {block} channels does not fit groups of {size}: it must divide {size}")
    return config


def key(kind: str, rows: int, size: int, itemsize: int) -> str:
    """The table's name of a case: `ffn_in rows 1024 size 128 bytes 2`."""
    return f"{kind} rows {power_of_two(rows)} size {size} bytes {itemsize}"


def machine() -> dict[str, Any]:
    """What a measured choice depends on; a table with anything else in its head is not used."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "widellm": __version__}
    return {"format": FORMAT, "device": name, **versions}


def default_path() -> Path:
    """The table's file for the current device, in the user's cache directory."""
    digest = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:12]
    return cache_directory() / f"triton-{digest}.json"


def read(path: Path) -> tuple[dict[str, Config], str]:
    """(the table, "") or ({}, why it cannot be used). Never raises: a bad table is as good as none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "not tuned on this machine: shipped defaults are used"
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read ({type(error).__name__}): shipped defaults are used"
    if not isinstance(data, dict) or data.get("machine") != machine():
        return {}, f"{path} is of another machine or version: shipped defaults are used"
    try:
        table = {}
        for name, values in data["configs"].items():
            kind, _, _, _, size, _, _ = name.split()
            config = Config(*(int(v) for v in values))
            table[name] = config if config == DENSE and kind == "out" else check(config, kind, int(size))
        return table, ""
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return {}, f"{path} is damaged ({error}): shipped defaults are used"


def write(table: Mapping[str, Config], path: Path) -> None:
    """Write the table in one step. Raises WidellmError when the disk is full or not writable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_json(path, {"machine": machine(), "configs": {k: list(c) for k, c in sorted(table.items())}})


@functools.lru_cache(maxsize=8)
def active_table(target: str) -> dict[str, Config]:
    """This machine's measured table, read once a process; empty where there is none."""
    return read(default_path())[0]


def tune(
    cases: Mapping[str, tuple[list[Config], Callable[[Config], float]]],
    path: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Config]:
    """Measure, add to the table on disk, and use it from now on. Returns the whole table.

    cases: `key(...)` -> (candidates, function that gives the milliseconds of one). A candidate that raises (too much
    shared memory for this GPU) is passed over.
    """
    path = path or default_path()
    table = dict(read(path)[0])
    total, done = sum(len(configs) for configs, _ in cases.values()), 0
    for name, (configs, measure) in cases.items():
        times: dict[Config, float] = {}
        for config in configs:
            try:
                times[config] = measure(config)
            except (RuntimeError, ValueError, triton.runtime.errors.OutOfResources):
                pass
            done += 1
            progress(done, total)
        if times:
            table[name] = min(times, key=times.__getitem__)
    write(table, path)
    active_table.cache_clear()
    return table

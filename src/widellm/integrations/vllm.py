"""The vLLM plugin's entry point, and all of it that needs no vLLM: what a directory says, and how it is sharded.

A routed model is served as a quantisation method of vLLM: vLLM's own model classes stay what they are, and the method
that each linear layer asks for at construction is ours (`vllm_layers`). So there is nothing to write per model family.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.config import KINDS, WidthConfig, check_budget
from widellm.errors import BackendError, CheckpointError, ConfigError
from widellm.modeling.checkpoint import form_of
from widellm.modeling.width_file import ROUTER_PARTS, WEIGHTS_FILE, WidthFile, read_width
from widellm.optional import require
from widellm.routing.budget import Dial

METHOD = "widellm"
"""`quant_method` in config.json, the value of --quantization, and our key in --additional-config."""
MINIMUM = (0, 32)
"""The oldest vLLM that is tested."""

# Path inside a decoder layer, as vLLM names its modules -> (kind of sub-layer, does it lead into the groups?)
PLACES = {
    "self_attn.qkv_proj": ("attention", True),
    "self_attn.o_proj": ("attention", False),
    "mlp.gate_up_proj": ("ffn", True),
    "mlp.down_proj": ("ffn", False),
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_ROUTER = re.compile(r"^layers\.(\d+)\.(attention|ffn)\.router\.(down|up|bias)$")
NOT_VLLMS = r"^(model\.)?layers\.\d+\.(attention|self_attn|ffn)\.router\.(down|up|bias)$|^dial\.|^permutations$"
"""Names in the directory's safetensors files that are read here and that vLLM's own loading passes over. Its Mistral
rewrites names that look like Mistral's own format before it asks: hence the variants."""


def register() -> None:
    """Entry point of `vllm.general_plugins`: makes the quantisation method known. Called in every process, repeatedly.

    Raises BackendError when vLLM is too old to be extended at all; other old ones are refused when a routed directory
    is served, so that they go on serving other models.
    """
    quantization = require("vllm.model_executor.layers.quantization", "vllm", "the vLLM plugin")
    if not hasattr(quantization, "register_quantization_config"):
        check_version(require("vllm", "vllm", "the vLLM plugin").__version__)
    if METHOD in quantization.QUANTIZATION_METHODS:
        return
    from widellm.integrations.vllm_config import WidellmConfig

    quantization.register_quantization_config(METHOD)(WidellmConfig)


def check_version(version: str) -> None:
    """Raise BackendError when this vLLM is older than MINIMUM; a version without numbers passes."""
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = tuple(map(int, found.groups())) if found else MINIMUM
    if numbers < MINIMUM and numbers != (0, 1):  # 0.1.dev is what a build from source calls itself
        wanted = ".".join(map(str, MINIMUM))
        raise BackendError(f"vLLM {version} is too old, widellm serves with {wanted} or newer: pip install -U vllm")


def place_of(prefix: str) -> tuple[int, str] | None:
    """(decoder layer, path inside it) of a module that vLLM calls `prefix`; None outside the decoder layers."""
    found = _LAYER.search(prefix)
    return (int(found[1]), found[2]) if found else None


@dataclass(frozen=True)
class RouterShard:
    """One router, with the groups of one tensor-parallel rank; see `routing.router.Router`."""

    down: Tensor
    """float32 [r, D], the same on every rank."""
    up: Tensor
    """float32 [G / ranks, r]"""
    bias: Tensor
    """float32 [G / ranks]"""


@dataclass(frozen=True)
class Plan:
    """What one routed directory asks of a server."""

    read: WidthFile
    budget: float
    groups: dict[tuple[str, int], int]
    """(kind, decoder layer) -> number of groups, of the sub-layers that have a router."""
    dial: Dial | None
    """Rows in the order of `groups`."""

    def __post_init__(self) -> None:
        self.thresholds(self.budget)

    @property
    def folder(self) -> Path:
        """Where it was read."""
        return self.read.folder

    @property
    def config(self) -> WidthConfig:
        """What width_config.json says."""
        return self.read.config

    def thresholds(self, budget: float) -> dict[tuple[str, int], float | None]:
        """Threshold of each sub-layer at `budget`; all None at 1.0. ConfigError where there is none."""
        if check_budget(budget) == 1.0 or self.dial is None:
            if budget < 1.0:
                raise ConfigError(f"{self.folder} has no dial: calibrate it (widellm prune) to serve below budget 1.0")
            return dict.fromkeys(self.groups)
        return dict(zip(self.groups, self.dial.thresholds_at(budget), strict=True))

    def group_size(self, kind: str) -> int:
        """Query heads or FFN channels per group."""
        return self.config.head_group_size if kind == "attention" else self.config.ffn_group_size

    def router(self, kind: str, layer: int, hidden: int, rank: int, ranks: int) -> RouterShard:
        """Read one router and cut it for one of `ranks` tensor-parallel ranks.

        Raises ConfigError when the groups do not divide, CheckpointError when a tensor does not fit or is not finite.
        """
        per_rank = split(self.groups[kind, layer], ranks, f"{kind} of layer {layer}")
        parts = {part: self.read.tensors[_name(kind, layer, part)] for part in ROUTER_PARTS}
        groups, inner = self.groups[kind, layer], parts["down"].shape[0]
        for part, shape in (("down", (inner, hidden)), ("up", (groups, inner)), ("bias", (groups,))):
            if parts[part].shape != shape or parts[part].dtype != torch.float32:
                raise CheckpointError(
                    f"{self.folder / WEIGHTS_FILE}: {_name(kind, layer, part)} is {parts[part].dtype} "
                    f"{list(parts[part].shape)}, expected torch.float32 {list(shape)}: it is of another base model"
                )
            if not bool(torch.isfinite(parts[part]).all()):
                raise CheckpointError(f"{self.folder / WEIGHTS_FILE}: {_name(kind, layer, part)} is damaged")
        own = slice(rank * per_rank, (rank + 1) * per_rank)
        return RouterShard(parts["down"], parts["up"][own].clone(), parts["bias"][own].clone())


def split(groups: int, ranks: int, what: str) -> int:
    """Groups of each tensor-parallel rank; ConfigError when they do not divide."""
    if groups % ranks:
        fits = ", ".join(str(n) for n in range(1, groups + 1) if groups % n == 0)
        raise ConfigError(
            f"{what} has {groups} groups, which tensor parallel size {ranks} does not divide: "
            f"use one of {fits}, or calibrate with smaller groups"
        )
    return groups // ranks


def read_plan(folder: str | Path, settings: Any = None) -> Plan:
    """Read a routed directory for serving. `settings`: our part of --additional-config, `{"budget": 0.5}` or nothing.

    Raises ConfigError for unknown settings and impossible budgets, CheckpointError for a directory that is not routed,
    is damaged, or comes from a newer version.
    """
    if not isinstance(settings or {}, dict) or set(settings or {}) - {"budget"}:
        raise ConfigError(f'additional_config["{METHOD}"] takes {{"budget": number}}, got {settings!r}')
    read = read_width(folder)
    if form_of(read.folder) == "adapter":
        raise CheckpointError(
            f"{read.folder} is an adapter, and vLLM needs the base weights beside it: "
            f"widellm export {read.folder} OUT, then serve OUT"
        )
    config = read.config
    if config.router_input != "normed" or config.decision != "sublayer":
        raise ConfigError(
            f"{read.folder} has router_input={config.router_input} and decision={config.decision}, which vLLM's layers "
            f"cannot give: serve one whose routers read their own sub-layer's input (recipe default)"
        )
    found = {match.groups() for match in map(_ROUTER.match, read.tensors) if match}
    kinds = [kind for kind in KINDS if any(kind == of for _, of, _ in found)]
    places = [(kind, layer) for layer in range(config.num_hidden_layers) for kind in kinds]
    missing = [
        _name(*place, part) for place in places for part in ROUTER_PARTS if _name(*place, part) not in read.tensors
    ]
    if not found or missing or len(found) != len(ROUTER_PARTS) * len(places):
        raise CheckpointError(f"{read.folder / WEIGHTS_FILE}: missing routers {missing[:3] or 'of every layer'}")
    groups = {place: read.tensors[_name(*place, "bias")].shape[0] for place in places}
    dial = None
    if "dial.budgets" in read.tensors:
        dial = Dial(read.tensors["dial.budgets"], read.tensors["dial.thresholds"])
        if dial.thresholds.shape[0] != len(groups):
            raise CheckpointError(
                f"{read.folder / WEIGHTS_FILE}: dial.thresholds has {dial.thresholds.shape[0]} rows, "
                f"expected {len(groups)}"
            )
    budget = (settings or {}).get("budget", config.provenance.get("budget", 1.0))
    return Plan(read, check_budget(budget), groups, dial)


def _name(kind: str, layer: int, part: str) -> str:
    return f"layers.{layer}.{kind}.router.{part}"


def widen(keep: Tensor, group_width: int, outputs: int) -> Tensor | None:
    """Extend keep `[M, G]` over the first outputs of a fused projection to all of its `outputs`; the rest is kept.

    group_width: outputs per group. None when the rest is not a whole number of such groups.
    """
    rest = outputs - keep.shape[1] * group_width
    if rest % group_width:
        return None
    return torch.cat((keep, keep.new_ones(keep.shape[0], rest // group_width)), dim=1) if rest else keep

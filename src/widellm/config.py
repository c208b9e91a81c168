"""What describes a routed model's structure, saved as `width_config.json` beside the weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from widellm.errors import CheckpointError, ConfigError

FORMAT_VERSION = 1
KINDS = ("attention", "ffn")
ROUTER_INPUTS = ("normed", "residual")
DECISIONS = ("sublayer", "layer")


@dataclass(frozen=True)
class WidthConfig:
    """Structure of a width-routed model: enough, alone, to rebuild every module that widellm adds."""

    model_type: str
    """Family of the base model, `config.model_type` in transformers (`llama`, `qwen3`, ...)."""

    num_hidden_layers: int
    """Layers of the base model; each has one attention and one FFN router."""

    head_group_size: int = 1
    """Consecutive query heads that one attention decision covers; divides the number of query heads."""

    ffn_group_size: int = 64
    """Consecutive (after regrouping) FFN channels that one decision covers; divides `intermediate_size`."""

    router_rank: int = 32
    """Width of the router's inner map; capped at the number of groups, where more changes nothing."""

    router_input: str = "normed"
    """What routers read: "normed", the sub-layer's own input; or "residual", the stream before its norm, as the
    published method does (their inner width is not capped then)."""

    decision: str = "sublayer"
    """Who decides: every "sublayer" by itself; or the "layer", where the FFN takes over its attention's decision (both
    must be one group)."""

    base: dict[str, str] = field(default_factory=dict)
    """`name` the dense model was loaded from, and `fingerprint` of its weights as they are saved here."""

    provenance: dict[str, Any] = field(default_factory=dict)
    """Versions, text source, token-id digest, seed and settings that produced the routers."""

    format_version: int = FORMAT_VERSION
    """Version of the directory's format; a newer one than this package knows is refused."""

    kinds: tuple[str, ...] = KINDS
    """What is routed: "attention", "ffn" or both. An FFN of experts has routers of its own: attention only."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "head_group_size", "ffn_group_size", "router_rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not isinstance(self.kinds, (list, tuple)) or not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ConfigError(f"kinds must name one or both of {', '.join(KINDS)}, got {self.kinds!r}")
        object.__setattr__(self, "kinds", tuple(kind for kind in KINDS if kind in self.kinds))
        if self.decision == "layer" and self.kinds != KINDS:
            raise ConfigError(f"decision layer is one for {' and '.join(KINDS)}, and only {self.kinds[0]} is routed")
        for name, known in (("router_input", ROUTER_INPUTS), ("decision", DECISIONS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    def replace(self, **changes: Any) -> WidthConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """JSON text of all fields, keys in the order of their declaration."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def digest(self) -> str:
        """Short SHA-256 of the JSON text, to name a configuration in reports."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @classmethod
    def from_json(cls, text: str, where: str = "width_config.json") -> WidthConfig:
        """Parse what `to_json` wrote.

        Raises CheckpointError when the text is not such JSON, names unknown or lacks needed fields, or comes from a
        newer version of the format.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{where} is not valid JSON ({error}): it is damaged, save the model again") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{where} holds {type(raw).__name__}, expected an object; save the model again")
        version = raw.get("format_version")
        if not isinstance(version, int) or isinstance(version, bool):
            raise CheckpointError(f"{where} has format_version {version!r}, expected a whole number; save it again")
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{where} has format_version {version}, this widellm reads up to {FORMAT_VERSION}: upgrade widellm"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise CheckpointError(f"{where} has unknown fields {unknown}, expected only {sorted(known)}")
        try:
            return cls(**raw)
        except TypeError as error:
            raise CheckpointError(f"{where} lacks a field ({error}); save the model again") from None
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}") from None


def check_budget(budget: float) -> float:
    """Return `budget` as a float, or raise ConfigError unless 0 < budget <= 1."""
    try:
        value = float(budget)
    except (TypeError, ValueError):
        raise ConfigError(f"budget must be a number in (0, 1], got {budget!r}") from None
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"budget must be in (0, 1] (share of routable work that may be spent), got {budget!r}")
    return value

"""How to train, as data. Every recipe gives the same kind of checkpoint."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from widellm.config import DECISIONS, ROUTER_INPUTS, check_budget
from widellm.errors import ConfigError

STAGES = ("routers", "recover")
STARTS = ("calibrated", "random", "static")
SCORES = ("calibrated", "magnitude", "wanda", "flap")
UNITS = ("groups", "work")


def _check(settings: Any, name: str, least: float, most: float = math.inf, kind: Any = (int, float)) -> None:
    """Raise ConfigError unless a field is a number from `least` to `most`."""
    value = getattr(settings, name)
    if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ConfigError(f"{name} must be {what} {limits}, got {value!r}")


@dataclass(frozen=True)
class Optimisation:
    """How one stage learns."""

    router_lr: float = 1e-3
    """Learning rate of the routers; 0 freezes them."""
    lora_lr: float = 0.0
    """Learning rate of the adapters; 0: there are none."""
    weight_decay: float = 0.01
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises; then a cosine to 0."""
    batch_tokens: int = 2048
    """Tokens in an optimiser step, over all processes."""
    clip: float = 1.0
    """Largest norm of the gradient."""

    def __post_init__(self) -> None:
        for name in ("router_lr", "lora_lr", "weight_decay"):
            _check(self, name, 0.0)
        _check(self, "warmup", 0.0, 1.0)
        _check(self, "batch_tokens", 1, kind=int)
        _check(self, "clip", 1e-9)


@dataclass(frozen=True)
class Recipe:
    """Everything that makes one method differ from another."""

    name: str
    start: str = "calibrated"
    """"calibrated": as the directory has it; "random": the dense weights in their own order and random routers;
    "static": the directory's groups, but the same ones for all tokens."""
    router_input: str = "normed"
    decision: str = "sublayer"
    whole_modules: bool = False
    """One group per attention and per FFN."""
    score: str = "calibrated"
    """What ranks the groups of a static start: mean importance of the routers, or "magnitude", "wanda", "flap"."""
    routers: Optimisation = Optimisation()
    """Stage 1."""
    recover: Optimisation = Optimisation(router_lr=1e-3, lora_lr=1e-3)
    """Stage 2."""
    budgets: tuple[float, float] | None = (0.35, 0.95)
    """Each batch draws its budget from this range and meets it; None: the threshold is 0 and `penalty` steers."""
    label_share: float = 0.0
    """Weight of the language-model loss; the rest is distillation from the same weights, dense."""
    kl_temperature: float = 1.0
    feature_weight: float = 0.0
    """Weight of the relative squared error of hidden states after each layer."""
    penalty: float = 0.0
    """Weight of |target - skipped|, for recipes that have no thresholds to steer."""
    penalty_unit: str = "groups"
    """"groups" or "work"; see `losses.skip_penalty`."""
    target: float | tuple[float, float] = 0.5
    """Share to be skipped, with `penalty`: of both kinds together, or (attention, FFN)."""
    noise: float = 0.5
    """Scale of the logistic noise on logits."""
    temperature: tuple[float, float] = (1.0, 1.0)
    """tau at the first and the last step, linear between."""
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    first_share: float = 0.0
    """Share of a comparison's tokens that go to stage 1; the rest go to stage 2."""
    up_lr_factor: float = 1.0
    """Learning rate of the routers' second map over that of the first (weight decay is divided by it). 2 makes one
    logit per group, the difference of two, move as the two classes of the published router do under AdamW."""

    def __post_init__(self) -> None:
        names = {
            "start": STARTS,
            "score": SCORES,
            "router_input": ROUTER_INPUTS,
            "decision": DECISIONS,
            "penalty_unit": UNITS,
        }
        for name, known in names.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"a recipe's {name} is one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("budgets", "temperature"):
            pair = getattr(self, name)
            if (pair is not None or name != "budgets") and not (isinstance(pair, tuple) and len(pair) == 2):
                raise ConfigError(f"a recipe's {name} is two numbers, got {pair!r}")
            for value in pair or ():
                if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
                    raise ConfigError(f"a recipe's {name} is two numbers above 0, got {pair!r}")
        for budget in self.budgets or ():
            check_budget(budget)
        for name in ("label_share", "first_share", "lora_dropout"):
            _check(self, name, 0.0, 1.0)
        for name in ("feature_weight", "penalty", "noise"):
            _check(self, name, 0.0)
        for name in ("kl_temperature", "up_lr_factor", "lora_alpha"):
            _check(self, name, 1e-9)
        _check(self, "lora_rank", 1, kind=int)
        targets = self.target if isinstance(self.target, tuple) else (self.target,)
        if len(targets) > 2 or not all(isinstance(t, (int, float)) and 0 <= t <= 1 for t in targets):
            raise ConfigError(
                f"a recipe's target is a share in [0, 1], or one of attention and one of FFN: {self.target!r}"
            )

    def stage(self, name: str) -> Optimisation:
        """The settings of a stage."""
        if name not in STAGES:
            raise ConfigError(f"stage must be one of {', '.join(STAGES)}, got {name!r}")
        return self.routers if name == "routers" else self.recover

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some settings changed; ConfigError for one that does not exist."""
        known = {f.name for f in dataclasses.fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ConfigError(f"a recipe has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)


_PUBLISHED = Optimisation(router_lr=2e-3, batch_tokens=16 * 4096)

WIDE = Recipe(
    "wide",
    start="random",
    router_input="residual",
    routers=_PUBLISHED,
    recover=dataclasses.replace(_PUBLISHED, router_lr=2e-4, lora_lr=2e-4),
    budgets=None,
    label_share=1.0,
    penalty=20.0,
    noise=1.0,
    temperature=(5.0, 0.5),
    lora_dropout=0.1,
    first_share=0.5,
    up_lr_factor=2.0,
)
"""The published settings (arXiv 2607.28418): see docs/training.md for how each is represented here."""

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("default"),
        WIDE,
        WIDE.replace(name="skipgpt", whole_modules=True),
        WIDE.replace(name="layer-skip", whole_modules=True, decision="layer"),
        Recipe(
            "static-width",
            start="static",
            routers=Optimisation(router_lr=0.0),
            recover=Optimisation(router_lr=0.0, lora_lr=1e-3),
            noise=0.0,
        ),
    )
}


def recipe_of(name: str) -> Recipe:
    """A recipe by name; ConfigError lists those that exist."""
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]

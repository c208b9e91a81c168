"""Where training starts: routers as calibrated, random ones on the dense weights, or one choice for all tokens."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from widellm.config import WidthConfig
from widellm.errors import ConfigError
from widellm.families import LayerModules, locate
from widellm.modeling.attach import Width, attach, detach, is_attached, set_budget, width_of
from widellm.modeling.linears import matrix
from widellm.routing.state import SubLayer
from widellm.training.recipes import Recipe


def prepare(model: Any, recipe: Recipe, stage: str, windows: Tensor, seed: int = 0) -> Width:
    """Give `model` the routers that `stage` of `recipe` starts from, in place.

    A random start is made for stage "routers" (of a routed model the group sizes and kinds are kept); stage "recover"
    goes on with the routers that are there. windows int64 [n, T]: text that a static score is measured on. Raises
    ConfigError when the model is not what the recipe needs.
    """
    if recipe.start == "random" and stage == "routers":
        sizes: dict[str, Any] = {"base": {"name": str(getattr(model, "name_or_path", ""))}}
        if is_attached(model):
            config = width_of(model).config
            sizes = {n: getattr(config, n) for n in ("head_group_size", "ffn_group_size", "router_rank", "kinds")}
            # the fingerprint is of regrouped weights, which they will not be
            sizes["base"] = {n: v for n, v in config.base.items() if n != "fingerprint"}
            detach(model)
        return random_start(model, recipe, seed, **sizes)
    if not is_attached(model):
        first = "widellm train --stage routers" if recipe.start == "random" else "widellm prune"
        raise ConfigError(f"recipe {recipe.name}, stage {stage}, needs a routed directory: run {first} first")
    width = width_of(model)
    if (width.config.router_input, width.config.decision) != (recipe.router_input, recipe.decision):
        raise ConfigError(
            f"recipe {recipe.name} has routers on the {recipe.router_input} input and one decision per "
            f"{recipe.decision}, this model {width.config.router_input} and {width.config.decision}: use its own recipe"
        )
    if recipe.start == "static" and not is_static(model):
        static_start(model, recipe.score, windows)
    return width


def is_static(model: Any) -> bool:
    """Whether all routers ignore what they read."""
    width = width_of(model)
    return not any(bool(width.router(sub).up.any()) for sub in width.sublayers)


def random_start(
    model: Any,
    recipe: Recipe,
    seed: int = 0,
    head_group_size: int = 1,
    ffn_group_size: int = 64,
    router_rank: int = 32,
    kinds: tuple[str, ...] | None = None,
    base: dict[str, str] | None = None,
) -> Width:
    """Attach routers with Kaiming-uniform weights (fan in, gain sqrt 2) and zero biases to a dense model, in place.

    Channels stay in the model's own order. One logit per group is the difference of the two classes' logits of the
    published router, so its second map is drawn as the difference of two such draws.
    kinds: None, all that the family can route.
    """
    layout = locate(model)
    if recipe.whole_modules:
        head_group_size, ffn_group_size = layout.num_attention_heads, layout.intermediate_size or ffn_group_size
    width = attach(
        model,
        WidthConfig(
            layout.model_type,
            len(layout.layers),
            head_group_size,
            ffn_group_size,
            router_rank,
            router_input=recipe.router_input,
            decision=recipe.decision,
            base=base or {},
            kinds=kinds or layout.family.kinds,
        ),
    )
    generator = torch.Generator().manual_seed(seed)
    for sub in width.sublayers:
        router = width.router(sub)
        for weight, draws in ((router.down, 1), (router.up, 2)):
            first, *second = (torch.empty(weight.shape) for _ in range(draws))
            for drawn in (first, *second):
                nn.init.kaiming_uniform_(drawn, generator=generator)
            with torch.no_grad():
                weight.copy_(first - second[0] if second else first)
                router.bias.zero_()
    return width


@torch.inference_mode()
def static_start(model: Any, score: str, windows: Tensor) -> None:
    """Make an attached model's routers ignore the token: weights 0, biases the `score` of each group, in place.

    score: "calibrated", the log of the mean over tokens of the importance per work that the routers predict;
    "magnitude", the squared weights of a group; "wanda", sums of |weight| times the norm of its input over tokens (Sun
    et al. 2023, arXiv 2306.11695); "flap", variance of each channel over tokens times its squared output weights (An et
    al. 2023, arXiv 2312.11983). The last three are compared within a sub-layer, so each is standardised there.
    """
    width = width_of(model)
    statistics = _Statistics(width)
    set_budget(model, 1.0)
    if score == "calibrated":
        with width.watch(statistics.note_logits):
            _run(model, windows)
        scores = statistics.log_means()
    else:
        with statistics.watch_channels():
            _run(model, windows)
        scores = [_standardised(s) for s in statistics.channel_scores(score)]
    for sub, values in zip(width.sublayers, scores, strict=True):
        router = width.router(sub)
        router.down.zero_()
        router.up.zero_()
        router.bias.copy_(values)
    width.dial = None  # it was of the routers that were there


def _run(model: Any, windows: Tensor) -> None:
    for window in windows:
        model(window[None].to(model.device), use_cache=False, logits_to_keep=1)


def _standardised(score: Tensor) -> Tensor:
    return (score - score.mean()) / score.std(correction=0).clamp_min(1e-12)


class _Statistics:
    """Sums over tokens for every sub-layer, float64."""

    def __init__(self, width: Width) -> None:
        self.width = width
        self.tokens = 0
        n = len(width.sublayers)
        self.importance: list[Tensor | None] = [None] * n
        self.first: list[Tensor | None] = [None] * n
        self.second: list[Tensor | None] = [None] * n
        self.inputs: list[Tensor | None] = [None] * n

    def note_logits(self, place: int, logits: Tensor) -> None:
        self._add(self.importance, place, logits.flatten(0, -2).double().exp().sum(0))
        self._count(place, logits)

    def _count(self, place: int, seen: Tensor) -> None:
        if place == 0:
            self.tokens += seen.numel() // seen.shape[-1]

    @staticmethod
    def _add(sums: list[Tensor | None], place: int, value: Tensor) -> None:
        before = sums[place]
        sums[place] = value if before is None else before + value

    def log_means(self) -> list[Tensor]:
        return [torch.log(s / self.tokens) for s in self.importance if s is not None]

    def watch_channels(self) -> ExitStack:
        """Hooks that see what q, gate and up read, and what o and down read."""
        hooks = ExitStack()
        for place, sub in enumerate(self.width.sublayers):
            modules = self.width.layout.layers[sub.layer_index]
            reads, writes = (
                (modules.q_proj, modules.o_proj) if sub.kind == "attention" else (modules.up_proj, modules.down_proj)
            )

            def note_input(module: Any, args: Any, place: int = place) -> None:
                x = args[0].flatten(0, -2).double()
                self._add(self.inputs, place, x.square().sum(0))
                self._count(place, x)

            def note_output(module: Any, args: Any, place: int = place) -> None:
                h = args[0].flatten(0, -2).double()
                self._add(self.first, place, h.sum(0))
                self._add(self.second, place, h.square().sum(0))

            hooks.callback(reads.register_forward_pre_hook(note_input).remove)
            hooks.callback(writes.register_forward_pre_hook(note_output).remove)
        return hooks

    def channel_scores(self, score: str) -> list[Tensor]:
        """Score of every group of every sub-layer, float64 [G] each."""
        found = []
        for place, sub in enumerate(self.width.sublayers):
            modules = self.width.layout.layers[sub.layer_index]
            into = [w.double() for w in _into(modules, sub)]
            out = matrix(modules.o_proj if sub.kind == "attention" else modules.down_proj).double()
            first, second, inputs = self.first[place], self.second[place], self.inputs[place]
            assert first is not None and second is not None and inputs is not None
            if score == "magnitude":
                channel = out.square().sum(0) + sum(w.square().sum(1) for w in into)
            elif score == "wanda":
                channel = out.abs().sum(0) * second.sqrt() + sum((w.abs() * inputs.sqrt()).sum(1) for w in into)
            elif score == "flap":
                channel = (second / self.tokens - (first / self.tokens).square()).clamp_min(0) * out.square().sum(0)
            else:
                raise ConfigError(f"score must be calibrated, magnitude, wanda or flap, got {score!r}")
            found.append(channel.view(sub.groups, -1).sum(1))
        return found


def _into(modules: LayerModules, sub: SubLayer) -> list[Tensor]:
    """Matrices [N, D] into the groups of a sub-layer, of fused linears the rows that are in groups."""
    if sub.kind == "attention":
        q = matrix(modules.q_proj)
        if sub.blocks is None:
            return [q]
        return [q.view(len(sub.blocks), -1, q.shape[1])[sub.blocks.to(q.device) < sub.groups].flatten(0, 1)]
    if modules.gate_proj is modules.up_proj:
        return list(matrix(modules.up_proj).chunk(2))
    return [matrix(m) for m in (modules.gate_proj, modules.up_proj) if m is not None]

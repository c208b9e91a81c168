"""Calibration: a dense model and some text in, routers and a dial out. No training, one pass of statistics at a time.

1. Curvature: the Fisher matrix of every sub-layer's output and the size of every FFN channel, by a backward walk.
   FFN channels are sorted by what leaving them out would cost, and cut into groups.
2. First fit: ridge regression of each group's log importance on the router's input, on the dense stream.
3. Second fit: the same sums go on over streams that are already routed, at many shares: what the routers will see.
4. Balance: one offset per sub-layer, by a few steps of descent on the divergence from the dense model.
5. Dial: what each threshold really spends.

Statistics of as many layers as fit into `memory_gb` are held at a time; the others wait for another pass over the text.
"""

from __future__ import annotations

import resource
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from widellm.calibrate.balance import MOST_STEPS, SAVED, STEP_TOKENS, balance
from widellm.calibrate.dial import measure_dial, router_logits, set_threshold
from widellm.calibrate.statistics import SAMPLED_ROWS, Curvature, Regression
from widellm.calibrate.stream import Sample, sampled_label_gradient, walk_back
from widellm.config import WidthConfig
from widellm.errors import TextError, WidellmError
from widellm.families import Layout, locate
from widellm.modeling.attach import Width, attach, detach, is_attached, set_dial
from widellm.modeling.linears import matrix
from widellm.modeling.width_file import fingerprint_of
from widellm.progress import Progress, no_progress
from widellm.provenance import versions
from widellm.sources.texts import context_of, windows_digest

DENSE_SHARE, ROUTED_SHARE = 0.375, 0.25
"""Shares of the windows: curvature and first fit read the first, the second fit the next; the rest is for balance and
dial. Curvature from a third of the dense windows made the result 8 % worse in perplexity at half the work."""
LEAST_SAVED, MOST_SAVED = 0.1, 0.6
"""Range of routable work saved over the routed windows of the second fit."""
DIAL_TOKENS, DIAL_PROBE_TOKENS = 32768, 6144
"""Tokens on which the dial's settings are found, and on which each is run."""


@dataclass(frozen=True)
class Settings:
    """What a user may choose about a calibration."""

    head_group_size: int = 1
    """Query heads per decision."""
    ffn_group_size: int = 64
    """FFN channels per decision."""
    router_rank: int = 32
    """Inner width of the routers."""
    seed: int = 0
    """Of the labels that the model draws from its own prediction, and of the order of the text."""
    memory_gb: float = 2.0
    """For the statistics of the layers that are held at a time."""

    def groups_of(self, kind: str) -> int:
        """Heads or channels per decision."""
        return self.head_group_size if kind == "attention" else self.ffn_group_size


@dataclass(frozen=True)
class Calibration:
    """What a calibration took."""

    seconds: float
    peak_memory_gb: float
    """Largest resident memory of the process so far, weights included."""
    tokens: int
    attention_r_squared: float
    """Share of the variance of the log importance that the routers explain, mean over layers."""
    ffn_r_squared: float
    """The same; 0 where the family's FFN cannot be routed."""


def calibrate(
    model: Any,
    windows: Tensor,
    settings: Settings,
    name: str = "",
    text: dict[str, Any] | None = None,
    budget: float = 0.5,
    progress: Progress = no_progress,
) -> Calibration:
    """Attach routers to a dense causal LM in place and set its dial; the model is left at budget 1.0.

    windows: int64 [n, T] token ids. `name`, `text` and `budget` are only recorded. An error or an interruption gives
    the dense model back. Raises TextError for fewer than 8 windows, ConfigError for group sizes that do not fit,
    WidellmError when the statistics are not finite.
    """
    start = time.perf_counter()
    if len(windows) < 8:
        raise TextError(
            f"calibration needs at least 8 windows, got {len(windows)}: give more tokens or smaller windows"
        )
    layout = locate(model)
    for kind in layout.family.kinds:
        layout.groups(kind, settings.groups_of(kind))
    cuts = [max(2, int(len(windows) * share)) for share in (DENSE_SHARE, ROUTED_SHARE)]
    dense, routed = torch.split(windows[: sum(cuts)], cuts)
    rest = windows[sum(cuts) :]
    context = context_of(model) or STEP_TOKENS  # learned positions end there
    pieces = rest.flatten().split(min(STEP_TOKENS, context))
    steps = torch.stack([piece for piece in pieces if len(piece) == len(pieces[0])][:MOST_STEPS])
    probes = rest[: max(2, DIAL_PROBE_TOKENS // windows.shape[1])]
    shown = windows[:: max(1, windows.numel() // DIAL_TOKENS)]
    run = _Run(model, layout, settings, progress)
    permutations = run.curvature(dense)
    config = WidthConfig(
        model_type=layout.model_type,
        num_hidden_layers=len(layout.layers),
        head_group_size=settings.head_group_size,
        ffn_group_size=settings.ffn_group_size,
        router_rank=settings.router_rank,
        kinds=layout.family.kinds,
        base={"name": name},
        provenance={"budget": budget, "text": text or {}, "settings": asdict(settings), "versions": versions()},
    )
    width = attach(model, config, permutations)
    # said now, so that saving can tell whether training has changed the base since
    width.config = config.replace(base={**config.base, "fingerprint": fingerprint_of(model)})
    try:
        run.fit("first fit", width, [(w, None) for w in dense])
        shares = torch.linspace(1.0 - LEAST_SAVED, 1.0 - MOST_SAVED, len(routed)).tolist()
        thresholds = router_logits(model, dense[:2]).quantiles(shares)
        fits = run.fit("second fit", width, list(zip(routed, thresholds, strict=True)))
        progress("balance", 0, len(steps))
        middle = router_logits(model, routed[:2]).quantiles([1.0 - SAVED])[0]
        balance(model, width, steps, middle, lambda d, t: progress("balance", d, t))
        set_dial(model, measure_dial(model, shown, probes, lambda d, t: progress("dial", d, t)))
    except BaseException:
        detach(model)
        raise
    return Calibration(
        seconds=time.perf_counter() - start,
        peak_memory_gb=peak_memory_gb(),
        tokens=windows.numel(),
        attention_r_squared=fits["attention"],
        ffn_r_squared=fits.get("ffn", 0.0),
    )


Key = tuple[int, str]
"""(layer index, "attention" or "ffn")."""
Stream = Sequence[tuple[Tensor, float | None]]
"""Windows int64 [T], each with the threshold it is run at (None: dense)."""


class _Run:
    """The passes over the text, for as many layers at a time as the memory allows."""

    def __init__(self, model: Any, layout: Layout, settings: Settings, progress: Progress) -> None:
        self.model, self.layout, self.settings, self.progress = model, layout, settings, progress
        d = layout.hidden_size
        per_layer = 2 * d * (4 * d + 2 * SAMPLED_ROWS) + 4 * layout.intermediate_size * (settings.ffn_group_size + 2)
        at_once = max(1, int(settings.memory_gb * 2**30 / per_layer))
        count = len(layout.layers)
        # from the top down: a walk that stops early is cheaper
        self.blocks = [range(max(0, end - at_once), end) for end in range(count, 0, -at_once)]
        self.forms: dict[Key, Tensor] = {}
        self.sensitivity: dict[Key, float] = {}
        self.seen: list[tuple[Tensor, float | None]] = []
        self.sums: dict[Key, Regression] = {}

    def curvature(self, windows: Tensor) -> Tensor:
        """Set group forms and mean squared gradient of every sub-layer; return each layer's channel order [L, F]."""
        permutations = torch.empty(len(self.layout.layers), self.layout.intermediate_size, dtype=torch.int64)
        for number, block in enumerate(self.blocks):
            found = {(i, kind): Curvature() for i in block for kind in self.layout.family.kinds}
            for sample in self._samples("curvature", [(w, None) for w in windows], block, number):
                found[sample.layer_index, sample.kind].add(sample)
            for key, curvature in found.items():
                index, kind = key
                modules = self.layout.layers[index]
                groups = self.layout.groups(kind, self.settings.groups_of(kind))
                w_out = matrix(modules.o_proj if kind == "attention" else modules.down_proj).detach()
                if kind == "ffn":
                    order = curvature.channel_scores(w_out).argsort(descending=True, stable=True)
                    permutations[index] = order.cpu()
                    w_out = w_out[:, order]
                self.sensitivity[key] = float(curvature.fisher.diagonal().sum())
                self.forms[key] = curvature.group_forms(w_out, groups)
                if not bool(torch.isfinite(self.forms[key]).all()):
                    raise WidellmError(f"layer {index}'s {kind} gradients are not finite: check the model's weights")
        return permutations

    def fit(self, stage: str, width: Width, stream: Stream) -> dict[str, float]:
        """Add a stream to the sums and solve all routers on all that was seen; returns the mean R^2 per kind.

        Where all layers fit into the memory the sums go on; else earlier streams are read again, block by block. New
        routers are put in only when all are solved: what later blocks see must not change under way.
        """
        again = len(self.blocks) > 1
        stream = self.seen = [*self.seen, *stream] if again else list(stream)
        solved = []
        for number, block in enumerate(self.blocks):
            subs = {(s.layer_index, s.kind): s for s in width.sublayers if s.layer_index in block}
            if again or not self.sums:
                d = self.layout.hidden_size
                sums = {k: Regression(self.forms[k], self.sensitivity[k], s.group_cost, d) for k, s in subs.items()}
                self.sums = sums
            for sample in self._samples(stage, stream, block, number):
                self.sums[sample.layer_index, sample.kind].add(sample)
            solved += [(sub, self.sums[key].solve(self.settings.router_rank)) for key, sub in subs.items()]
        set_threshold(self.model, None)
        with torch.no_grad():
            for sub, solution in solved:
                router = width.router(sub)
                router.down.copy_(solution.down)
                router.up.copy_(solution.up)
                router.bias.copy_(solution.bias)
        r_squared = {}
        for kind in self.layout.family.kinds:
            of_kind = [solution.r_squared for sub, solution in solved if sub.kind == kind]
            r_squared[kind] = sum(of_kind) / len(of_kind)
        return r_squared

    def _samples(self, stage: str, stream: Stream, block: range, number: int) -> Iterator[Sample]:
        total = len(stream) * len(self.blocks)
        for i, (window, threshold) in enumerate(stream):
            if is_attached(self.model):
                set_threshold(self.model, threshold)
            # drawn anew for each window, so that the blocks of a pass see the same labels
            labels = torch.Generator().manual_seed(
                zlib.crc32(f"{self.settings.seed} {windows_digest(window)}".encode())
            )
            gradient = sampled_label_gradient(labels)
            for samples in walk_back(self.model, self.layout, window, gradient, lowest=block.start):
                if samples[0].layer_index in block:
                    yield from samples
            self.progress(stage, number * len(stream) + i + 1, total)


def peak_memory_gb() -> float:
    """Largest resident memory this process has had, in GB (10^9 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9

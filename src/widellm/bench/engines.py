"""What runs a whole model, each behind the same four calls: widellm, transformers, torch.compile and llama.cpp; the
first two on int8 weights too."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from widellm.bench.llama_cpp import LlamaCpp
from widellm.bench.speed import Stamp
from widellm.bench.zoo import dense_model, in_int8, routed_model
from widellm.errors import WidellmError

ENGINES = ("widellm", "widellm-int8", "torchao-int8", "transformers", "torch.compile", "llama.cpp")


@dataclass(frozen=True)
class EngineSpec:
    """Enough to build an engine in another process."""

    engine: str
    model: str
    """A routed directory, or "random:NAME" for random weights in the shape NAME of `cases.SHAPES`."""
    dtype: str = "bfloat16"
    threads: int = 1
    new_tokens: int = 32
    longest: int = 1024
    """Most tokens, prompt and new ones, of a sequence."""


class Engine(Protocol):
    """One model under one engine. ids int64 [B, T]; mask [B, T], 0 = padding on the left."""

    def logits(self, ids: Tensor) -> Tensor:
        """float32 [V] after the last token of ids [1, T]."""

    def prefill(self, ids: Tensor, budget: float) -> float:
        """Seconds of a forward over ids [1, T] that fills a cache and gives the last token's logits."""

    def decode(self, ids: Tensor, mask: Tensor, budget: float, shared: bool = False) -> tuple[float, list[float]]:
        """Greedy continuation: (seconds to the first new token, seconds between each two after it).

        shared: the sequences of a routed model's batch agree on their groups.
        """


class Transformers:
    """A transformers model through its forward and generate(); with `routed`, the budget is set before each call."""

    def __init__(self, model: Any, new_tokens: int, routed: bool = False, static: bool = False) -> None:
        self.model, self.new_tokens, self.routed, self.static = model, new_tokens, routed, static
        # No token ends a text, so that all engines decode as many; min_new_tokens would search the vocabulary instead.
        model.generation_config.eos_token_id = None
        if static:
            model.forward = torch.compile(model.forward)

    def _set(self, budget: float, shared: bool = False) -> None:
        if self.routed:
            from widellm.modeling.attach import set_batch_shared, set_budget

            set_budget(self.model, budget)
            set_batch_shared(self.model, shared)

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """See Engine; a routed model at budget 1."""
        self._set(1.0)
        last: Tensor = self.model(ids, logits_to_keep=1).logits[0, -1]
        return last.float()

    @torch.inference_mode()
    def prefill(self, ids: Tensor, budget: float) -> float:
        """See Engine."""
        self._set(budget)
        start = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, ids: Tensor, mask: Tensor, budget: float, shared: bool = False) -> tuple[float, list[float]]:
        """See Engine."""
        self._set(budget, shared)
        stamp = Stamp()
        start = time.perf_counter()
        self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=self.new_tokens,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([stamp]),
            **({"cache_implementation": "static", "disable_compile": True} if self.static else {}),
        )
        return stamp.times[0] - start, [b - a for a, b in zip(stamp.times, stamp.times[1:], strict=False)]


def _plain_strides(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
    """The last token's states as a tensor of their own: torch (2.13) copies the whole vocabulary matrix, which takes
    longer than the rest of a prefill, when it multiplies the slice that transformers takes of all tokens' states."""
    return (args[0].reshape(-1).view(args[0].shape),)


def build(spec: EngineSpec) -> Engine:
    """Make the engine in this process; sets torch's thread count. Raises WidellmError for what cannot be built."""
    torch.set_num_threads(spec.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    if spec.engine == "widellm":
        return Transformers(routed_model(spec.model, dtype), spec.new_tokens, routed=True)
    if spec.engine == "widellm-int8":
        return Transformers(in_int8(routed_model(spec.model, dtype)), spec.new_tokens, routed=True)
    if spec.engine == "torchao-int8":
        return Transformers(in_int8(dense_model(spec.model, dtype)), spec.new_tokens)
    if spec.engine in ("transformers", "torch.compile"):
        model = dense_model(spec.model, dtype)
        model.get_output_embeddings().register_forward_pre_hook(_plain_strides)
        return Transformers(model, spec.new_tokens, static=spec.engine == "torch.compile")
    if spec.engine == "llama.cpp":
        return LlamaCpp(dense_model(spec.model, dtype), spec.new_tokens, spec.longest, spec.threads)
    raise WidellmError(f"engine {spec.engine!r} is not known; known: {', '.join(ENGINES)}")

"""Self-speculative decoding: the model at a small budget drafts, the same weights at budget 1.0 verify.

    model.generate(**inputs, custom_generate=Speculative(draft_budget=0.8), max_new_tokens=64)

One set of weights and one cache. A draft's keys and values come from routed layers, so they are dropped from the cache
and the dense pass over the drafted tokens writes its own: what is kept is the dense model's greedy text, token for
token (as far as a pass over several tokens rounds like passes over one).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

from widellm.config import check_budget
from widellm.errors import ConfigError
from widellm.modeling.attach import get_budget, set_budget, width_of
from widellm.modeling.roomy_cache import drop_last


@dataclass
class Speculative:
    """A decoding method for `generate(custom_generate=...)`, and the count of what it did, over all calls."""

    draft_budget: float = 0.8
    """Share of routable work that drafting may spend."""
    draft_tokens: int = 4
    """Most tokens drafted before a verification."""
    confidence: float = 0.9
    """Drafting stops early after a token that the draft gives a smaller probability; 0 never stops early."""
    streamer: Any = None
    """Gets the text as it grows, as in `generate(streamer=...)`, which transformers keeps from decoding methods."""
    passes: int = 0
    """Dense passes after the first, which reads the prompt."""
    drafted: int = 0
    accepted: int = 0
    """Drafted tokens, and those that the dense model would have chosen too."""

    def __post_init__(self) -> None:
        check_budget(self.draft_budget)
        if self.draft_tokens < 1:
            raise ConfigError(f"draft_tokens must be at least 1, got {self.draft_tokens}")

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens; 0 before anything was drafted."""
        return self.accepted / max(self.drafted, 1)

    @torch.inference_mode()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls: continue input_ids int64 [1, T] until a stopping criterion holds.

        Raises ConfigError for a dense model, more than one sequence, sampling or beams. The budget is left as it was.
        """
        width_of(model)
        if input_ids.shape[0] != 1:
            raise ConfigError(f"speculative decoding takes one sequence at a time, got {input_ids.shape[0]}")
        if generation_config.do_sample or (generation_config.num_beams or 1) != 1:
            raise ConfigError("speculative decoding is greedy: leave do_sample and num_beams out")
        mask = model_kwargs.get("attention_mask")
        padding = 0 if mask is None else int((mask[0] == 0).sum())
        if mask is not None and not bool(mask[0, padding:].all()):
            raise ConfigError("speculative decoding takes padding on the left only")
        budget = get_budget(model)
        run = _Run(model, padding)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        try:
            return self._generate(run, input_ids, logits_processor, stopping_criteria, generation_config)
        finally:
            set_budget(model, budget)

    def _generate(self, run: _Run, ids: Tensor, processor: Any, criteria: Any, generation_config: Any) -> Any:
        def choose(sequence: Tensor, logits: Tensor) -> Tensor:
            return processor(sequence, logits.float()).argmax(-1, keepdim=True)

        draft = ids[:, :0]
        while True:
            logits = run.verify(ids, draft)
            # the dense model's choice after what is there, and after each drafted token for as long as it agrees
            for place in range(draft.shape[1] + 1):
                token = choose(ids, logits[:, place])
                agrees = place < draft.shape[1] and bool(token == draft[:, place])
                self.accepted += agrees
                ids = torch.cat([ids, token], 1)
                if self.streamer is not None:
                    self.streamer.put(token.cpu())
                if bool(criteria(ids, None).all()):
                    if self.streamer is not None:
                        self.streamer.end()
                    whole = generation_config.return_dict_in_generate
                    return GenerateDecoderOnlyOutput(sequences=ids) if whole else ids
                if not agrees:
                    break
            run.forget_beyond(ids.shape[1] - 1)
            # the last token wanted is the verification's own: nothing is drafted for it, nor beyond
            draft = self._draft(run, ids, choose, generation_config.max_length - ids.shape[1] - 1)

    def _draft(self, run: _Run, ids: Tensor, choose: Any, room: int) -> Tensor:
        set_budget(run.model, self.draft_budget)
        start = sequence = ids
        for _ in range(min(self.draft_tokens, room)):
            logits = run.feed(sequence, 1)[:, -1]
            token = choose(sequence, logits)
            sequence = torch.cat([sequence, token], 1)
            if self.confidence and float(torch.softmax(logits.float(), -1)[0, token]) < self.confidence:
                break
        set_budget(run.model, 1.0)
        run.forget_beyond(start.shape[1] - 1)
        self.drafted += sequence.shape[1] - start.shape[1]
        self.passes += 1
        return sequence[:, start.shape[1] :]


class _Run:
    """A model with the cache of one sequence."""

    def __init__(self, model: Any, padding: int) -> None:
        self.model, self.padding = model, padding
        # without a configuration: sliding windows too keep everything, so that any number of tokens can be dropped
        self.cache = DynamicCache()
        self.cached = padding
        """Positions of the sequence that need not be fed again; padding never is."""
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.keeps = "logits_to_keep" in parameters

    def feed(self, ids: Tensor, wanted: int) -> Tensor:
        """Run what of ids [1, T] is not cached yet; logits [1, wanted, V] after the last of them."""
        # all of a long prompt's logits can be larger than the model
        options: dict[str, Any] = {"logits_to_keep": wanted} if self.keeps else {}
        options[self.cache_name] = self.cache
        logits: Tensor = self.model(ids[:, self.cached :], use_cache=True, **options).logits
        self.cached = ids.shape[1]
        return logits[:, -wanted:]

    def verify(self, ids: Tensor, draft: Tensor) -> Tensor:
        """Dense logits [1, drafted + 1, V] after the last token of ids and after each drafted one."""
        set_budget(self.model, 1.0)
        return self.feed(torch.cat([ids, draft], 1), draft.shape[1] + 1)

    def forget_beyond(self, length: int) -> None:
        """Drop what the cache has of positions from `length` on."""
        if self.cached > length:
            drop_last(self.cache, self.cached - length)
            self.cached = length

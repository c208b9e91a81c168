"""Budgets that requests carry: vLLM's logits-processor interface tells the worker which request has which.

It is asked for by name, `--logits-processors widellm.integrations.vllm_requests:RequestBudgets`; nothing is done to
the logits. Imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import CompilationMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

from widellm.config import check_budget
from widellm.errors import ConfigError
from widellm.integrations.vllm_config import WidellmConfig

KEY = "widellm_budget"
"""In `SamplingParams.extra_args`, and in `vllm_xargs` of a request to the OpenAI server."""


class RequestBudgets(LogitsProcessor):
    """Which budget each row of the batch has, and so which thresholds each token."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Raises ConfigError where one request's budget would reach into another's result."""
        config = vllm_config.quant_config
        if not isinstance(config, WidellmConfig):
            raise ConfigError("RequestBudgets serves routed directories only: leave out --logits-processors")
        if vllm_config.cache_config.enable_prefix_caching:
            raise ConfigError(
                "requests of different budgets would share cached keys and values: add --no-enable-prefix-caching"
            )
        if vllm_config.compilation_config.mode != CompilationMode.NONE:
            raise ConfigError("budgets of requests are looked up in each forward: add --enforce-eager")
        self.config = config
        self.device = device
        self._budgets: dict[int, float] = {}
        self._step: tuple[Any, Tensor] | None = None
        config.requests = self

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose budget is not in (0, 1]. One below what was calibrated gets the least that was."""
        budget_of(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Logits are left alone."""
        return True

    def apply(self, logits: Tensor) -> Tensor:
        """Logits are left alone."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests through the rows of the batch; called before each forward."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._budgets.pop(row, None)
        for row, params, _, _ in batch_update.added:
            budget = budget_of(params)
            self._budgets.pop(row, None)
            if budget is not None:
                self._budgets[row] = budget
        for a, b, direction in batch_update.moved:
            moved, other = self._budgets.pop(a, None), self._budgets.pop(b, None)
            if moved is not None:
                self._budgets[b] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                self._budgets[a] = other

    def thresholds(self, kind: str, layer: int, rows: int) -> Tensor:
        """float32 [M, 1]: the threshold of each of the `rows` tokens of the forward that runs now."""
        context = get_forward_context()
        if self._step is None or self._step[0] is not context or self._step[1].shape[0] != rows:
            self._step = (context, self._table(context, rows))
        return self._step[1][:, self._column(kind, layer)].unsqueeze(1)

    def _column(self, kind: str, layer: int) -> int:
        return list(self.config.plan.groups).index((kind, layer))

    def _table(self, context: Any, rows: int) -> Tensor:
        """float32 [M, sub-layers]. Rows that pad the batch take the server's budget."""
        plan = self.config.plan
        columns: dict[float, Tensor] = {}

        def of(budget: float) -> Tensor:
            if budget not in columns:
                least = 1.0 if plan.dial is None else float(plan.dial.budgets[0])
                values = [float("-inf") if t is None else t for t in plan.thresholds(max(budget, least)).values()]
                columns[budget] = torch.tensor(values, dtype=torch.float32)
            return columns[budget]

        table = of(plan.budget).repeat(rows, 1)
        metadata = context.attn_metadata
        if self._budgets and metadata:  # none in a warm-up
            starts = next(iter(metadata.values())).query_start_loc.tolist()
            for row, budget in self._budgets.items():
                if row + 1 < len(starts):
                    table[starts[row] : starts[row + 1]] = of(budget)
        return table.to(self.device)


def budget_of(params: SamplingParams) -> float | None:
    """The budget that a request asks for, None where it does not; ConfigError outside (0, 1]."""
    value = (params.extra_args or {}).get(KEY)
    return None if value is None else check_budget(value)

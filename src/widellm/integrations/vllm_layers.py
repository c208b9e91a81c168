"""The methods by which vLLM's linear layers compute only what the routers keep. Imports vLLM.

Four linears of a decoder layer change their method, two of a kind share a slot:

    qkv_proj      router(x) -> keep; q of dropped head groups is zero and not computed, k and v are whole (q too where
                  the family norms it across heads: then a kept head needs all others)
    o_proj        reads the kept head groups only
    gate_up_proj  router(x) -> keep; gate and up of dropped channel groups are zero and not computed
    down_proj     reads the kept channel groups only

Weights keep vLLM's parallel layers, loading and sharding; a rank holds the routers of its own groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method

from widellm.errors import CheckpointError
from widellm.families import FAMILIES
from widellm.integrations.vllm import widen
from widellm.kernels import registry

if TYPE_CHECKING:
    from widellm.integrations.vllm_config import WidellmConfig


@dataclass
class Slot:
    """What the two projections of one sub-layer share. `keep` lives from the first to the second, in each forward."""

    kind: str
    layer_index: int
    keep: Tensor | None = None
    """bool [M, G of this rank]"""


@register_weight_loader_v2_supported_method
class PlainLinear(UnquantizedLinearMethod):
    """vLLM's own linear, in a model that has routed ones beside it."""

    def __init__(self, config: WidellmConfig) -> None:
        super().__init__()
        self.config = config

    def process_weights_after_loading(self, layer: Any) -> None:
        """See `WidellmConfig.check_complete`; then as vLLM does."""
        self.config.check_complete()
        super().process_weights_after_loading(layer)


class _Routed(PlainLinear):
    def __init__(self, config: WidellmConfig, slot: Slot) -> None:
        super().__init__(config)
        self.slot = slot
        threshold = config.plan.thresholds(config.plan.budget)[slot.kind, slot.layer_index]
        self.threshold = float("-inf") if threshold is None else threshold
        self.dense = threshold is None and config.requests is None  # budget 1.0: vLLM's own path, packed weights
        self.whole = self.dense
        """Whether all outputs are computed, by vLLM's own path."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Weights of routed layers stay as they are: vLLM's CPU packing has no rows or columns to skip."""
        if self.whole:
            super().process_weights_after_loading(layer)
        else:
            self.config.check_complete()


@register_weight_loader_v2_supported_method
class RoutedIn(_Routed):
    """A projection into the groups: decides what is kept, and computes that."""

    def __init__(self, config: WidellmConfig, slot: Slot) -> None:
        super().__init__(config, slot)
        family = FAMILIES.get(config.plan.config.model_type)
        self.whole |= slot.kind == "attention" and family is not None and family.whole_q

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """vLLM's weight, and this rank's part of the router as float32 buffers.

        Raises ConfigError when the groups do not divide by the ranks, CheckpointError when they are of another model.
        """
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )
        kind, index, plan = self.slot.kind, self.slot.layer_index, self.config.plan
        shard = plan.router(kind, index, input_size, layer.tp_rank, layer.tp_size)
        groups, first = shard.bias.numel(), output_partition_sizes[0]
        unit = layer.head_size if kind == "attention" else 1
        if first != groups * plan.group_size(kind) * unit:
            raise CheckpointError(
                f"{plan.folder}: layer {index} has {first} {kind} outputs per rank, its router decides for {groups} "
                f"groups of {plan.group_size(kind) * unit}: the routers are of another base model"
            )
        device = layer.weight.device
        threshold = torch.tensor(self.threshold, dtype=torch.float32, device=device)
        for name, value in (("down", shard.down), ("up", shard.up), ("bias", shard.bias), ("threshold", threshold)):
            layer.register_buffer(f"router_{name}", value.to(device), persistent=False)
        self.group_width = first // groups
        self.parts = len(output_partition_sizes) if kind == "ffn" else 1

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x `[..., D]` -> `[..., N of this rank]`, zero in the dropped groups."""
        if self.dense:
            return super().apply(layer, x, bias)
        rows = x.reshape(-1, x.shape[-1])
        logits = linear(linear(rows.float(), layer.router_down), layer.router_up, layer.router_bias)
        keep = logits > self._threshold(layer, rows.shape[0])
        self.slot.keep = keep
        if self.whole:
            return super().apply(layer, x, bias)
        outputs = layer.weight.shape[0]
        wide = keep.repeat(1, self.parts) if self.slot.kind == "ffn" else widen(keep, self.group_width, outputs)
        if wide is not None:
            y = registry.routed_in(rows, layer.weight, wide, bias)
        else:
            cut = keep.shape[1] * self.group_width
            first, rest = (None, None) if bias is None else (bias[:cut], bias[cut:])
            q = registry.routed_in(rows, layer.weight[:cut], keep, first)
            y = torch.cat((q, linear(rows, layer.weight[cut:], rest)), dim=1)
        return y.view(*x.shape[:-1], outputs)

    def _threshold(self, layer: Any, rows: int) -> Tensor:
        """float32 [], or [M, 1] where requests carry their own budgets."""
        if self.config.requests is None:
            return layer.router_threshold
        return self.config.requests.thresholds(self.slot.kind, self.slot.layer_index, rows)


@register_weight_loader_v2_supported_method
class RoutedOut(_Routed):
    """A projection out of the groups: reads what was kept."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """On a CPU the weight becomes a transposed view: what one group multiplies is one block, skipped unread."""
        super().process_weights_after_loading(layer)
        if not self.dense and layer.weight.device.type == "cpu":
            layer.weight.data = layer.weight.data.t().contiguous().t()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x `[..., N of this rank]` -> `[..., D]`; what x holds in dropped groups is not read."""
        if self.dense:
            return super().apply(layer, x, bias)
        keep, self.slot.keep = self.slot.keep, None  # not left behind: it would be an output of a compiled graph
        assert keep is not None, "the projection into the groups runs first"
        y = registry.routed_out(x.reshape(-1, x.shape[-1]), layer.weight, keep, bias)
        return y.view(*x.shape[:-1], -1)

"""The quantisation configuration by which vLLM finds a routed directory. Imports vLLM: only `vllm.register` does so."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.version import __version__ as vllm_version

from widellm.errors import ConfigError, UnsupportedModelError
from widellm.integrations.vllm import METHOD, NOT_VLLMS, PLACES, Plan, check_version, place_of, read_plan
from widellm.modeling.checkpoint import CONFIG_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from widellm.integrations.vllm_layers import Slot
    from widellm.integrations.vllm_requests import RequestBudgets


class WidellmConfig(QuantizationConfig):
    """Gives the four routed linears of each decoder layer our methods, and every other linear vLLM's own."""

    def __init__(self) -> None:
        super().__init__()
        self.folder: Path | None = None
        self.requests: RequestBudgets | None = None
        """Set by the logits processor of that name, where requests carry their own budgets."""
        self._slots: dict[tuple[str, int], Slot] = {}
        self._seen: dict[int, set[str]] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WidellmConfig:
        """From config.json's `quantization_config`, or width_config.json; what they say is read from the directory."""
        check_version(vllm_version)
        return cls()

    @classmethod
    def get_name(cls) -> str:
        """The value of --quantization."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """All that vLLM computes in."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """No GPU is too old: kernels that cannot run on it are not chosen."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Where vLLM looks when config.json has no `quantization_config`."""
        return [CONFIG_FILE]

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Names that vLLM's loading passes over: routers and dial are read by `read_plan`, sliced by rank."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_regex={re.compile(NOT_VLLMS): None})

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Called with the directory, in the process that the user looks at: errors are found here, before a start."""
        folder = Path(model_name)
        if not folder.is_dir():
            for name in ("config.json", CONFIG_FILE, WEIGHTS_FILE):
                folder = Path(hf_hub_download(model_name, name, revision=revision)).parent
        self.folder = folder
        plan = read_plan(folder)
        if hf_config is not None:  # goes into the key of vLLM's compile cache: groups and ranks shape the graph
            hf_config.update({"width_config_digest": plan.config.digest()})

    @cached_property
    def plan(self) -> Plan:
        """The directory under the server's settings; read where layers are built."""
        if self.folder is None:
            raise ConfigError("vLLM has not said which directory it serves: widellm does not fit this version of vLLM")
        vllm_config = get_current_vllm_config()
        if vllm_config.parallel_config.use_ubatching:
            raise ConfigError("widellm does not serve with --enable-dbo: two batches would share a layer's decisions")
        return read_plan(self.folder, dict(vllm_config.additional_config or {}).get(METHOD))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Our methods for routed linears, vLLM's own for the others; None for what is not linear."""
        from widellm.integrations.vllm_layers import PlainLinear, RoutedIn, RoutedOut, Slot

        if not isinstance(layer, LinearBase):
            return None
        place = place_of(prefix)
        if place is None:
            return PlainLinear(self)
        index, path = place
        self._seen.setdefault(index, set()).add(path)
        kind, leads_in = PLACES.get(path, ("", False))
        if (kind, index) not in self.plan.groups:
            return PlainLinear(self)
        slot = self._slots.setdefault((kind, index), Slot(kind, index))
        return RoutedIn(self, slot) if leads_in else RoutedOut(self, slot)

    def check_complete(self) -> None:
        """Raise UnsupportedModelError unless every router of the layers built here has found its two projections."""
        for kind, index in self.plan.groups:
            if index not in self._seen:
                continue  # on another pipeline rank
            missing = sorted(path for path, (of, _) in PLACES.items() if of == kind and path not in self._seen[index])
            if missing:
                raise UnsupportedModelError(
                    f"vLLM's model has no {' and no '.join(missing)} in layer {index} (it has "
                    f"{', '.join(sorted(self._seen[index]))}): the family {self.plan.config.model_type!r} is not served"
                )

"""What lets transformers' Auto classes load the adapter form: it has no weights, and its `model_type` is ours.

Imported by `hooks` while transformers itself is being imported: everything but the configuration class waits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

NAME = "widellm"
"""The model_type of the adapter form."""


class AdapterConfig(PreTrainedConfig):
    """config.json of the adapter form; all that matters is in width_config.json beside it."""

    model_type = NAME
    # by it vLLM comes to ask our plugin, which says what to do with an adapter
    quantization_config = {"quant_method": NAME}


class AdapterForCausalLM:
    """Stands for the adapter form in AutoModelForCausalLM; what comes back is of the base model's class."""

    config_class = AdapterConfig

    @classmethod
    def from_pretrained(cls, path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Load the base model and attach the adapter's routers.

        `base=` replaces the recorded name of the base model; everything else goes to the base model's from_pretrained.
        """
        from widellm.modeling.attaching import load_adapter

        return load_adapter(path, *args, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        from widellm.errors import CheckpointError

        raise CheckpointError("a widellm adapter's config.json describes no model: load the adapter's directory")


def register_config() -> None:
    """Tell AutoConfig of `model_type: widellm`."""
    from transformers.models.auto.configuration_auto import AutoConfig

    AutoConfig.register(NAME, AdapterConfig, exist_ok=True)


def register_model() -> None:
    """Tell AutoModelForCausalLM of it."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    register_config()
    AutoModelForCausalLM.register(AdapterConfig, AdapterForCausalLM, exist_ok=True)

"""What lets transformers' from_pretrained load the full form; see `hooks` for when it is registered.

The full form is a plain transformers directory whose config.json says `quant_method: widellm`. transformers then asks
us, as it asks a quantisation library, to change the model before its weights are loaded (routers are attached on the
meta device, so that device maps know them) and after it. Nothing is quantised.

Imported while transformers itself is being imported: what needs a model's code waits for a model.
"""

from __future__ import annotations

from typing import Any

from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from widellm.config import FORMAT_VERSION
from widellm.sources.models import ROUTED

MARKER = {"quant_method": ROUTED, "format_version": FORMAT_VERSION}
"""What the full form's config.json has as its quantization_config."""


class RouterConfig(QuantizationConfigMixin):
    """The quantization_config of the full form. transformers builds it from MARKER; `load` gives the rest."""

    def __init__(
        self,
        quant_method: str = ROUTED,
        format_version: int = FORMAT_VERSION,
        source: str | None = None,
        in_order: bool = True,
        check: bool = True,
    ) -> None:
        self.quant_method = quant_method
        self.format_version = format_version
        self.source = source
        """Directory with the routers; None: the one that the weights are read from."""
        self.in_order = in_order
        """Whether the weights are regrouped already (full form)."""
        self.check = check
        """Whether to compare the weights with the recorded fingerprint."""

    def to_dict(self) -> dict[str, Any]:
        return dict(MARKER)


class RouterQuantizer(HfQuantizer):
    """Attaches routers to the model that from_pretrained is building, then fills them from `width.safetensors`."""

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from widellm.modeling import attaching

        files = kwargs.get("checkpoint_files") or []
        self.read = attaching.start(model, self.quantization_config, files[0] if files else None)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from widellm.modeling import attaching

        self.remove_quantization_config(model)
        for module in model.modules():
            if getattr(getattr(module, "config", None), "_is_quantized", False):
                del module.config._is_quantized
        attaching.finish(model, self.quantization_config, self.read)
        return model


def register_loader() -> None:
    """Tell transformers which class handles `quant_method: widellm`."""
    from transformers.quantizers import auto

    if ROUTED not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(ROUTED)(RouterConfig)
        auto.register_quantizer(ROUTED)(RouterQuantizer)


# whoever imports this first has the registration, even where the hook met it half-imported
register_loader()

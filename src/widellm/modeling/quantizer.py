"""What lets transformers' from_pretrained load the full and the static form; see `hooks` for when it is registered.

The full form is a plain transformers directory whose config.json says `quant_method: widellm`. transformers then asks
us, as it asks a quantisation library, to change the model before its weights are loaded (routers are attached on the
meta device, so that device maps know them) and after it. The static form says `widellm-static`, with the sizes of its
layers, and the model is made so small before its weights are loaded. Nothing is quantised.

Imported while transformers itself is being imported: what needs a model's code waits for a model.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from widellm.config import FORMAT_VERSION
from widellm.errors import CheckpointError
from widellm.sources.models import ROUTED, STATIC, key_problems

STATIC_FORMAT = 1
"""Version of the static form; a newer one is refused."""
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


class StaticConfig(QuantizationConfigMixin):
    """The quantization_config of the static form: all that its config.json says beyond the base model's.

    Raises CheckpointError when it is of a newer format, or not such a configuration.
    """

    def __init__(
        self,
        quant_method: str = STATIC,
        format_version: int = STATIC_FORMAT,
        layers: Any = (),
        provenance: dict[str, Any] | None = None,
        digest: str | None = None,
        **unknown: Any,
    ) -> None:
        if not isinstance(format_version, int) or format_version > STATIC_FORMAT:
            raise CheckpointError(
                f"config.json has format_version {format_version!r} of the static form, this widellm reads up to "
                f"{STATIC_FORMAT}: upgrade widellm"
            )
        if unknown or not isinstance(layers, (list, tuple)):
            raise CheckpointError(
                f"config.json describes the static form with {sorted(unknown) or layers!r}: export it again"
            )
        self.quant_method = quant_method
        self.format_version = format_version
        self.layers = list(layers)
        """One for each layer, see `static_model.Sizes`."""
        self.provenance = provenance or {}
        """What it was made from, and how what it keeps was chosen."""
        self.digest = digest
        """`digest_of` the layers it was written with; None for a model that was not read from files."""

    def to_dict(self) -> dict[str, Any]:
        names = ("quant_method", "format_version", "layers", "provenance")
        return copy.deepcopy({name: getattr(self, name) for name in names}) | {"digest": digest_of(self.layers)}


def digest_of(layers: Sequence[Any]) -> str:
    """Short SHA-256 of the sizes in a static form's config.json: other sizes may fit the same weights' shapes."""
    return hashlib.sha256(json.dumps(list(layers), sort_keys=True).encode()).hexdigest()[:16]


class _Loader(HfQuantizer):
    """What both have in common: nothing is quantised, and the loaded model shall not look as if it were."""

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.remove_quantization_config(model)
        for module in model.modules():
            if getattr(getattr(module, "config", None), "_is_quantized", False):
                del module.config._is_quantized
        return model


class StaticQuantizer(_Loader):
    """Makes the model that from_pretrained is building as small as its config.json says."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from widellm.modeling.static_model import narrow

        config = self.quantization_config
        narrow(model, config)
        if config.digest != digest_of(config.layers):
            raise CheckpointError(
                f"config.json has sizes of layers with digest {digest_of(config.layers)}, expected {config.digest}: "
                f"they are not those that were saved with the weights, export the model again"
            )
        adjust = model._adjust_missing_and_unexpected_keys

        def check(info: Any) -> None:
            adjust(info)
            _check_keys(model, info)

        # transformers calls it with its report on the keys, of which it would only warn
        model._adjust_missing_and_unexpected_keys = check
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        del model._adjust_missing_and_unexpected_keys
        for name, weight in model.named_parameters():
            if weight.shape != self.shapes[name]:  # older transformers let it pass here
                raise _foreign(model, name, f"has shape {list(weight.shape)}, expected {list(self.shapes[name])}")
        return super()._process_model_after_weight_loading(model, **kwargs)


def _check_keys(model: Any, info: Any) -> None:
    """Raise CheckpointError unless the files had every weight of the model and no other, of the right shapes.

    What is outside the base model may differ where it is loaded into another class than it was saved from: its head.
    """
    own = type(model).__name__ in (model.config.architectures or [type(model).__name__])
    for key, problem in key_problems(info.to_dict()):
        if own or key.startswith(f"{model.base_model_prefix}."):
            info.mismatched_keys.clear()  # or transformers raises its own of them instead
            raise _foreign(model, key, problem)


def _foreign(model: Any, key: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{model.config.name_or_path}: weight {key} {problem}; the weights do not belong to the sizes in config.json "
        f"or are incomplete: export the model again"
    )


class RouterQuantizer(_Loader):
    """Attaches routers to the model that from_pretrained is building, then fills them from `width.safetensors`."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from widellm.modeling import attaching

        files = kwargs.get("checkpoint_files") or []
        self.read = attaching.start(model, self.quantization_config, files[0] if files else None)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from widellm.modeling import attaching

        super()._process_model_after_weight_loading(model, **kwargs)
        attaching.finish(model, self.quantization_config, self.read)
        return model


def register_loader() -> None:
    """Tell transformers which classes handle `quant_method: widellm` and `widellm-static`."""
    from transformers.quantizers import auto

    for name, config, loader in ((ROUTED, RouterConfig, RouterQuantizer), (STATIC, StaticConfig, StaticQuantizer)):
        if name not in auto.AUTO_QUANTIZER_MAPPING:
            auto.register_quantization_config(name)(config)
            auto.register_quantizer(name)(loader)


# whoever imports this first has the registration, even where the hook met it half-imported
register_loader()

"""Directories that hold a routed model, in two forms with the same content, and the way from one to the other.

full      config.json, model*.safetensors, tokenizer   the base model in transformers' own form, channels regrouped
          width_config.json, width.safetensors         WidthConfig; routers, permutations, dial
          README.md                                    a model card
adapter   width_config.json, width.safetensors, README.md, tokenizer, and a config.json that says `model_type: widellm`;
          the base model is named in width_config.json, with a fingerprint of its weights

The static form (`static_model`) holds no routers any more: it is only loaded and pushed here, not read back.

safetensors and JSON only. What `save` and `export` write appears whole under its name or not at all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.config import WidthConfig, check_budget
from widellm.errors import CheckpointError, ConfigError, WidellmError
from widellm.files import atomic_directory, one_line
from widellm.modeling.attach import Width, set_budget, width_of
from widellm.modeling.attaching import attach_to, check_values, load_adapter, recorded_dtype
from widellm.modeling.card import model_card
from widellm.modeling.quantizer import RouterConfig
from widellm.modeling.register import NAME, AdapterConfig
from widellm.modeling.routed_model import RoutedModel
from widellm.modeling.swap import dense_class, special_weight
from widellm.modeling.width_file import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WidthFile,
    base_tensors,
    fingerprint,
    fingerprint_of,
    read_width,
    write_width,
)
from widellm.sources.models import is_static_directory, load_dense, local_directory, quantisation_of
from widellm.sources.quiet import quiet

__all__ = [
    "CONFIG_FILE",
    "FORMS",
    "WEIGHTS_FILE",
    "export",
    "is_routed_directory",
    "load",
    "load_adapter",
    "load_any",
    "push",
    "read_width",
    "save",
]

FORMS = ("full", "adapter")
CARD_FILE = "README.md"


def is_routed_directory(path: str | Path) -> bool:
    """Whether `path` is a directory that `save` wrote, in either form (or claims to be one)."""
    return (Path(path) / CONFIG_FILE).is_file()


def form_of(folder: Path) -> str:
    """Which of FORMS a directory has. Raises CheckpointError when its config.json is missing or damaged."""
    return "adapter" if _model_type(folder) == NAME else "full"


def save(
    model: Any, path: str | Path, tokenizer: Any = None, overwrite: bool = False, form: str = "full", **kwargs: Any
) -> None:
    """Write a routed model (and its tokenizer) to the new directory `path`, in one of FORMS.

    kwargs: those of transformers' save_pretrained for the full form (max_shard_size).

    Raises ConfigError for a dense model, or when the form cannot hold the model (an adapter of weights that training
    has changed, quantised weights in the full form); WidellmError when `path` exists (unless `overwrite`) or the disk
    is full.
    """
    _check_form(form)
    width = width_of(model)
    if not isinstance(model, RoutedModel):
        raise ConfigError(
            f"this {type(model).__name__} wraps a routed model: save what merge_and_unload() gives, or its adapters "
            f"alone with its own save_pretrained"
        )
    with atomic_directory(path, overwrite=overwrite) as folder:
        if form == "adapter":
            _write_adapter(model, width, folder)
        else:
            model.save_pretrained(folder, **kwargs)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def write_full(
    model: Any,
    folder: Path,
    dense_save: Callable[[dict[str, Tensor]], None],
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write the full form into `folder`; dense_save(weights) is transformers' own save_pretrained into it.

    weights: a state dict to save instead of the model's own.
    """
    width = width_of(model)
    quantised = getattr(model, "hf_quantizer", None) is not None or any(map(special_weight, model.modules()))
    if quantised:
        raise ConfigError('the full form holds no quantised weights: save with form="adapter"')
    tensors = {name: t.contiguous() for name, t in base_tensors(model, weights).items()}
    config = width.config.replace(base=_base(model, width, fingerprint(tensors)))
    attention = model.config._attn_implementation
    model.config._attn_implementation = width.dense_attention
    model.config.quantization_config = RouterConfig()
    try:
        with quiet():
            dense_save(tensors)
    finally:
        model.config._attn_implementation = attention
        del model.config.quantization_config
    _write_rest(width, config, folder)


def _write_adapter(model: Any, width: Width, folder: Path) -> None:
    base = width.config.base
    if not base.get("name"):
        raise ConfigError("an adapter needs the name of its base model: attach with WidthConfig(base={'name': ...})")
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.pre_quantized:
        raise ConfigError(
            "this model was quantised while it was loaded, so what it was loaded from is all there is to save: "
            "load that directory again with the same quantization_config"
        )
    found = _base(model, width, fingerprint_of(model))
    if "changed_from" in found:
        raise ConfigError(
            f"the weights are not those of {base['name']} any more (trained?), so an adapter cannot name it as its "
            f'base: save with form="full"'
        )
    AdapterConfig(architectures=[dense_class(model).__name__]).save_pretrained(folder)
    _write_rest(width, width.config.replace(base=found), folder)


def _base(model: Any, width: Width, found: str) -> dict[str, str]:
    """What width_config.json says of the base: its name, and the fingerprint and dtype of the weights as they are."""
    base = dict(width.config.base)
    recorded = base.get("fingerprint")
    if recorded is not None and recorded != found:
        base.setdefault("changed_from", recorded)
    return {**base, "fingerprint": found, "dtype": str(model.dtype).removeprefix("torch.")}


def _write_rest(width: Width, config: WidthConfig, folder: Path) -> None:
    write_width(width, config, folder)
    if not (folder / CARD_FILE).exists():
        (folder / CARD_FILE).write_text(model_card(config, width.dial), encoding="utf-8")


def load(
    path: str | Path,
    budget: float | None = None,
    dtype: Any = "auto",
    device_map: Any = None,
    base: str | Path | None = None,
    quantization_config: Any = None,
) -> tuple[Any, Any]:
    """Load (model, tokenizer) from a directory of either form, or a hub id of one, in evaluation mode.

    A directory of the static form loads too, as the dense model that it is.
    budget: what to set the dial to; None takes the budget the model was made for. dtype, device_map: as transformers'
    from_pretrained. base: where the base model of an adapter is now, instead of the recorded name.
    quantization_config: transformers' own, to quantise the weights of the full form while they load.

    Raises CheckpointError, naming the file or key, when something is missing, unexpected, mis-shaped, not finite, newer
    than this package or of another base model; ConfigError for a budget outside (0, 1] or below what was calibrated.
    """
    folder = local_directory(str(path))
    if is_static_directory(folder):
        _check_dense(str(path), budget, base)
        if quantization_config is not None:
            raise ConfigError(f"{path} is of the static form: load it, and quantise the loaded model")
        dense = load_dense(str(folder), dtype, device_map)
        return dense.model, dense.tokenizer
    read = read_width(folder)
    if form_of(folder) == "adapter":
        dense = _load_adapter(read, dtype, device_map, base, quantization_config)
    elif base is not None:
        raise ConfigError(f"{path} is the full form, which has its own weights: leave base out")
    elif quantization_config is not None:
        dense = load_dense(str(folder), dtype, device_map, quantization_config=quantization_config)
        attach_to(dense.model, read, in_order=True, check=False)
    else:
        # the check waits, so that a weight that is missing is named first
        asked = RouterConfig(source=str(folder), check=False)
        dense = load_dense(str(folder), dtype, device_map, quantization_config=asked)
        # a directory without a recorded dtype: rounding to a narrower one changes the fingerprint
        if recorded_dtype(read) != "auto" or dtype == "auto" or dense.model.dtype == torch.float32:
            check_values(dense.model, read)
    if budget is not None:
        set_budget(dense.model, budget)
    return dense.model, dense.tokenizer


def load_any(
    name: str, budget: float | None = None, dtype: Any = "auto", base: str | Path | None = None
) -> tuple[Any, Any]:
    """(model, tokenizer) of a routed directory or hub id (see `load`), or of any dense model that `load_dense` takes.

    Raises ConfigError when a budget below 1, or a base, is given with a dense model.
    """
    folder = local_directory(name)
    if is_routed_directory(folder):
        return load(folder, budget=budget, dtype=dtype, base=base)
    _check_dense(name, budget, base)
    dense = load_dense(str(folder), dtype=dtype)
    return dense.model, dense.tokenizer


def _check_dense(name: str, budget: float | None, base: str | Path | None) -> None:
    if budget is not None and check_budget(budget) < 1.0:
        raise ConfigError(f"{name} is a dense model and has no budget: run widellm prune first, or leave --budget out")
    if base is not None:
        raise ConfigError(f"{name} is a dense model: leave the base out")


def _load_adapter(read: WidthFile, dtype: Any, device_map: Any, base: str | Path | None, quantisation: Any) -> Any:
    if quantisation is not None:
        raise ConfigError(
            f"{read.folder} is an adapter, and a base that is quantised while it loads cannot be regrouped: "
            f"make the full form with widellm export, and quantise that"
        )
    source = base_of(read, base)
    tokenizer_from = read.folder if (read.folder / "tokenizer_config.json").is_file() else None
    dtype = recorded_dtype(read) if dtype == "auto" else dtype
    if quantisation_of(source) is not None:
        dense = load_dense(str(source), dtype, device_map, tokenizer_from=tokenizer_from)
        attach_to(dense.model, read)
        return dense
    asked = RouterConfig(source=str(read.folder), in_order=False)
    return load_dense(str(source), dtype, device_map, quantization_config=asked, tokenizer_from=tokenizer_from)


def base_of(read: WidthFile, base: str | Path | None = None) -> Path:
    """The directory of an adapter's base model: `base`, or the recorded name, which may be relative to the adapter.

    Raises CheckpointError when it cannot be found.
    """
    name = str(base or read.config.base.get("name", ""))
    beside = read.folder / name
    try:
        return beside if name and beside.is_dir() and not Path(name).is_dir() else local_directory(name)
    except WidellmError as error:
        raise CheckpointError(
            f"{read.folder} is an adapter of {name!r}, which cannot be had ({one_line(error, 160)}): "
            f"say where it is with base="
        ) from None


def export(
    path: str | Path,
    out: str | Path,
    form: str = "full",
    base: str | Path | None = None,
    overwrite: bool = False,
    **kwargs: Any,
) -> None:
    """Write the routed directory `path`, of either form, to the new directory `out` in `form`; nothing is lost.

    An adapter is loaded once before it gets its name, so that its base is known to be there and to be the right one.
    base: where the base model is, for reading an adapter and for naming it in one. Raises as `load` and `save` do.
    """
    _check_form(form)
    reading = form_of(local_directory(str(path))) == "adapter"
    model, tokenizer = load(path, base=base if reading else None)
    width = width_of(model)
    if base is not None:
        width.config = width.config.replace(base={**width.config.base, "name": str(base)})
    if form == "full":
        save(model, out, tokenizer, overwrite=overwrite, **kwargs)
        return
    with atomic_directory(out, overwrite=overwrite) as folder:
        _write_adapter(model, width, folder)
        tokenizer.save_pretrained(folder)
        del model, width
        load(folder)


def push(
    model: Any,
    repo_id: str,
    tokenizer: Any = None,
    form: str = "full",
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload a width-routed model",
    create_pr: bool = False,
    **kwargs: Any,
) -> str:
    """Upload a routed model, or a directory of any form as it is, to the hub; returns the commit's address.

    Its README.md is the generated model card. kwargs: as for `save`. Raises as `save` does; the hub client's own errors
    come as they are.
    """
    from huggingface_hub import HfApi  # comes with transformers

    with tempfile.TemporaryDirectory() as temporary:
        if isinstance(model, (str, Path)):
            if not is_static_directory(model):
                read_width(model)
            folder = Path(model)
        else:
            folder = Path(temporary) / "model"
            save(model, folder, tokenizer, form=form, **kwargs)
        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return str(
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                create_pr=create_pr,
            )
        )


def _check_form(form: str) -> None:
    if form not in FORMS:
        raise ConfigError(f"form must be one of {', '.join(FORMS)}, got {form!r}; static is made by export_static")


def _model_type(folder: Path) -> str:
    import json

    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json: it is incomplete, save the model again") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} is damaged ({one_line(error)})") from None

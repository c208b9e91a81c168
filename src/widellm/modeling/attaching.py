"""Routers onto a model that transformers is loading: before its weights are there, and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from widellm.errors import CheckpointError, ConfigError
from widellm.modeling.attach import attach, set_budget, set_dial, settle, width_of
from widellm.modeling.quantizer import RouterConfig
from widellm.modeling.width_file import CONFIG_FILE, WEIGHTS_FILE, WidthFile, check_base, fill, read_width
from widellm.routing.router import Router

_ROUTER_KEYS = r"\.router\.(down|up|bias)$"
"""Parameters that the weight files do not have: transformers must not complain of them."""


def start(model: Any, asked: RouterConfig, weights: str | None) -> WidthFile:
    """Attach empty routers to `model`, whose weights are still on the meta device; returns what to fill them with.

    weights: the first weight file that transformers will read. Raises CheckpointError as `read_width` does, and when
    the routers do not fit the model.
    """
    read = read_width(asked.source or _folder(model, weights))
    _attach(model, read, in_order=True)
    model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), _ROUTER_KEYS}
    return read


def finish(model: Any, asked: RouterConfig, read: WidthFile) -> None:
    """Regroup the loaded weights where they are not yet, check that they are the right ones, and fill the routers."""
    model._keys_to_ignore_on_load_missing.discard(_ROUTER_KEYS)
    keep_resident(model)
    offloaded = any(p.is_meta for p in model.parameters())
    if offloaded and not asked.in_order:
        raise CheckpointError(
            f"{read.folder} is an adapter, and layers of its base are offloaded: make the full form with widellm export"
        )
    settle(model, permute=not asked.in_order)
    if asked.check:
        check_values(model, read)
    complete(model, read)


def check_values(model: Any, read: WidthFile) -> None:
    """Raise CheckpointError unless the base weights are the right ones, as far as their values can tell.

    They cannot where loading has rounded them to another dtype, or has offloaded some.
    """
    recorded = recorded_dtype(read)
    exact = recorded == "auto" or model.dtype in (recorded, torch.float32)
    if exact and not any(p.is_meta for p in model.parameters()):
        check_base(model, read.config, read.folder)


def attach_to(model: Any, read: WidthFile, in_order: bool = False, check: bool = True) -> None:
    """The whole of it on a model that is loaded already (a quantised one): attach, check, fill."""
    _attach(model, read, in_order)
    if check:
        check_base(model, read.config, read.folder)
    complete(model, read)


def complete(model: Any, read: WidthFile) -> None:
    """Fill the routers of an attached model from `read` and set it to the budget it was made for."""
    try:
        dial = fill(width_of(model), read.tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{read.folder / WEIGHTS_FILE}: {error}") from None
    except ConfigError as error:
        raise CheckpointError(f"{read.folder / WEIGHTS_FILE} does not fit the model: {error}") from None
    set_dial(model, dial)
    set_budget(model, float(read.config.provenance.get("budget", 1.0)))
    model.eval()


def load_adapter(path: str | Path, *args: Any, base: str | None = None, **kwargs: Any) -> Any:
    """What AutoModelForCausalLM.from_pretrained does with an adapter; `kwargs` are those of from_pretrained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from widellm.modeling.checkpoint import base_of
    from widellm.sources.models import local_directory, quantisation_of, unpack

    kwargs = {k: v for k, v in kwargs.items() if k not in ("config", "adapter_kwargs", "trust_remote_code")}
    hub = {k: kwargs.pop(k) for k in ("revision", "subfolder", "cache_dir", "force_download") if k in kwargs}
    read = read_width(local_directory(str(path), hub.get("revision")))
    folder = base_of(read, base)
    if kwargs.get("dtype", "auto") in (None, "auto"):
        kwargs["dtype"] = recorded_dtype(read)
    if quantisation_of(folder) is not None:
        config = unpack(AutoConfig.from_pretrained(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, *args, config=config, **kwargs)
        attach_to(model, read)
        return model
    if kwargs.pop("quantization_config", None) is not None:
        raise CheckpointError(
            f"{path} is an adapter: a base that is quantised while it loads cannot be regrouped; "
            f"make the full form with widellm export, and quantise that"
        )
    asked = RouterConfig(source=str(read.folder), in_order=False)
    return AutoModelForCausalLM.from_pretrained(folder, *args, quantization_config=asked, **kwargs)


def recorded_dtype(read: WidthFile) -> Any:
    """The dtype that the base had when the routers were saved: "auto" where that is not recorded."""
    found = getattr(torch, read.config.base.get("dtype", ""), None)
    return found if isinstance(found, torch.dtype) else "auto"


def keep_resident(model: Any) -> None:
    """Routers stay on their layer's device where accelerate has offloaded the layer: they are small and always run."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        if isinstance(module, Router) and module.down.is_meta and hook is not None:
            from widellm.optional import require

            for part in getattr(hook, "hooks", [hook]):
                device = getattr(part, "execution_device", None) or "cpu"
                part.offload = False  # there is nothing on the disk to bring back
            require("accelerate.hooks", "gguf", "offloading").remove_hook_from_module(module)
            module.to_empty(device=device)


def _attach(model: Any, read: WidthFile, in_order: bool) -> None:
    try:
        with torch.device("cpu"):  # transformers builds models under a meta device; routers say where they go
            attach(model, read.config, read.tensors["permutations"], in_order=in_order)
    except ConfigError as error:
        raise CheckpointError(f"{read.folder / WEIGHTS_FILE} does not fit the model: {error}") from None


def _folder(model: Any, weights: str | None) -> Path:
    """The directory with the router files of the model that is being loaded, fetched from the hub if need be."""
    name = str(model.config.name_or_path)
    if weights is not None:
        folder = Path(weights).parent
        if (folder / CONFIG_FILE).is_file() and (folder / WEIGHTS_FILE).is_file():
            return folder
        if not Path(name).is_dir():
            from transformers.utils import cached_file

            # a hub snapshot's directory is named by its commit
            found = [cached_file(name, file, revision=folder.name) for file in (CONFIG_FILE, WEIGHTS_FILE)]
            return Path(str(found[0])).parent
        return folder
    return Path(name)

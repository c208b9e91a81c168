"""One self-describing directory: the dense model in transformers' own form, and beside it what widellm adds.

    config.json, model.safetensors, tokenizer files   the base model, channels regrouped (still the same function)
    width_config.json                                 WidthConfig: alone rebuilds the module structure
    width.safetensors                                 routers, permutations, dial

safetensors and JSON only. The directory appears whole under its name or not at all.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from widellm.config import WidthConfig
from widellm.errors import CheckpointError, ConfigError
from widellm.files import atomic_directory
from widellm.modeling.attach import Width, attach, set_budget, set_dial, width_of
from widellm.routing.budget import Dial
from widellm.sources.models import load_dense
from widellm.sources.quiet import quiet

CONFIG_FILE = "width_config.json"
WEIGHTS_FILE = "width.safetensors"
_ROUTER_PARTS = ("down", "up", "bias")
_SAMPLES = 64


def is_routed_directory(path: str | Path) -> bool:
    """Whether `path` is a directory that `save` wrote (or claims to be one)."""
    return (Path(path) / CONFIG_FILE).is_file()


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """Short SHA-256 over names, shapes and evenly spaced values (64 a tensor) of weights: cheap at any size."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        flat_ids = torch.linspace(0, tensor.numel() - 1, min(_SAMPLES, tensor.numel()), dtype=torch.float64).long()
        index = torch.unravel_index(flat_ids, tensor.shape)  # by index: no copy, and strides do not matter
        values = tensor.detach()[tuple(i.to(tensor.device) for i in index)].to("cpu", torch.float32)
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def base_tensors(model: Any) -> dict[str, Tensor]:
    """The model's own parameters and buffers, by their transformers names; what widellm added is left out."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".router." not in name}


def _width_tensors(width: Width) -> dict[str, Tensor]:
    tensors = {}
    for sub in width.sublayers:
        router = width.router(sub)
        for part in _ROUTER_PARTS:
            tensors[f"layers.{sub.layer_index}.{sub.kind}.router.{part}"] = getattr(router, part).detach()
    tensors["permutations"] = width.permutations.to(torch.int32)
    if width.dial is not None:
        tensors["dial.budgets"] = width.dial.budgets
        tensors["dial.thresholds"] = width.dial.thresholds
    return tensors


def save(model: Any, path: str | Path, tokenizer: Any = None, overwrite: bool = False) -> None:
    """Write a routed model (and its tokenizer) to the new directory `path`.

    Raises ConfigError for a dense model, WidellmError when `path` exists (unless `overwrite`) or the disk is full.
    """
    width = width_of(model)
    with atomic_directory(path, overwrite=overwrite) as folder:
        tensors = {name: t.contiguous() for name, t in base_tensors(model).items()}
        config = width.config.replace(base={**width.config.base, "fingerprint": fingerprint(tensors)})
        attention = model.config._attn_implementation
        model.config._attn_implementation = width.dense_attention
        try:
            with quiet():
                model.save_pretrained(folder, state_dict=tensors)
        finally:
            model.config._attn_implementation = attention
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        save_file({k: v.contiguous() for k, v in _width_tensors(width).items()}, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(config.to_json())


def load(path: str | Path, budget: float | None = None, dtype: Any = "auto", device_map: Any = None) -> tuple[Any, Any]:
    """Load (model, tokenizer) from a directory that `save` wrote, in evaluation mode.

    budget: what to set the dial to; None takes the budget the model was made for. dtype, device_map: as transformers'
    from_pretrained.

    Raises CheckpointError, naming the file or key, when something is missing, unexpected, mis-shaped, not finite, newer
    than this package or of another base model.
    """
    path = Path(path)
    if not is_routed_directory(path):
        raise CheckpointError(f"{path} has no {CONFIG_FILE}: give a directory that widellm prune wrote")
    config = WidthConfig.from_json((path / CONFIG_FILE).read_text(encoding="utf-8"), str(path / CONFIG_FILE))
    dense = load_dense(str(path), dtype=dtype, device_map=device_map)
    model = dense.model
    expected = config.base.get("fingerprint")
    exact = dtype == "auto" or dtype == torch.float32  # rounding to a narrower dtype changes the values
    found = fingerprint(base_tensors(model)) if exact else expected
    if found != expected:
        raise CheckpointError(
            f"{path}: the base weights have fingerprint {found}, the routers were made for {expected}: wrong base model"
        )
    tensors = _read(path / WEIGHTS_FILE)
    if "permutations" not in tensors:
        raise CheckpointError(f"{path / WEIGHTS_FILE}: missing keys [permutations]")
    try:
        # the saved base is regrouped already; detach needs to know how
        width = attach(model, config, tensors["permutations"], in_order=True)
        dial = _fill(width, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path / WEIGHTS_FILE}: {error}") from None
    except ConfigError as error:
        raise CheckpointError(f"{path / WEIGHTS_FILE} does not fit the model: {error}") from None
    set_dial(model, dial)
    set_budget(model, float(config.provenance.get("budget", 1.0)) if budget is None else budget)
    model.eval()
    return model, dense.tokenizer


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the directory is incomplete, save the model again") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): it is truncated or not a safetensors file") from None


def _fill(width: Width, read: dict[str, Tensor]) -> Dial:
    """Copy `read` into the routers of `width` and return the dial. Every key must be there, and no other."""
    expected = {name: (list(tensor.shape), tensor.dtype) for name, tensor in _width_tensors(width).items()}
    settings = read["dial.budgets"].numel() if "dial.budgets" in read else 0
    expected["dial.budgets"] = ([settings], torch.float64)
    expected["dial.thresholds"] = ([len(width.sublayers), settings], torch.float32)
    missing, unexpected = sorted(set(expected) - set(read)), sorted(set(read) - set(expected))
    if missing or unexpected:
        raise CheckpointError(f"missing keys {_few(missing)}, unexpected keys {_few(unexpected)}")
    for name, (shape, dtype) in expected.items():
        if list(read[name].shape) != shape or read[name].dtype != dtype:
            raise CheckpointError(f"{name} is {read[name].dtype} {list(read[name].shape)}, expected {dtype} {shape}")
        if not bool(torch.isfinite(read[name]).all()):
            raise CheckpointError(f"{name} holds NaN or infinity: the file is damaged, calibrate again")
    with torch.no_grad():
        for sub in width.sublayers:
            router = width.router(sub)
            for part in _ROUTER_PARTS:
                getattr(router, part).copy_(read[f"layers.{sub.layer_index}.{sub.kind}.router.{part}"])
    return Dial(read["dial.budgets"], read["dial.thresholds"])


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return f"[{shown}{f', and {len(names) - 3} more' if len(names) > 3 else ''}]"

"""`width_config.json` and `width.safetensors`: what widellm adds to a model, and the fingerprint of that model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from widellm.config import WidthConfig
from widellm.errors import CheckpointError, ConfigError
from widellm.modeling.attach import Width
from widellm.routing.budget import Dial

CONFIG_FILE = "width_config.json"
WEIGHTS_FILE = "width.safetensors"
ROUTER_PARTS = ("down", "up", "bias")
_SAMPLES = 64


@dataclass(frozen=True)
class WidthFile:
    """What a directory says about its routers, read and not yet checked against a model."""

    folder: Path
    config: WidthConfig
    tensors: dict[str, Tensor]
    """`layers.{i}.{attention|ffn}.router.{down|up|bias}`, `permutations`, `dial.budgets`, `dial.thresholds`."""


def read_width(folder: str | Path) -> WidthFile:
    """Read both files of a directory, either form.

    Raises CheckpointError, naming the file, when one is missing, damaged or from a newer version.
    """
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}: give a directory that widellm prune wrote")
    config = WidthConfig.from_json((folder / CONFIG_FILE).read_text(encoding="utf-8"), str(folder / CONFIG_FILE))
    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the directory is incomplete, save the model again") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): it is truncated or not a safetensors file") from None
    if "permutations" not in tensors:
        raise CheckpointError(f"{path}: missing keys [permutations]")
    return WidthFile(folder, config, tensors)


def write_width(width: Width, config: WidthConfig, folder: Path) -> None:
    """Write both files of an attached model into `folder`."""
    tensors = {name: t.to("cpu").contiguous() for name, t in width_tensors(width).items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")


def width_tensors(width: Width) -> dict[str, Tensor]:
    """The tensors of `width.safetensors` of an attached model; routers are not copied."""
    tensors = {}
    for sub in width.sublayers:
        router = width.router(sub)
        for part in ROUTER_PARTS:
            tensors[f"layers.{sub.layer_index}.{sub.kind}.router.{part}"] = getattr(router, part).detach()
    tensors["permutations"] = width.permutations.to(torch.int32)
    if width.dial is not None:
        tensors["dial.budgets"] = width.dial.budgets
        tensors["dial.thresholds"] = width.dial.thresholds
    return tensors


def fill(width: Width, read: dict[str, Tensor]) -> Dial:
    """Copy `read` into the routers of `width` and return the dial. Every key must be there, and no other."""
    expected = {name: (list(tensor.shape), tensor.dtype) for name, tensor in width_tensors(width).items()}
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
            for part in ROUTER_PARTS:
                getattr(router, part).copy_(read[f"layers.{sub.layer_index}.{sub.kind}.router.{part}"])
    return Dial(read["dial.budgets"], read["dial.thresholds"])


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return f"[{shown}{f', and {len(names) - 3} more' if len(names) > 3 else ''}]"


def base_tensors(model: Any, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The model's own parameters and buffers, by their transformers names; what widellm added is left out.

    weights: a state dict to take them from; None: the model's. Raises ConfigError when PEFT adapters are among them.
    """
    found = model.state_dict() if weights is None else weights
    if any(".base_layer." in name for name in found):
        raise ConfigError("PEFT adapters are not merged: call merge_and_unload() before saving")
    return {name: tensor for name, tensor in found.items() if ".router." not in name}


def fingerprint_of(model: Any) -> str:
    """`fingerprint` of the base weights of a model.

    Weights that their library repacks when they are first used (bitsandbytes) are left out: embeddings, norms and
    biases, and the names and shapes of those, have to tell the model.
    """
    repacked = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(weight := getattr(module, "weight", None), torch.nn.Parameter)
        and type(weight) is not torch.nn.Parameter
        and issubclass(type(weight), torch.nn.Parameter)
    )
    tensors = base_tensors(model)
    return fingerprint({name: t for name, t in tensors.items() if not (repacked and name.startswith(repacked))})


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """Short SHA-256 over names, shapes and evenly spaced values (64 a tensor) of weights: cheap at any size.

    Raises ConfigError when a weight is on the meta device (offloaded), where it has no values.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if tensor.is_meta:
            raise ConfigError(f"weight {name} is offloaded and cannot be looked at: load onto devices with room for it")
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter and hasattr(tensor, "dequantize"):
            tensor = tensor.dequantize()  # a quantised tensor class that does not take indices
        flat_ids = torch.linspace(0, tensor.numel() - 1, min(_SAMPLES, tensor.numel()), dtype=torch.float64).long()
        index = torch.unravel_index(flat_ids, tensor.shape)  # by index: no copy, and strides do not matter
        values = tensor[tuple(i.to(tensor.device) for i in index)].to("cpu", torch.float32)
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_base(model: Any, config: WidthConfig, where: Path) -> None:
    """Raise CheckpointError unless the weights of `model`, regrouped, are those that the routers were made for."""
    expected = config.base.get("fingerprint")
    found = fingerprint_of(model)
    if expected is not None and found != expected:
        raise CheckpointError(
            f"{where}: the base weights have fingerprint {found}, the routers are for {expected}: wrong base model"
        )

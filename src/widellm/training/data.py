"""Training text: packed into windows once and kept as an Arrow file, or streamed."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.errors import TextError, WidellmError
from widellm.files import atomic_directory
from widellm.optional import require
from widellm.sources.gguf import cache_directory
from widellm.sources.texts import SEPARATOR, read_texts, token_windows

_BATCH = 64
"""Documents tokenised at a time when streaming."""


def mixed_texts(sources: Sequence[str], column: str = "text", seed: int | None = 0) -> Iterator[str]:
    """Documents of several sources (see `sources.texts.read_texts`) in turn, until the shortest ends."""
    streams = [read_texts(source, column, seed) for source in sources]
    return itertools.chain.from_iterable(zip(*streams, strict=False)) if len(streams) > 1 else streams[0]


def packed_dataset(
    tokenizer: Any,
    sources: Sequence[str],
    tokens: int,
    window: int,
    column: str = "text",
    seed: int = 0,
    cache_dir: str | Path | None = None,
) -> Any:
    """A `datasets.Dataset` with `input_ids` of `window` tokens, at least `tokens` together, memory-mapped.

    Made once for a key over tokenizer, text (of local files their bytes, of a data set its id) and settings, in
    `cache_dir` (default: the package's cache). Raises TextError as `read_texts` and `token_windows` do.
    """
    datasets = require("datasets", "train", "training data")
    key = cache_key(tokenizer, sources, tokens, window, column, seed)
    folder = Path(cache_dir if cache_dir is not None else cache_directory()) / "windows" / key
    if not folder.is_dir():
        count = -(-tokens // window) * window
        windows = token_windows(tokenizer, mixed_texts(sources, column, seed), count, window)
        try:
            with atomic_directory(folder) as temporary, _no_bars(datasets):
                datasets.Dataset.from_dict({"input_ids": windows.tolist()}).save_to_disk(str(temporary))
        except WidellmError:
            if not folder.is_dir():  # else another process has made the same meanwhile
                raise
    return datasets.load_from_disk(str(folder))


@contextmanager
def _no_bars(datasets: Any) -> Iterator[None]:
    """Inside the block, `datasets` draws no bars of its own."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def streamed_dataset(
    tokenizer: Any, sources: Sequence[str], window: int, column: str = "text", seed: int = 0, wanted: int = 0
) -> Any:
    """A `datasets.IterableDataset` of the same windows, tokenised on the way: for text that is too much to keep.

    Reading it raises TextError where the text ends before `wanted` windows. The order depends on the arguments alone,
    so that a resumed run reads on where it was after skipping what it had.
    """
    datasets = require("datasets", "train", "training data")
    arguments = {"tokenizer": tokenizer, "sources": list(sources), "window": window, "column": column, "seed": seed}
    return datasets.IterableDataset.from_generator(stream_windows, gen_kwargs={**arguments, "wanted": wanted})


def stream_windows(
    tokenizer: Any, sources: Sequence[str], window: int, column: str, seed: int, wanted: int = 0
) -> Iterator[dict[str, list[int]]]:
    """The windows of `streamed_dataset`, one at a time."""
    ids: list[int] = []
    given = 0
    for batch in _batches(mixed_texts(sources, column, seed)):
        for document in tokenizer([t + SEPARATOR for t in batch], add_special_tokens=False, verbose=False).input_ids:
            ids.extend(document)
        while len(ids) >= window:
            yield {"input_ids": ids[:window]}
            ids = ids[window:]
            given += 1
    if given < wanted:
        raise TextError(f"the text has {given} windows of {window} tokens, {wanted} are needed: give more text")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    stream = iter(texts)
    while batch := list(itertools.islice(stream, _BATCH)):
        yield batch


def cache_key(tokenizer: Any, sources: Sequence[str], tokens: int, window: int, column: str, seed: int) -> str:
    """Names a packed data set: equal keys, equal windows."""
    # Python's own documentation, which is a source too, changes with its version
    digest = hashlib.sha256(json.dumps([2, tokens, window, column, seed, sys.version_info[:2]]).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    digest.update(vocabulary.encode())
    for source in sources:
        path = Path(source).expanduser()
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] if path.exists() else []
        digest.update(b"\0" + str(source if not files else "").encode())
        for file in files:
            digest.update(f"\0{file.suffix} {file.stat().st_size}\0".encode())
            with open(file, "rb") as handle:
                while chunk := handle.read(1 << 20):
                    digest.update(chunk)
    return digest.hexdigest()[:24]


def as_windows(dataset: Any, first: int, count: int) -> Tensor:
    """Windows first .. first + count of a packed data set, int64 [count, T]; TextError when there are fewer."""
    if first + count > len(dataset):
        raise TextError(f"the text has {len(dataset)} windows, {first + count} are needed: give more text")
    return torch.tensor(dataset[first : first + count]["input_ids"], dtype=torch.long)


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows of `input_ids` -> int64 [B, T]."""
    return {"input_ids": torch.tensor([row["input_ids"] for row in rows], dtype=torch.long)}

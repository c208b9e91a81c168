"""Text to calibrate and evaluate on: local files, data sets, Python's own documentation, or the model's own words.

And its windows of token ids. No special tokens are added anywhere: a window starts in the middle of text.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.errors import ConfigError, TextError
from widellm.sources.readers import PLAIN, TABLES, data_set, documents, python_docs

PYTHON_DOCS = "python-docs"
SEPARATOR = "\n\n"
"""Between two documents of a stream."""

_SHUFFLE = 4096  # documents held back while shuffling
_SAMPLE_BATCH = 16


def read_texts(source: str | Path, column: str = "text", seed: int | None = None) -> Iterator[str]:
    """Stream the documents of a text source; blank ones are left out.

    source: `python-docs` (the standard library's `pydoc_data.topics`); a plain text file (any suffix but those below;
    cut at line ends into documents of about 256 kB); a .jsonl or .json file of objects with a `column` of text, or of
    strings; a .parquet file (extra `data`); a directory (its .txt, .md, .raw, .jsonl and .parquet files, subdirectories
    included, hidden ones not, sorted by path); or the id of a data set on the hub, ID[:CONFIG[:SPLIT]], streamed (extra
    `data`).
    seed: None keeps the source's order; a number shuffles it, within a buffer of 4096 documents.

    Raises TextError, here or on reading, when the source is unknown, holds no text, is binary or lacks the column.
    """
    stream = _open(str(source), column)
    return _shuffled(stream, seed) if seed is not None else stream


def read_text(source: str | Path, column: str = "text") -> str:
    """A whole text source as one string: a plain file as it is, documents of anything else joined by blank lines.

    Takes the sources of `read_texts` and raises as it does.
    """
    path = Path(source).expanduser()
    if not path.is_file() or _is_table(path):
        return SEPARATOR.join(read_texts(source, column))
    text = "".join(documents(path, column))
    if not text or text.isspace():
        raise TextError(f"{source} is empty: it holds no text")
    return text


def column_of(column: str | None, *sources: str) -> str:
    """The column to read from these sources: the one that was asked for, or "text".

    Raises TextError where one was asked for, and none of them has columns: they are plain text files or python-docs.
    """
    if column is not None and not any(map(_has_columns, sources)):
        raise TextError(f"{', '.join(sources)} has no columns: leave the column {column!r} out")
    return column or "text"


def _is_table(file: Path) -> bool:
    return file.suffix.lower() in (".json", *TABLES)


def _has_columns(source: str) -> bool:
    path = Path(source).expanduser()
    if path.is_file():
        return _is_table(path)
    return path.exists() or source not in (PYTHON_DOCS, "self")


def _open(source: str, column: str) -> Iterator[str]:
    path = Path(source).expanduser()
    if source == PYTHON_DOCS and not path.exists():
        return python_docs()
    if path.is_dir():
        found = (p for p in path.rglob("*") if p.suffix.lower() in (*PLAIN, *TABLES) and p.is_file())
        files = sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts))
        if not files:
            raise TextError(f"{source} has no {', '.join((*PLAIN, *TABLES))} file in it")
        return _not_empty(itertools.chain.from_iterable(documents(file, column) for file in files), source)
    if path.exists():
        return _not_empty(documents(path, column), source)
    known = (".json", *PLAIN, *TABLES)
    if source.startswith((".", "/", "~")) or "\\" in source or path.suffix.lower() in known or source.count("/") > 1:
        raise TextError(f"there is no text at {source}: no such file or directory")
    return _not_empty(data_set(source, column), source)


def _not_empty(stream: Iterator[str], source: str) -> Iterator[str]:
    empty = True
    for text in stream:
        if text and not text.isspace():
            empty = False
            yield text
    if empty:
        raise TextError(f"{source} is empty: it holds no text")


def _shuffled(stream: Iterator[str], seed: int) -> Iterator[str]:
    """Shuffle a stream through a buffer: each document that comes in pushes a random one out."""
    rng = random.Random(seed)
    buffer = list(itertools.islice(stream, _SHUFFLE))
    rng.shuffle(buffer)
    for text in stream:
        place = rng.randrange(len(buffer))
        buffer[place], text = text, buffer[place]
        yield text
    yield from buffer


def token_windows(tokenizer: Any, texts: Iterable[str], tokens: int, window: int, skip: int = 0) -> Tensor:
    """The first `tokens` token ids of a stream of documents, after `skip`, as int64 [tokens // window, window].

    Documents are packed one after the other with a blank line between. The stream is read no further than needed.

    Raises TextError when it ends before `skip + tokens`, ConfigError when `tokens` is less than one window.
    """
    if window < 2 or tokens < window or skip < 0:
        raise ConfigError(f"need window >= 2, tokens >= window and skip >= 0, got {window}, {tokens} and {skip}")
    wanted = skip + tokens
    ids: list[int] = []
    stream = iter(texts)
    while len(ids) < wanted:
        # a token is rarely more than four characters, so that most streams are read once and little too far
        batch = _take_characters(stream, 4 * (wanted - len(ids)))
        if not batch:
            needed = f"{wanted} tokens are needed" + (f" ({skip} skipped, {tokens} used)" if skip else "")
            raise TextError(
                f"the text is too short: it has {len(ids)} tokens, {needed}: give more text or ask for fewer"
            )
        encoded = tokenizer([text + SEPARATOR for text in batch], add_special_tokens=False, verbose=False).input_ids
        for document in encoded:
            ids.extend(document)
    count = tokens // window
    return torch.tensor(ids[skip : skip + count * window], dtype=torch.long).view(count, window)


def _take_characters(stream: Iterator[str], characters: int) -> list[str]:
    batch: list[str] = []
    for text in stream:
        batch.append(text)
        characters -= len(text)
        if characters <= 0:
            break
    return batch


def whole_text_windows(tokenizer: Any, text: str, window: int, max_windows: int | None = None) -> Tensor:
    """A text tokenised as one piece and cut into non-overlapping windows: int64 [n, window], the remainder dropped.

    This is what this package's token perplexity is measured on; with `max_windows`, on the first so many.

    Raises TextError when the text is shorter than one window, ConfigError for impossible sizes.
    """
    if window < 2 or (max_windows is not None and max_windows < 1):
        raise ConfigError(f"need window >= 2 and max_windows >= 1, got {window} and {max_windows}")
    ids = tokenizer(text, add_special_tokens=False, verbose=False, return_tensors="pt").input_ids[0]
    count = len(ids) // window
    if count == 0:
        raise TextError(f"the text is too short: it has {len(ids)} tokens, a window needs {window}")
    if max_windows is not None:
        count = min(count, max_windows)
    return ids[: count * window].to(torch.long).view(count, window)


def context_of(model: Any) -> int | None:
    """Tokens that a model's positions reach; None where its configuration does not say."""
    found = getattr(model.config, "max_position_embeddings", None)
    return None if found is None else int(found)


def check_window(model: Any, window: int) -> None:
    """Raise ConfigError where a window is longer than the model's context."""
    context = context_of(model)
    if context is not None and window > context:
        raise ConfigError(f"--window {window} is longer than the model's context of {context} tokens: ask for less")


def split_windows(windows: Tensor, held_out: int) -> tuple[Tensor, Tensor]:
    """(calibration windows, the last `held_out` windows). TextError when nothing would be left to calibrate on."""
    if not 0 <= held_out < len(windows):
        raise TextError(f"{held_out} of {len(windows)} windows cannot be held out: give more text or hold out fewer")
    cut = len(windows) - held_out
    return windows[:cut], windows[cut:]


def windows_digest(windows: Tensor) -> str:
    """SHA-256 of the token ids (int64, little-endian) and their shape: names a calibration sample exactly."""
    digest = hashlib.sha256(str(tuple(windows.shape)).encode())
    digest.update(windows.to("cpu", torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def window_record(windows: Tensor, source: str, seed: int | None, first: int = 0) -> dict[str, Any]:
    """What a checkpoint keeps of the windows it was calibrated on, enough to recognise and to repeat them.

    first: place of the first of them in the stream of `source`, in windows.
    """
    count, window = windows.shape
    return {
        "source": source,
        "seed": seed,
        "window": window,
        "windows": [first, first + count],
        "tokens": windows.numel(),
        "sha256": windows_digest(windows),
    }


def sample_texts(
    model: Any,
    tokenizer: Any,
    tokens: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    length: int = 256,
) -> list[str]:
    """Texts that the model itself writes, of at least `tokens` tokens together: calibration without any data.

    Each starts from a random token of the vocabulary and samples at temperature 1, up to `length` tokens, 16 at a time.
    The same seed gives the same texts; torch's global random state is left as it was. progress: (tokens done, tokens).

    Raises TextError when the model keeps on writing nothing.
    """
    specials = set(tokenizer.all_special_ids)
    size = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
    starts = torch.tensor([i for i in range(size) if i not in specials])
    pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    device = model.device
    texts: list[str] = []
    done = 0
    limit = 4 + 8 * tokens // (length * _SAMPLE_BATCH)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.inference_mode():
        torch.manual_seed(seed)
        for _ in range(limit):
            start = starts[torch.randint(len(starts), (_SAMPLE_BATCH, 1))].to(device)
            output = model.generate(
                input_ids=start,
                attention_mask=torch.ones_like(start),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=length - 1,
                pad_token_id=pad,
            )
            for ids in output.tolist():
                if specials.issuperset(ids[1:]):  # it stopped at once
                    continue
                text = tokenizer.decode(ids, skip_special_tokens=True)
                texts.append(text)
                # counted as it will be read again: decoding and encoding does not give the same number of tokens
                done += len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
            if progress is not None:
                progress(min(done, tokens), tokens)
            if done >= tokens:
                return texts
    raise TextError(f"the model wrote only {done} of {tokens} tokens in {limit} rounds: give a text instead of self")

"""Readers of the formats that text comes in: each streams documents, and says one line about a file it cannot read."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from widellm.errors import TextError
from widellm.files import one_line
from widellm.optional import require

PLAIN = (".txt", ".md", ".raw")
TABLES = (".jsonl", ".parquet")

_CHUNK = 1 << 18  # bytes of a plain file that make one document: a file of any size streams


def python_docs() -> Iterator[str]:
    """The texts of the standard library's `pydoc_data.topics`, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions ship Python without its documentation
        raise TextError("this Python has no pydoc_data.topics: give a text file instead of python-docs") from None
    # sorted: the order of the module differs between Python versions
    return (topics[name] for name in sorted(topics))


def documents(path: Path, column: str) -> Iterator[str]:
    """The documents of one file, by its suffix; any suffix but .jsonl, .json and .parquet is plain text."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _jsonl(path, column)
    if suffix == ".json":
        return _json(path, column)
    if suffix == ".parquet":
        return _parquet(path, column)
    return _plain(path)


def _plain(path: Path) -> Iterator[str]:
    """A text file in pieces that end at line ends where they can; joined, they are the file."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest = ""
    for data in _read(path):
        rest += _decode(decoder, data, path)
        cut = rest.rfind("\n") + 1
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    rest += _decode(decoder, b"", path, final=True)
    if rest:
        yield rest


def _read(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while data := file.read(_CHUNK):
                if b"\0" in data:
                    raise TextError(f"{path} is binary (it has NUL bytes): give a UTF-8 text file")
                yield data
    except OSError as error:
        raise TextError(f"{path} cannot be read ({one_line(error)})") from error


def _decode(decoder: codecs.IncrementalDecoder, data: bytes, path: Path, final: bool = False) -> str:
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text ({error.reason}): is it binary, or in another encoding?") from None


def _jsonl(path: Path, column: str) -> Iterator[str]:
    number, rest = 0, b""
    for data in itertools.chain(_read(path), (b"\n",)):  # cut by hand: a line may be longer than a chunk
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            number += 1
            if line.strip():
                yield _field(_parse(line, f"{path} line {number}"), column, f"{path} line {number}")


def _json(path: Path, column: str) -> Iterator[str]:
    records = _parse(b"".join(_read(path)), str(path))
    if not isinstance(records, list):
        raise TextError(f"{path} holds {type(records).__name__}, expected a list of objects or strings")
    for number, record in enumerate(records):
        yield _field(record, column, f"{path} record {number}")


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise TextError(f"{where} is not UTF-8 text: is it binary, or in another encoding?") from None
    except (ValueError, RecursionError) as error:
        raise TextError(f"{where} is not valid JSON ({one_line(error)})") from None


def _field(record: Any, column: str, where: str) -> str:
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        raise TextError(f"{where} is {type(record).__name__}, expected an object or a string")
    if column not in record:
        raise TextError(f"{where} has no column {column!r}, it has {_names(record)}: pass --column")
    text = record[column]
    if text is not None and not isinstance(text, str):
        raise TextError(f"{where}: column {column!r} holds {type(text).__name__}, expected text")
    return text or ""


def _names(columns: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, columns))[:8]) or "none"


def _parquet(path: Path, column: str) -> Iterator[str]:
    parquet = require("pyarrow.parquet", "data", "a .parquet file")
    arrow = require("pyarrow", "data", "a .parquet file")
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise TextError(f"{path} cannot be read as parquet, it may be truncated ({one_line(error)})") from error
    with file:
        names = file.schema_arrow.names
        if column not in names:
            raise TextError(f"{path} has no column {column!r}, it has {_names(names)}: pass --column")
        try:
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                for text in batch.column(0).to_pylist():
                    yield _field({column: text}, column, str(path))
        except (arrow.ArrowException, OSError) as error:
            raise TextError(f"{path} cannot be read to its end ({one_line(error)})") from error


def data_set(name: str, column: str) -> Iterator[str]:
    """The documents of a hub data set ID[:CONFIG[:SPLIT]], streamed."""
    datasets = require("datasets", "data", f"{name!r} is no file or directory here; the data set of that id")
    identifier, _, config = name.partition(":")
    config, _, split = config.partition(":")
    try:
        rows = iter(datasets.load_dataset(identifier, config or None, split=split or "train", streaming=True))
        first = next(rows, None)
    except Exception as error:  # datasets, huggingface_hub, fsspec and the HTTP client each raise their own
        raise TextError(
            f"{name} is no file or directory here, and the data set of that id cannot be opened: "
            f"download it and give the file ({one_line(error, 120)})"
        ) from error
    if first is not None:
        for row in itertools.chain((first,), rows):
            yield _field(row, column, f"data set {name}")

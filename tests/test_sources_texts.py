"""Reading text of every kind and cutting it into windows."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import tiny_model
from widellm.errors import ConfigError, MissingDependencyError, TextError
from widellm.sources.texts import (
    column_of,
    read_text,
    read_texts,
    sample_texts,
    split_windows,
    token_windows,
    whole_text_windows,
    window_record,
    windows_digest,
)

# ---- reading


def test_python_docs_need_no_file() -> None:
    texts = list(read_texts("python-docs"))
    assert len(texts) > 50 and sum(map(len, texts)) > 300_000
    assert texts == list(read_texts("python-docs"))


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.raw", "a.TXT", "a.rst", "a"])
def test_plain_file(name: str, tmp_path: Path) -> None:
    text = "\n = Title = \n\nöne\r\ntwo\n"
    (tmp_path / name).write_bytes(text.encode())
    assert list(read_texts(tmp_path / name)) == [text]
    assert read_text(tmp_path / name) == text


def test_large_plain_file_streams_and_joins_again(tmp_path: Path) -> None:
    text = "".join(f"line {i} with ünicode that straddles chunks\n" for i in range(20_000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    pieces = list(read_texts(tmp_path / "a.txt"))
    assert len(pieces) > 2 and all(p.endswith("\n") for p in pieces)
    assert "".join(pieces) == text == read_text(tmp_path / "a.txt")
    (tmp_path / "one-line.txt").write_text("é" * 400_000, encoding="utf-8")
    assert read_text(tmp_path / "one-line.txt") == "é" * 400_000


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello\n")
    assert read_text(tmp_path / "a.txt") == "hello\n"


def _write(path: Path, records: list[Any]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist(records), path)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_tables(name: str, tmp_path: Path) -> None:
    records = [{"text": "one", "body": "x"}, {"text": " \n", "body": "y"}, {"text": None, "body": ""}]
    records.append({"text": "two", "body": "z"})
    path = _write(tmp_path / name, records)
    assert list(read_texts(path)) == ["one", "two"]
    assert list(read_texts(path, column="body")) == ["x", "y", "z"]
    assert read_text(path) == "one\n\ntwo"
    with pytest.raises(TextError, match="no column 'content', it has body, text: pass --column"):
        list(read_texts(path, column="content"))
    numbers = _write(tmp_path / name, [{"text": 3}])
    with pytest.raises(TextError, match="column 'text' holds int, expected text"):
        list(read_texts(numbers))


def test_json_lines_of_strings_blank_lines_and_no_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('"one"\n\n{"text": "two"}')
    assert list(read_texts(tmp_path / "a.jsonl")) == ["one", "two"]
    (tmp_path / "long.jsonl").write_text(json.dumps("x" * 600_000) + "\n" + json.dumps("y"))
    assert [len(t) for t in read_texts(tmp_path / "long.jsonl")] == [600_000, 1]


@pytest.mark.requirement("R7")
def test_directory(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    _write(tmp_path / "a.jsonl", ["first"])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text("third")
    (tmp_path / "image.png").write_bytes(b"\0\0")
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.txt").write_text("never")
    assert list(read_texts(tmp_path)) == ["first", "second", "third"]


def test_seed_shuffles_and_repeats(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [str(i) for i in range(6000)])
    plain, first, again, other = (list(read_texts(path, seed=s)) for s in (None, 1, 1, 2))
    assert first == again and first != other and first != plain
    assert sorted(first) == sorted(plain) == sorted(other)


def test_reading_is_lazy(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('"good"\n' * 3 + "{broken\n")
    stream = read_texts(tmp_path / "a.jsonl")
    assert list(itertools.islice(stream, 3)) == ["good"] * 3
    with pytest.raises(TextError, match="a.jsonl line 4 is not valid JSON"):
        next(stream)


BAD: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b"", "is empty: it holds no text"),
    "blank": ("a.txt", b" \n\t\n", "is empty: it holds no text"),
    "NUL bytes": ("a.txt", b"text\0more", "is binary"),
    "not UTF-8": ("a.txt", b"caf\xe9 noir", "is not UTF-8 text"),
    "cut in a character": ("a.txt", "é".encode()[:1], "is not UTF-8 text"),
    "PNG": ("a.png", b"\x89PNG\r\n\x1a\n", "is not UTF-8 text"),
    "empty jsonl": ("a.jsonl", b"\n\n", "is empty"),
    "jsonl not UTF-8": ("a.jsonl", b'"caf\xe9"\n', "line 1 is not UTF-8"),
    "jsonl of numbers": ("a.jsonl", b"3\n", "line 1 is int, expected an object or a string"),
    "json object": ("a.json", b"{}", "holds dict, expected a list"),
    "json list of lists": ("a.json", b"[[1]]", "record 0 is list"),
    "json broken": ("a.json", b"[", "not valid JSON"),
    "json too deep": ("a.json", b"[" * 100_000, "not valid JSON"),
    "parquet broken": ("a.parquet", b"PAR1 but not really", "cannot be read as parquet"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_clear_line(case: str, tmp_path: Path) -> None:
    name, data, message = BAD[case]
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    for read in (lambda p: list(read_texts(p)), read_text):
        with pytest.raises(TextError, match=message) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value) and name in str(caught.value)


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    for name in ("./missing", "missing.txt", "/no/such", "a/b/c", "missing.parquet", "~/no-such-text"):
        with pytest.raises(TextError, match="no such file or directory"):
            read_texts(name)
    with pytest.raises(TextError, match="has no .txt, .md"):
        read_texts(tmp_path)


def test_data_set_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)  # how Python says "not installed"
    with pytest.raises(MissingDependencyError, match=r'needs the package datasets.*: pip install "widellm\[data\]"'):
        list(read_texts("some/data-set"))


def test_data_set_offline() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(TextError, match="data set of that id cannot be opened: download it") as caught:
        list(read_texts("nobody/nothing"))
    assert "\n" not in str(caught.value)


# ---- windows


def _dumb_stream(tokenizer: Any, texts: list[str]) -> list[int]:
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text + "\n\n", add_special_tokens=False).input_ids
    return ids


@pytest.mark.parametrize("tokens, window, skip", [(64, 16, 0), (70, 16, 0), (16, 16, 5), (300, 3, 40), (2, 2, 0)])
def test_token_windows(tokens: int, window: int, skip: int, tiny_tokenizer: Any) -> None:
    texts = [f"document {i}, " * (i % 4) for i in range(60)]
    found = token_windows(tiny_tokenizer, texts, tokens, window, skip)
    expected = _dumb_stream(tiny_tokenizer, texts)[skip:]
    assert found.dtype == torch.int64 and found.shape == (tokens // window, window)
    assert found.flatten().tolist() == expected[: found.numel()]


def test_token_windows_read_no_further_than_needed(tiny_tokenizer: Any) -> None:
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "x" * 98

    token_windows(tiny_tokenizer, texts(), 1000, 100)
    assert taken <= 41  # 4 characters a token were expected, it is 1 here


def test_too_short_text_says_by_how_much(tiny_tokenizer: Any) -> None:
    with pytest.raises(TextError, match="it has 12 tokens, 64 tokens are needed: "):
        token_windows(tiny_tokenizer, ["0123456789"], 64, 16)
    with pytest.raises(TextError, match=r"it has 12 tokens, 20 tokens are needed \(4 skipped, 16 used\)"):
        token_windows(tiny_tokenizer, ["0123456789"], 16, 16, skip=4)
    with pytest.raises(TextError, match="it has 10 tokens, a window needs 16"):
        whole_text_windows(tiny_tokenizer, "0123456789", 16)
    with pytest.raises(TextError, match="it has 0 tokens"):
        whole_text_windows(tiny_tokenizer, "", 16)


def test_impossible_sizes(tiny_tokenizer: Any) -> None:
    for tokens, window, skip in ((10, 16, 0), (16, 1, 0), (16, 0, 0), (16, 16, -1)):
        with pytest.raises(ConfigError):
            token_windows(tiny_tokenizer, ["x" * 99], tokens, window, skip)
    with pytest.raises(ConfigError):
        whole_text_windows(tiny_tokenizer, "x" * 99, 16, 0)


def test_whole_text_windows(tiny_tokenizer: Any) -> None:
    text = "".join(chr(97 + i % 26) for i in range(100))
    windows = whole_text_windows(tiny_tokenizer, text, 16)
    assert windows.shape == (6, 16) and windows.dtype == torch.int64
    assert windows.flatten().tolist() == tiny_tokenizer(text, add_special_tokens=False).input_ids[:96]
    assert torch.equal(whole_text_windows(tiny_tokenizer, text, 16, 2), windows[:2])
    assert torch.equal(whole_text_windows(tiny_tokenizer, text, 16, 99), windows)


def test_split(tiny_tokenizer: Any) -> None:
    windows = torch.arange(50).view(5, 10)
    used, held_out = split_windows(windows, 2)
    assert torch.equal(used, windows[:3]) and torch.equal(held_out, windows[3:])
    assert split_windows(windows, 0)[1].shape == (0, 10)
    with pytest.raises(TextError, match="5 of 5 windows cannot be held out"):
        split_windows(windows, 5)


@pytest.mark.requirement("R5")
def test_record_names_the_sample_exactly() -> None:
    windows = torch.tensor([[1, 2], [3, 70000]])
    digest = hashlib.sha256(b"(2, 2)" + struct.pack("<4q", 1, 2, 3, 70000)).hexdigest()
    assert windows_digest(windows) == digest == windows_digest(windows.to(torch.int32).T.contiguous().T)
    assert windows_digest(windows.view(1, 4)) != digest
    record = window_record(windows, "some.txt", seed=3, first=8)
    assert record == {
        "source": "some.txt",
        "seed": 3,
        "window": 2,
        "windows": [8, 10],
        "tokens": 4,
        "sha256": digest,
    }
    json.dumps(record)


@pytest.mark.requirement("R2")
@pytest.mark.requirement("R3")
def test_wikitext_window_count(smollm2: str, data_dir: Path) -> None:
    from transformers import AutoTokenizer

    text = read_text(data_dir / "wikitext2_raw" / "wiki.test.raw")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) == 303_415
    assert whole_text_windows(tokenizer, text, 1024).shape == (296, 1024)


# ---- the model's own text


def test_sampled_texts_repeat_and_leave_the_random_state(tiny_tokenizer: Any) -> None:
    model = tiny_model("llama")
    before, said = torch.random.get_rng_state(), []
    texts = sample_texts(model, tiny_tokenizer, 500, 3, lambda done, total: said.append((done, total)), length=40)
    assert torch.equal(torch.random.get_rng_state(), before)
    counts = [len(tiny_tokenizer(t, add_special_tokens=False).input_ids) for t in texts]
    assert sum(counts) >= 500 and said[-1] == (500, 500)
    assert texts == sample_texts(model, tiny_tokenizer, 500, 3, length=40)
    assert texts != sample_texts(model, tiny_tokenizer, 500, 4, length=40)
    assert "<s>" not in "".join(texts)


def test_a_model_that_writes_nothing(tiny_tokenizer: Any) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.lm_head = torch.nn.Linear(32, model.config.vocab_size)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()[257] = 1e4  # always </s>
    with pytest.raises(TextError, match="the model wrote only 0 of 500 tokens"):
        sample_texts(model, tiny_tokenizer, 500, 0, length=40)


def test_a_column_is_for_sources_that_have_some(tmp_path: Path) -> None:
    plain, table = tmp_path / "some.txt", tmp_path / "some.jsonl"
    plain.write_text("hello")
    table.write_text('{"body": "hello"}\n')
    for sources in ((str(plain),), ("python-docs",), ("self",), (str(plain), "python-docs")):
        assert column_of(None, *sources) == "text"
        with pytest.raises(TextError, match="has no columns: leave the column 'body' out"):
            column_of("body", *sources)
    for sources in ((str(table),), (str(tmp_path),), ("someone/set",), (str(plain), str(table))):
        assert column_of(None, *sources) == "text" and column_of("body", *sources) == "body"

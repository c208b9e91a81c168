"""`transformers serve` on a routed directory: the command of docs/serving.md."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from transformers.utils import import_utils

import widellm
from loopback import complete, served
from routing_helpers import route
from tiny import tiny_model, tiny_tokenizer
from widellm.optional import available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (getattr(import_utils, "is_serve_available", bool)() and available("accelerate")),
        reason='needs pip install "transformers[serving]" accelerate',
    ),
]


@pytest.mark.parametrize(
    "mode", ([], ["--continuous-batching", "--attn-implementation", "eager"]), ids=("one", "batch")
)
def test_transformers_serves_the_routed_model(tmp_path: Path, mode: list[str]) -> None:
    folder, prompt = tmp_path / "routed", "some words to go on from"
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    width = route(model)
    width.config = width.config.replace(provenance={"budget": 0.5})
    widellm.save(model, folder, tokenizer)
    texts = {}
    for budget in (0.5, 1.0):
        widellm.set_budget(model, budget)
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        texts[budget] = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert texts[0.5] != texts[1.0], "routing changes nothing here: the test would prove nothing"

    text = (Path(__file__).parents[1] / "docs/serving.md").read_text(encoding="utf-8")
    documented = re.search(r'python -c "(import widellm; [^"]+)" serve DIR', text)
    assert documented is not None
    arguments = ["-c", documented[1], "serve", str(folder), "--device", "cpu", *mode]
    with served(arguments, {**os.environ, "HF_HUB_OFFLINE": "1"}, tmp_path / "server.log") as address:
        answer = complete(address, model=str(folder), prompt=prompt, max_tokens=12, temperature=0)
    assert answer["choices"][0]["text"] == texts[0.5]

"""A routed directory in transformers' hands: Auto classes, pipeline, the small adapter form and back.

python examples/loading.py [DIR]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from routed_directory import directory, parser
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import widellm


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


def main() -> None:
    full = directory(parser(__doc__).parse_args())
    with tempfile.TemporaryDirectory() as temporary:
        adapter, again = Path(temporary) / "adapter", Path(temporary) / "again"
        widellm.export(full, adapter, form="adapter")
        widellm.export(adapter, again)
        print(f"full form {megabytes(again):.1f} MB, adapter form {megabytes(adapter):.1f} MB")

        tokenizer = AutoTokenizer.from_pretrained(full)
        inputs = tokenizer("The capital of France is", return_tensors="pt")
        texts = []
        for folder in (full, adapter, again):
            model = AutoModelForCausalLM.from_pretrained(folder)  # no remote code: `import widellm` is enough
            ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
            texts.append(tokenizer.decode(ids[0]))
            print(f"{folder.name:>16} at budget {widellm.get_budget(model):g}: {texts[-1]!r}")
        assert len(set(texts)) == 1, "the forms hold the same model"

        generate = pipeline("text-generation", model=str(adapter))
        for budget in (1.0, widellm.get_budget(generate.model)):
            widellm.set_budget(generate.model, budget)
            out = generate("Once upon a time", max_new_tokens=12, do_sample=False)
            print(f"pipeline, budget {budget:g}: {out[0]['generated_text']!r}")

        widellm.set_budget(model, 1.0)
        with torch.no_grad():
            routed = model(**inputs).logits[0, -1]
            dense = widellm.detach(model)(**inputs).logits[0, -1]
        same = bool(dense.argmax() == routed.argmax())
        print(f"detached: the base model again ({type(model).__name__}), likeliest next token the same: {same}")


if __name__ == "__main__":
    main()

"""Self-speculative decoding: draft at a small budget, verify dense, one set of weights; acceptance and speed.

    python examples/self_speculative.py [DIR] [--budgets 0.6,0.75,0.83] [--dtype float32]

The text is the dense model's greedy text in every row; the script checks it. In bf16 a pass over several tokens rounds
differently than passes over one, and near ties can fall differently: it reports how many prompts differ.
"""

from __future__ import annotations

import time

import torch
from routed_directory import directory, parser

import widellm

PROMPTS = (
    "The capital of France is",
    "To make bread, first",
    "def fibonacci(n):",
    "The three states of matter are",
)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--budgets", default="0.6,0.75,0.83")
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--dtype", default="float32")
    chosen = arguments.parse_args()
    model, tokenizer = widellm.load(directory(chosen), dtype=chosen.dtype)
    prompts = [tokenizer(p, return_tensors="pt") for p in PROMPTS]
    settings = {"max_new_tokens": chosen.tokens, "min_new_tokens": chosen.tokens, "do_sample": False}

    def run(method: widellm.Speculative | None) -> tuple[list[torch.Tensor], float]:
        start = time.perf_counter()
        texts = [model.generate(**p, custom_generate=method, **settings) for p in prompts]
        return texts, len(prompts) * chosen.tokens / (time.perf_counter() - start)

    widellm.set_budget(model, 1.0)
    run(None)  # warm up
    expected, dense_speed = run(None)
    print(f"{chosen.dtype}, {len(prompts)} prompts, {chosen.tokens} tokens each, {torch.get_num_threads()} threads")
    print(f"dense greedy: {dense_speed:.1f} tokens/s")
    for budget in map(float, chosen.budgets.split(",")):
        widellm.set_budget(model, budget)
        _, alone = run(None)
        for draft_tokens in (1, 2, 4):
            method = widellm.Speculative(budget, draft_tokens)
            texts, speed = run(method)
            differ = sum(not torch.equal(a, b) for a, b in zip(texts, expected, strict=True))
            assert chosen.dtype != "float32" or not differ, "the text must be the dense model's"
            print(
                f"draft at {budget:g} (alone {alone:.1f} tokens/s), up to {draft_tokens} tokens: "
                f"{method.acceptance:.0%} of {method.drafted} accepted, {speed:.1f} tokens/s "
                f"({speed / dense_speed:.2f}x dense), {differ} of {len(prompts)} texts differ"
            )


if __name__ == "__main__":
    main()

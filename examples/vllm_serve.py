"""Greedy text of 20 prompts by vLLM and by transformers, in float32: do they agree?

Runs in the environment that tools/vllm_env.sh makes:

    widellm prune smollm2-135m --output routed      # once, in any environment
    python examples/vllm_serve.py routed --budget 0.5
"""

from __future__ import annotations

import argparse
import os
import time

import torch

import widellm

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three primary colours are",
    "In 1969, Neil Armstrong",
    "To make a cup of tea, first",
    "The quick brown fox",
    "A triangle has three",
    "My favourite book is",
    "The largest planet in the solar system",
    "Photosynthesis is the process by which",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "Roses are red, violets are",
    "Machine learning is a field of",
    "How do I sort a list in Python?",
    "The history of the Roman Empire began",
    "She opened the door and saw",
]


def by_transformers(directory: str, budget: float, tokens: int) -> list[str]:
    model, tokenizer = widellm.load(directory, budget=budget, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        texts.append(tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    return texts


def by_vllm(directory: str, budget: float, tokens: int) -> list[str]:
    from vllm import LLM, SamplingParams

    settings = {"additional_config": {"widellm": {"budget": budget}}, "quantization": "widellm"}
    llm = LLM(directory, dtype="float32", max_model_len=1024, enforce_eager=True, **settings)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="a routed directory")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, on a CPU

    texts = []
    for name, generate in (("transformers", by_transformers), ("vLLM", by_vllm)):
        start = time.perf_counter()
        texts.append(generate(options.directory, options.budget, options.tokens))
        print(f"{name}: {time.perf_counter() - start:.1f} s, loading included", flush=True)
    same = sum(a.strip() == b.strip() for a, b in zip(*texts, strict=True))
    for prompt, a, b in zip(PROMPTS, *texts, strict=True):
        print(f"{'same' if a.strip() == b.strip() else 'DIFFERENT'}: {prompt!r} -> {b!r}")
    print(f"{same} of {len(PROMPTS)} prompts agree at budget {options.budget:g}")
    raise SystemExit(same != len(PROMPTS))


if __name__ == "__main__":
    main()

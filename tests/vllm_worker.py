"""Generates with vLLM in a process of its own: vllm_worker.py answer.json < request.json.

request: {"llm": arguments of vllm.LLM, "calls": [{"prompts": [token ids], "tokens": n, "budgets": [..] | null}]}
answer: {"tokens": for each call, each prompt's new token ids, "hits": prompt tokens found in the cache, per call}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.load(sys.stdin)
    llm = LLM(**request["llm"])
    answer: dict[str, list[Any]] = {"tokens": [], "hits": []}
    for call in request["calls"]:
        budgets = call.get("budgets") or [None] * len(call["prompts"])
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=call["tokens"],
                min_tokens=call["tokens"],
                extra_args=b and {"widellm_budget": b},
            )
            for b in budgets
        ]
        prompts = [{"prompt_token_ids": ids} for ids in call["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answer["tokens"].append([list(o.outputs[0].token_ids) for o in outputs])
        answer["hits"].append(sum(o.num_cached_tokens or 0 for o in outputs))
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()

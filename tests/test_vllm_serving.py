"""vLLM against transformers, greedy, float32, on its CPU build: tools/vllm_env.sh makes the environment for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch

import widellm
from loopback import complete, served
from routing_helpers import route
from tiny import tiny_model, tiny_tokenizer
from widellm.optional import available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available("vllm"), reason="vLLM is not installed here: run tools/vllm_env.sh"),
]
HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
LLM = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "enforce_eager": True, "block_size": 32}
TOKENS = 12


def prompts() -> list[list[int]]:
    """20 prompts of 3 to 60 tokens, the second half with one beginning."""
    generator = torch.Generator().manual_seed(1)
    lengths = [3 + 3 * i for i in range(20)]
    ids = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
    return ids[:10] + [ids[19][:48] + some[:12] for some in ids[10:]]


@pytest.fixture
def routed(tmp_path: Path) -> Callable[..., Path]:
    """A builder: saves a tiny routed model with its tokenizer, and returns the directory."""

    def build(family: str = "llama", ffn_group_size: int = 8, **overrides: Any) -> Path:
        sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, **overrides}
        if family == "qwen2":
            sizes.pop("head_dim")
            sizes["hidden_size"] = 128
        model = tiny_model(family, **sizes)
        route(model, ffn_group_size=ffn_group_size)
        folder = tmp_path / family
        widellm.save(model, folder, tiny_tokenizer())
        return folder

    return build


def marked(folder: Path, mark: bool = True) -> Path:
    """A copy of the directory whose config.json says whose it is, or does not, as in old ones."""
    copy = folder.with_name(f"{folder.name}-{'marked' if mark else 'plain'}")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    if mark:
        config["quantization_config"] = {"quant_method": "widellm", "format_version": 1}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def expected(folder: Path, budget: float, ids: list[list[int]] | None = None) -> list[list[int]]:
    """What transformers generates, one prompt at a time."""
    model, _ = widellm.load(folder, budget=budget, dtype=torch.float32)
    found = []
    for prompt in prompts() if ids is None else ids:
        x = torch.tensor([prompt])
        out = model.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def run(folder: Path, calls: list[dict[str, Any]], budget: float | None = 0.5, **llm: Any) -> dict[str, Any]:
    """Run the worker on a marked copy of the directory, as `start` does."""
    extra = {} if budget is None else {"additional_config": {"widellm": {"budget": budget}}}
    return start(marked(folder, "quantization" not in llm), calls, **{**extra, **llm})


def start(folder: Path, calls: list[dict[str, Any]], **llm: Any) -> dict[str, Any]:
    """Run the worker on a directory as it is; RuntimeError with what vLLM printed when it fails."""
    request = {"llm": {"model": str(folder), **LLM, **llm}, "calls": calls}
    out = folder.with_suffix(".json")
    result = subprocess.run(
        [sys.executable, str(HERE / "vllm_worker.py"), str(out)],
        input=json.dumps(request),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    if result.returncode:
        raise RuntimeError(result.stdout + result.stderr)
    answer: dict[str, Any] = json.loads(out.read_text())
    return answer


def all_prompts(**more: Any) -> dict[str, Any]:
    return {"prompts": prompts(), "tokens": TOKENS, **more}


@pytest.mark.requirement("R50")
@pytest.mark.parametrize("family", ("llama", "mistral", "qwen2", "qwen3"))
def test_vllm_generates_what_transformers_does(routed: Callable[..., Path], family: str) -> None:
    """A batch, the same batch on cached prefixes, and the prompts alone: 20 prompts each."""
    folder = routed(family)
    want = expected(folder, 0.5)
    assert want != expected(folder, 1.0), "routing changes nothing here: the test would prove nothing"
    alone = [{"prompts": [prompt], "tokens": TOKENS} for prompt in prompts()[::4]]
    answer = run(folder, [all_prompts(), all_prompts(), *alone])
    assert answer["tokens"][0] == want
    assert answer["tokens"][1] == want
    assert [tokens[0] for tokens in answer["tokens"][2:]] == want[::4]
    assert answer["hits"][1] > 0


@pytest.mark.parametrize(
    "name, llm", [("compiled", {"enforce_eager": False}), ("uncached", {"enable_prefix_caching": False})]
)
def test_modes_agree(routed: Callable[..., Path], name: str, llm: dict[str, Any]) -> None:
    folder = routed()
    assert run(folder, [all_prompts()], **llm)["tokens"][0] == expected(folder, 0.5)


def test_budget_one_is_the_dense_model(routed: Callable[..., Path]) -> None:
    folder = routed()
    assert run(folder, [all_prompts()], budget=1.0)["tokens"][0] == expected(folder, 1.0)


def test_without_the_mark_a_flag_serves_an_old_directory(routed: Callable[..., Path]) -> None:
    folder = routed()
    answer = run(folder, [all_prompts()], quantization="widellm")
    assert answer["tokens"][0] == expected(folder, 0.5)


def test_two_ranks_share_the_groups(routed: Callable[..., Path]) -> None:
    folder = routed()
    answer = run(folder, [all_prompts()], tensor_parallel_size=2, distributed_executor_backend="mp")
    assert answer["tokens"][0] == expected(folder, 0.5)


@pytest.mark.requirement("R51")
def test_each_request_may_carry_its_budget(routed: Callable[..., Path]) -> None:
    folder = routed()
    by_budget = {b: expected(folder, b) for b in (0.3, 0.5, 1.0)}
    budgets = [(0.3, None, 1.0)[i % 3] for i in range(20)]
    answer = run(
        folder,
        [all_prompts(budgets=budgets), all_prompts()],
        enable_prefix_caching=False,
        logits_processors=["widellm.integrations.vllm_requests:RequestBudgets"],
    )
    assert answer["tokens"][0] == [by_budget[b or 0.5][i] for i, b in enumerate(budgets)]
    assert answer["tokens"][1] == by_budget[0.5]


@pytest.mark.parametrize(
    "groups, llm, message",
    [
        (8, {"additional_config": {"widellm": {"budget": 0.1}}}, "the lowest this model was calibrated for"),
        (8, {"additional_config": {"widellm": {"budgte": 0.5}}}, 'takes {"budget": number}'),
        (32, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, "has 3 groups, which tensor parallel"),
        (8, {"logits_processors": ["widellm.integrations.vllm_requests:RequestBudgets"]}, "--no-enable-prefix-caching"),
    ],
    ids=("budget", "setting", "ranks", "cache"),
)
def test_what_cannot_be_served_is_said(
    routed: Callable[..., Path], groups: int, llm: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError) as raised:
        run(routed(ffn_group_size=groups), [all_prompts()], **llm)
    assert message in str(raised.value)


def test_an_adapter_is_to_be_exported(routed: Callable[..., Path], tmp_path: Path) -> None:
    full = routed()
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model, tokenizer = widellm.load(full)
    widellm.detach(model).save_pretrained(base)
    tokenizer.save_pretrained(base)
    widellm.export(full, adapter, form="adapter", base=base)
    with pytest.raises(RuntimeError) as raised:
        start(adapter, [all_prompts()])
    assert f"widellm export {adapter} OUT, then serve OUT" in str(raised.value)


@pytest.fixture
def server(routed: Callable[..., Path]) -> Iterator[tuple[str, Path]]:
    """vLLM's OpenAI server: (its address, the directory)."""
    folder = routed()
    command = f"""-m vllm.entrypoints.openai.api_server --model {marked(folder)} --served-model-name tiny
        --dtype float32 --max-model-len 256 --max-num-seqs 16 --enforce-eager
        --no-enable-prefix-caching --logits-processors widellm.integrations.vllm_requests:RequestBudgets
        --additional-config.widellm.budget 0.5"""
    with served(command.split(), ENVIRONMENT, folder.parent / "server.log") as address:
        yield address, folder


def test_the_openai_server(server: tuple[str, Path]) -> None:
    address, folder = server

    def ask(prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0, **more}
        return complete(address, return_token_ids=True, **body)

    want, dense = expected(folder, 0.5), expected(folder, 1.0)
    for prompt, routed_tokens, dense_tokens in zip(prompts(), want, dense, strict=True):
        assert ask(prompt)["choices"][0]["token_ids"] == routed_tokens
        at_full = ask(prompt, vllm_xargs={"widellm_budget": 1.0})
        assert at_full["choices"][0]["token_ids"] == dense_tokens
    with pytest.raises(HTTPError) as raised:
        ask(prompts()[0], vllm_xargs={"widellm_budget": 2})
    assert raised.value.code == 400 and "budget must be in (0, 1]" in raised.value.read().decode()

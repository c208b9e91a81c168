"""llama.cpp on the same weights: a GGUF file written from a Llama-like transformers model, and the engine."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widellm.errors import UnsupportedModelError
from widellm.optional import require

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k [heads*d, D] from transformers' rotary order (two halves) into llama.cpp's (pairs)."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(model: Any, path: Path) -> None:
    """Write a Llama without biases to a GGUF file in its own dtype (bfloat16 or float32), with no vocabulary.

    Raises UnsupportedModelError for other families, MissingDependencyError without the package gguf.
    """
    gguf = require("gguf", "llama", "writing a model for llama.cpp")
    config = model.config
    if config.model_type != "llama" or any(name.endswith(".bias") for name, _ in model.named_parameters()):
        raise UnsupportedModelError(f"llama.cpp is compared on Llamas without biases, not on {config.model_type}")
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") != "default":
        raise UnsupportedModelError("llama.cpp is compared on models with plain rotary embeddings only")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(parameters.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, tensor: Tensor) -> None:
        tensor = tensor.detach().contiguous()
        if tensor.ndim == 1 or tensor.dtype == torch.float32:  # llama.cpp wants norms in float32
            writer.add_tensor(name, tensor.float().numpy())
        else:
            raw = tensor.view(torch.int16).numpy().view("uint8")
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", model.model.embed_tokens.weight)
    add("output_norm.weight", model.model.norm.weight)
    if not config.tie_word_embeddings:
        add("output.weight", model.lm_head.weight)
    for index, layer in enumerate(model.model.layers):
        for theirs, ours in _NAMES.items():
            weight = layer.get_submodule(theirs).weight
            if ours in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if ours == "attn_q" else config.num_key_value_heads
                weight = interleaved(weight, heads)
            add(f"blk.{index}.{ours}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp through llama-cpp-python; see `engines.Engine`. One sequence at a time, dense whatever the budget."""

    def __init__(self, model: Any, new_tokens: int, longest: int, threads: int) -> None:
        llama = require("llama_cpp", "llama", "comparing with llama.cpp")
        self.new_tokens = new_tokens
        self.folder = tempfile.TemporaryDirectory(prefix="widellm-gguf-")
        path = Path(self.folder.name) / "model.gguf"
        write_gguf(model, path)
        self.llama = llama.Llama(
            str(path), n_ctx=longest, n_batch=longest, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def close(self) -> None:
        """Free the model: left to the end of the interpreter, llama-cpp-python complains."""
        self.llama.close()
        self.folder.cleanup()

    def _last(self) -> Any:
        """The last token's logits, as numpy float32 [V]."""
        import numpy

        pointer = self.llama._ctx.get_logits_ith(-1) if hasattr(self.llama._ctx, "get_logits_ith") else None
        if pointer is None:
            pointer = self.llama._ctx.get_logits()
        return numpy.ctypeslib.as_array(pointer, shape=(self.llama.n_vocab(),))

    def logits(self, ids: Tensor) -> Tensor:
        """See Engine."""
        self.llama.reset()
        self.llama.eval(ids[0].tolist())
        return torch.from_numpy(self._last().copy()).float()

    def prefill(self, ids: Tensor, budget: float) -> float:
        """See Engine."""
        tokens = ids[0].tolist()
        self.llama.reset()
        start = time.perf_counter()
        self.llama.eval(tokens)
        return time.perf_counter() - start

    def decode(self, ids: Tensor, mask: Tensor, budget: float, shared: bool = False) -> tuple[float, list[float]]:
        """See Engine. Batches are not run: llama-cpp-python's API takes one sequence."""
        tokens = ids[0].tolist()
        self.llama.reset()
        start = time.perf_counter()
        times = []
        for _ in range(self.new_tokens):
            self.llama.eval(tokens)
            tokens = [int(self._last().argmax())]
            times.append(time.perf_counter())
        return times[0] - start, [b - a for a, b in zip(times, times[1:], strict=False)]

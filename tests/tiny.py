"""Tiny random models and a byte tokenizer: every shape of a family, made in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY = 272  # 256 bytes, 3 special tokens, and rows that no token uses, as in many real models

# one name -> overrides that turn a family's tiny model into that shape
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "window": {"sliding_window": 4},
}
PARTIAL_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_ONLY = {"biases": ("llama", "qwen3"), "window": ("mistral",), "wide-heads": ("llama", "mistral", "qwen3")}


def shapes_of(family: str) -> tuple[str, ...]:
    """The names of SHAPES that `family` can take. Qwen2's q, k and v have biases in all of them."""
    return tuple(name for name in SHAPES if family in _ONLY.get(name, FAMILIES))


CASES = [(family, shape) for family in FAMILIES for shape in shapes_of(family)]
"""Every (family, shape): parametrise a test over it to cover what is supported."""


# What the tiny model of a family needs besides the settings that all take.
NEEDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 8},  # its default is 128, whatever D and H are
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "gemma2": {
        "tie_word_embeddings": True,
        "head_dim": 12,
        "query_pre_attn_scalar": 10,
        "sliding_window": 4,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "head_dim": 12,
        "query_pre_attn_scalar": 10,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.5,
        "logits_scaling": 2.0,
    },
    "falcon": {"tie_word_embeddings": True, "multi_query": True, "ffn_hidden_size": 48},
    "opt": {"tie_word_embeddings": True, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None},
    "gpt2": {"tie_word_embeddings": True, "n_inner": 48, "num_key_value_heads": None},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 12},
}

CONTRACT: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *(f for f in NEEDS if f not in FAMILIES), "phi3", "olmo2")},
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "phi3-partial-rotary": ("phi3", {"rope_parameters": PARTIAL_ROTARY}),
    "falcon-gqa": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-mha": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-alibi": ("falcon", {"multi_query": False, "alibi": True, "bias": True}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "opt-post-norm": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
}
"""Name -> (family, overrides): the models of the contract tests, each family and its odd shapes."""


def tiny_model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random causal LM of `family`, in evaluation mode.

    2 layers, D 32, F 48, 4 query heads on 2 key/value heads of 8, 272 tokens; `overrides` are fields of its
    configuration. The same arguments give the same weights. Biases and norm weights are random too, since at their
    initial 0 and 1 an op that forgets them would go unnoticed.
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "tie_word_embeddings": False,
    }
    settings |= NEEDS.get(family, {}) | overrides
    settings = {name: value for name, value in settings.items() if value is not None or name == "sliding_window"}
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(".bias"):
                    weight.normal_(0, 0.1)
                elif weight.ndim == 1:
                    weight.normal_(1, 0.1)
                else:
                    # large enough that attention and activations are far from linear
                    weight.normal_(0, 0.5 / weight.shape[-1] ** 0.5 if weight.shape[0] == VOCABULARY else 0.2)
    return model.to(dtype).eval()


def tiny_tokenizer() -> Any:
    """A byte-level tokenizer, padding on the left: each of 0 to 255 is one byte, 256 to 258 are <s>, </s> and <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )

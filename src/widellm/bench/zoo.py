"""The models that are timed: a routed directory of a real one, or random weights in the shape of a larger one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from widellm.bench.cases import SHAPES, ModelShape
from widellm.calibrate.dial import router_logits, set_threshold, spent
from widellm.config import WidthConfig
from widellm.errors import ConfigError
from widellm.families import locate
from widellm.kernels.cost_table import noise
from widellm.modeling.attach import attach, set_dial, width_of
from widellm.modeling.checkpoint import is_routed_directory, load
from widellm.modeling.linears import is_bare_linear
from widellm.optional import require
from widellm.routing.budget import Dial
from widellm.sources.models import load_dense
from widellm.sources.texts import read_texts, token_windows

RANDOM = "random:"
_SHARES = (0.4, 0.5, 0.6)


def check_model(name: str) -> None:
    """Raise ConfigError unless `name` is a routed directory or "random:SHAPE"."""
    if name.startswith(RANDOM):
        if name.removeprefix(RANDOM) not in SHAPES:
            raise ConfigError(f"{name!r}: known shapes are {', '.join(SHAPES)}")
    elif not is_routed_directory(name):
        raise ConfigError(f"{name} is not a routed directory: make one with widellm prune")


def dense_model(name: str, dtype: torch.dtype) -> Any:
    """The plain transformers model: of a routed directory its base (channels regrouped: the same function)."""
    check_model(name)
    if name.startswith(RANDOM):
        return random_model(SHAPES[name.removeprefix(RANDOM)], dtype)
    return load_dense(name, dtype=dtype).model


def routed_model(name: str, dtype: torch.dtype) -> Any:
    """The model with routers; of a random one they are random too, and the dial is measured on random tokens."""
    check_model(name)
    if not name.startswith(RANDOM):
        return load(name, dtype=dtype)[0]
    shape = SHAPES[name.removeprefix(RANDOM)]
    model = random_model(shape, dtype)
    add_random_routers(model, shape.ffn_group)
    return model


def random_model(s: ModelShape, dtype: torch.dtype) -> Any:
    """A Llama of this shape with random weights, made in seconds; the output layer is tied, as in the small Llamas."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=s.vocabulary,
        hidden_size=s.hidden,
        intermediate_size=s.inner,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                shape = tuple(parameter.shape)
                values = torch.ones(shape, dtype=dtype) if len(shape) == 1 else noise(*shape, dtype=dtype, scale=0.02)
                made[id(parameter)] = torch.nn.Parameter(values, requires_grad=False)
            setattr(module, name, made[id(parameter)])
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its buffers were on "meta" too
    return model.eval()


def in_int8(model: Any) -> Any:
    """Quantise the linear maps of a model's layers to int8 (torchao, one scale per output), in place; returns it.

    Raises MissingDependencyError without torchao.
    """
    quantization = require("torchao.quantization", "quant", "int8 weights")
    config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    for layer in locate(model).layers:
        quantization.quantize_(layer.layer, config, filter_fn=lambda module, name: is_bare_linear(module))
    return model


@torch.no_grad()
def add_random_routers(model: Any, ffn_group: int, tokens: int = 64) -> None:
    """Attach random routers whose dial is right on random tokens; FFN channels are regrouped at random."""
    config = model.config
    layers, channels = config.num_hidden_layers, config.intermediate_size
    # any order will do: that there is one makes `attach` store o and down as it does for a calibrated model
    order = torch.arange(channels).roll(1).repeat(layers, 1)
    width = attach(model, WidthConfig(config.model_type, layers, 1, ffn_group, router_rank=32), order)
    for sub in width.sublayers:
        router = width.router(sub)
        router.down.normal_(0, router.down.shape[1] ** -0.5)
        router.up.normal_(0, router.up.shape[1] ** -0.5)
    windows = torch.randint(config.vocab_size, (1, tokens))
    points = []
    for threshold in router_logits(model, windows).quantiles(_SHARES):
        set_threshold(model, threshold)
        points.append((spent(model, windows), threshold))
    points.sort()
    set_threshold(model, None)
    budgets = torch.tensor([share for share, _ in points], dtype=torch.float64)
    row = torch.tensor([threshold for _, threshold in points])
    set_dial(model, Dial(budgets, row.repeat(len(width_of(model).sublayers), 1)))


def tokens_for(name: str, count: int) -> Tensor:
    """int64 [1, count] for a model: Python's own documentation, in its tokens; random tokens for a random model."""
    check_model(name)
    if name.startswith(RANDOM):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(SHAPES[name.removeprefix(RANDOM)].vocabulary, (1, count), generator=generator)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    return token_windows(tokenizer, read_texts("python-docs", seed=0), count, count)[:1]

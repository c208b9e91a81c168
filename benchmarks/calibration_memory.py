"""Peak memory of calibrating a model with the shape of Llama-3.2-1B and random weights, in bf16 on the CPU.

    python benchmarks/calibration_memory.py [--windows 16] [--window 512] [--memory-gb 2]

Prints the size of the weights, the peak resident memory before and after, and how many blocks of layers the statistics
were held in. Tokens are random: the figures are about memory, not quality.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from widellm.calibrate.calibration import Settings, calibrate, peak_memory_gb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--memory-gb", type=float, default=2.0)
    args = parser.parse_args()

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    before = peak_memory_gb()
    print(f"weights {weights:.2f} GB, peak before the calibration {before:.2f} GB", flush=True)
    tokens = torch.randint(0, config.vocab_size, (args.windows, args.window))
    settings = Settings(ffn_group_size=128, memory_gb=args.memory_gb)
    stages: dict[str, int] = {}
    found = calibrate(model, tokens, settings, progress=lambda stage, done, total: stages.update({stage: total}))
    print(f"calibrated on {found.tokens} tokens in {found.seconds:.0f} s; windows walked: {stages}")
    print(f"peak {found.peak_memory_gb:.2f} GB: {found.peak_memory_gb - weights:.2f} GB above the weights")


if __name__ == "__main__":
    main()

"""Routers on int8 weights: quantise the full form while it loads (torchao), and compare with the same weights dense.

pip install 'widellm[quant]'; python examples/quantised.py [DIR]
"""

from __future__ import annotations

from routed_directory import directory, parser
from transformers import TorchAoConfig

import widellm
from widellm.bench.explain import explain
from widellm.evaluation.perplexity import compare_with_dense
from widellm.optional import require
from widellm.sources.texts import read_texts, token_windows


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--windows", type=int, default=4)
    arguments.add_argument("--window", type=int, default=256)
    arguments.add_argument("--skip", type=int, default=16384, help="tokens of python-docs to pass over")
    chosen = arguments.parse_args()
    folder = directory(chosen)
    int8 = require("torchao.quantization", "quant", "int8 weights").Int8WeightOnlyConfig()
    for name, config in (("as saved", None), ("int8", TorchAoConfig(int8))):
        model, tokenizer = widellm.load(folder, quantization_config=config)
        # beyond what calibration has read of this text
        size, texts = chosen.windows * chosen.window, read_texts("python-docs")
        windows = token_windows(tokenizer, texts, size, chosen.window, skip=chosen.skip)
        found = compare_with_dense(model, windows)
        print(
            f"{name}: token perplexity dense {found.dense_perplexity:.2f}, routed {found.routed_perplexity:.2f} with "
            f"{found.work.saved_routable:.1%} of routable work not needed"
        )
        layer = explain(model)["layers"][0]
        print(f"  decode: {layer['decode'][1]}; FFN: {layer['ops']['routed_ffn']['8'][1]}")


if __name__ == "__main__":
    main()

"""What calibration alone reaches: token perplexity against work saved, from one checkpoint, and the speed beside it.

    python benchmarks/quality.py --calibration corpus/redpajama_c4.jsonl --test wikitext2_raw/wiki.test.raw

Calibrates the embedded SmolLM2-135M on 32,768 tokens (bf16, CPU), then evaluates every budget on the first 96
non-overlapping windows of 1,024 tokens of the test text, tokenised as a whole. Dense is the same code at budget 1.0.
`--seeds 3` repeats the calibration on other documents and prints mean and spread. `--speed` adds prefill of 1,024
tokens and decode, dense and routed in turn. Give the machine nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from widellm.bench.speed import measure
from widellm.calibrate.calibration import Settings, calibrate, peak_memory_gb
from widellm.evaluation.perplexity import Perplexity, perplexity
from widellm.files import atomic_write_json
from widellm.modeling.attach import set_budget
from widellm.provenance import versions
from widellm.sources.models import load_dense
from widellm.sources.texts import read_text, read_texts, token_windows, whole_text_windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--calibration", required=True, help="text to calibrate on: file, directory or python-docs")
    parser.add_argument("--test", required=True, help="text to evaluate on")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.9, 0.75, 0.6, 0.5, 0.4])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    results: dict[float, list[Perplexity]] = {b: [] for b in args.budgets}
    speeds = []
    for seed in range(args.seeds):
        dense = load_dense(args.model)
        model, tokenizer = dense.model, dense.tokenizer
        stream = read_texts(args.calibration, seed=seed)
        windows = token_windows(tokenizer, stream, args.tokens, args.window)
        test = whole_text_windows(tokenizer, read_text(args.test), args.window, args.windows)
        start = time.perf_counter()
        calibration = calibrate(model, windows, Settings(seed=seed))
        print(
            f"seed {seed}: calibrated in {time.perf_counter() - start:.0f} s, peak {peak_memory_gb():.2f} GB",
            flush=True,
        )
        print(f"  R^2 attention {calibration.attention_r_squared:.3f}, FFN {calibration.ffn_r_squared:.3f}", flush=True)
        for budget in args.budgets:
            set_budget(model, budget)
            found = perplexity(model, test)
            results[budget].append(found)
            assert found.work is not None
            print(f"  budget {budget:g}: {found.perplexity:.2f}, saved {found.work.saved_routable:.3f}", flush=True)
        if args.speed and seed == 0:
            speeds = measure(model, test[0][None], [1.0, *(b for b in args.budgets if b < 1.0)])

    table = Table(title=f"token perplexity, {args.windows} windows of {args.window}, {args.seeds} seed(s)")
    for column in (
        "budget",
        "saved routable",
        "saved all layers",
        "attention sparsity",
        "FFN sparsity",
        "perplexity",
        "x",
    ):
        table.add_column(column, justify="right")
    rows = []
    reference = statistics.mean(r.perplexity for r in results[max(args.budgets)])
    for budget, found_all in results.items():
        values = [r.perplexity for r in found_all]
        work = found_all[0].work
        assert work is not None
        mean, spread = statistics.mean(values), statistics.pstdev(values)
        shown = f"{mean:.2f}" + (f" ± {spread:.2f}" if len(values) > 1 else "")
        row = (work.saved_routable, work.saved_all_layers, work.attention_sparsity, work.ffn_sparsity)
        table.add_row(f"{budget:g}", *(f"{s:.1%}" for s in row), shown, f"{mean / reference:.2f}")
        saved = [r.work.saved_routable for r in found_all if r.work is not None]
        rows.append({"budget": budget, "perplexity": values, "saved_routable": saved})
    Console(width=120).print(table)
    for speed in speeds:
        print(
            f"budget {speed.budget:g}: prefill {speed.prefill_tokens_per_s:.0f} tokens/s "
            f"({speed.prefill_tokens_per_s / speeds[0].prefill_tokens_per_s:.2f}x), decode "
            f"{speed.decode_tokens_per_s:.1f} ({speed.decode_tokens_per_s / speeds[0].decode_tokens_per_s:.2f}x)"
        )
    if args.json is not None:
        atomic_write_json(args.json, {"rows": rows, "versions": versions(), "window": args.window, "model": args.model})


if __name__ == "__main__":
    main()

"""lm-eval's ARC-easy and WinoGrande from local files, at several budgets.

    python examples/tasks.py [DIR] --data DATA [--limit 100]

DATA has arc_easy/*.jsonl and winogrande/*.jsonl with the rows of those data sets. The same from the command line:

    widellm eval DIR --tasks arc_easy,winogrande --task-data DATA --budget 0.75
    widellm lm-eval --model widellm --model_args pretrained=DIR,budget=0.75 --tasks arc_easy
"""

from __future__ import annotations

from pathlib import Path

from routed_directory import directory, parser

from widellm.integrations.lm_eval import evaluate_tasks


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--tasks", default="arc_easy,winogrande")
    arguments.add_argument("--limit", type=int, default=100, help="documents a task; 0: all")
    arguments.add_argument("--budgets", default="1,0.75")
    chosen = arguments.parse_args()
    folder = str(directory(chosen))
    for budget in map(float, chosen.budgets.split(",")):
        found = evaluate_tasks(
            folder, chosen.tasks.split(","), chosen.data, budget=budget, limit=chosen.limit or None, batch_size=8
        )
        saved = found["work"]["saved_routable"]
        for row in found["tasks"]:
            print(
                f"budget {budget:g} ({saved:.1%} of routable work saved): {row['task']} {row['metric']} "
                f"{row['value']:.3f} +- {row['stderr'] or 0:.3f} ({row['shots']} shots, {row['documents']} documents)"
            )


if __name__ == "__main__":
    main()

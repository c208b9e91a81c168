"""results.json as Markdown tables and plots."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

TABLES = ("groups of 128", "groups of 64", "groups of 32", "attention")


def markdown(results: dict[str, Any]) -> str:
    """All results as tables; errors too."""
    machine = results["machine"]
    lines = ["# GPU results", "", "DRY RUN: times mean nothing." if machine["dry_run"] else "", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    parity = results.get("parity")
    if parity is not None:
        lines += ["", f"Parity: {parity['cases']} cases, {len(parity['failed'])} failed."]
        lines += [f"- {failure}" for failure in parity["failed"]]
    for name in (*TABLES, "model"):
        rows = results.get(name)
        if rows:
            columns = list(rows[0])
            lines += ["", f"## {name}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(str(row.get(c, "")) for c in columns) + " |" for row in rows]
    lines += ["", "## Errors", "", *(f"- {name}: {error}" for name, error in results["errors"].items())]
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], folder: Path) -> list[str]:
    """One plot a table: speed-up against rows, a line a density. Returns the files' names; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for name in TABLES:
        rows = results.get(name) or []
        ops = sorted({row["op"] for row in rows})
        if not ops:
            continue
        figure, axes = pyplot.subplots(1, len(ops), figsize=(5 * len(ops), 4), squeeze=False)
        for axis, op in zip(axes[0], ops, strict=True):
            for key in sorted({(r["density"], r["group"], r.get("batch", 1)) for r in rows if r["op"] == op}):
                line = [r for r in rows if r["op"] == op and (r["density"], r["group"], r.get("batch", 1)) == key]
                density, group, batch = key
                label = f"density {density:g}, group {group}" + (f", batch {batch}" if "batch" in line[0] else "")
                axis.plot([r["rows"] for r in line], [r["speedup"] for r in line], marker="o", label=label)
            axis.axhline(1.0, color="gray", linewidth=1)
            axis.set(xscale="log", xlabel="keys" if "attention" in op else "rows", ylabel="times dense", title=op)
            axis.legend(fontsize=7)
        figure.suptitle(f"{results['machine'].get('device', 'dry run')}, {results['machine']['dtype']}")
        figure.tight_layout()
        path = folder / f"{name.replace(' ', '-')}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        made.append(path.name)
    return made

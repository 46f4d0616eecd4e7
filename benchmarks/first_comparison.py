"""Plain, scalar and vector multipliers at 20M parameters: tables and plot of the recorded runs.

    python benchmarks/first_comparison.py
    python benchmarks/first_comparison.py --plot docs/first_comparison.svg

Each record has the `lrm train` command of its run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from learnable_multipliers.experiments import drawing
from learnable_multipliers.report import style

RECORDS = Path(__file__).parent.parent / "results" / "first-comparison.jsonl"
MULTIPLIER_LR_SCALES = (1.0, 4.0)
PLACEMENTS = {"plain": "none", "scalar": "scalar", "vector": "full"}
ARMS = {
    "plain": ("none", 1.0),
    "scalar": ("scalar", 1.0),
    "scalar, 4x rate": ("scalar", 4.0),
    "vector": ("full", 1.0),
    "vector, 4x rate": ("full", 4.0),
}
"""Name -> placement, and learning rate of the multipliers over that of the matrices."""


def main() -> None:
    """Print the tables, or draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="write the plot here, as SVG")
    options = parser.parse_args()
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    if options.plot:
        options.plot.write_text(plot(records) + "\n")
    else:
        print(table([record for record in records if record["seed"] == 0]))
        print(table_of_seeds(records))


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as Markdown, one table for each shape and optimizer."""
    names = {placement: name for name, placement in PLACEMENTS.items()}
    lines = []
    for shape, kind in sorted({(r["shape"], r["optimizer"]) for r in records}):
        chosen = [r for r in records if (r["shape"], r["optimizer"]) == (shape, kind)]
        rates = sorted({r["lr"] for r in chosen})
        lines += [f"**{shape}, {kind}**", "", "| multipliers | lr scale | "]
        lines[-1] += " | ".join(f"lr {lr:g}" for lr in rates) + " | best | tokens/s |"
        lines.append("|---|---|" + "---|" * (len(rates) + 2))
        for placement, name in names.items():
            for scale in MULTIPLIER_LR_SCALES:
                row = {
                    r["lr"]: r
                    for r in chosen
                    if r["placement"] == placement and r["multiplier_lr_scale"] == scale
                }
                if row:
                    losses = [f"{row[lr]['valid_loss']:.4f}" if lr in row else "" for lr in rates]
                    best = min(r["valid_loss"] for r in row.values())
                    speed = statistics.median(r["tokens_per_second"] for r in row.values())
                    shown = "" if placement == "none" else f"{scale:g}"
                    lines.append(
                        f"| {name} | {shown} | {' | '.join(losses)} | {best:.4f} | {speed:,.0f} |"
                    )
        lines.append("")
    return "\n".join(lines)


def table_of_seeds(records: list[dict[str, Any]]) -> str:
    """Return the runs that have been made with more than one seed as Markdown."""
    by_run: dict[tuple[Any, ...], dict[int, float]] = {}
    for r in records:
        key = (r["shape"], r["optimizer"], r["lr"], r["placement"], r["multiplier_lr_scale"])
        by_run.setdefault(key, {})[r["seed"]] = r["valid_loss"]
    names = {placement: name for name, placement in PLACEMENTS.items()}
    lines = ["| model | optimizer | lr | multipliers | lr scale | by seed | mean |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (shape, kind, lr, placement, scale), losses in sorted(by_run.items()):
        if len(losses) > 1:
            shown = "" if placement == "none" else f"{scale:g}"
            each = ", ".join(f"{losses[seed]:.4f}" for seed in sorted(losses))
            lines.append(
                f"| {shape} | {kind} | {lr:g} | {names[placement]} | {shown} | {each} "
                f"| {statistics.mean(losses.values()):.4f} |"
            )
    return "\n".join(lines)


def plot(records: list[dict[str, Any]]) -> str:
    """Return loss against learning rate as SVG: a panel for each model and optimizer."""
    panels = sorted({(r["shape"], r["optimizer"]) for r in records}, key=lambda key: key[::-1])
    with style.look():
        figure = Figure(figsize=(800 / 72, 480 / 72))
        for axes, (shape, kind) in zip(figure.subplots(2, 2).flat, panels[::-1], strict=True):
            arms: dict[str, dict[float, list[float]]] = {name: {} for name in ARMS}
            for r in records:
                for name, arm in ARMS.items():
                    run = (r["shape"], r["optimizer"], r["placement"], r["multiplier_lr_scale"])
                    if run == (shape, kind, *arm):
                        arms[name].setdefault(r["lr"], []).append(r["valid_loss"])
            drawing.scan(axes, arms)
            axes.xaxis.set_major_formatter(lambda lr, _: f"{lr:.0e}".replace("e-0", "e-"))
            model = "Llama" if shape.endswith("llama") else "hybrid"
            title = f"{model}, {'AdamW' if kind == 'adamw' else 'Muon'}"
            axes.set(title=title, xlabel="learning rate", ylabel="held-out loss (nats)")
        style.legend(figure)
    return style.svg(figure, "first-comparison")


if __name__ == "__main__":
    main()

"""Gain of multipliers in recorded runs: plain minus row and column, paired by seed, as a table.

python benchmarks/gains.py
"""

from __future__ import annotations

from pathlib import Path

from learnable_multipliers.experiments import catalogue
from learnable_multipliers.experiments.claim import mean_interval
from learnable_multipliers.experiments.loss_difference import between
from learnable_multipliers.experiments.record import Labelled, Record, read_records
from learnable_multipliers.experiments.run import Labels

RECORDS = Path(__file__).parent.parent / "results" / "experiments"
ROWS: tuple[tuple[str, str, Labels, Labels], ...] = (
    ("Llama, Muon", "log_scale", {"arm": "linear", "rate": 1.0}, {}),
    ("Llama, Muon", "long_run", {"arm": "vector", "optimizer": "muon"}, {"optimizer": "muon"}),
    ("hybrid, Muon", "placement", {"arm": "full"}, {}),
    ("Llama, AdamW", "long_run", {"arm": "vector", "optimizer": "adamw"}, {"optimizer": "adamw"}),
)
"""Model and optimizer, experiment, labels of the runs with multipliers and of those without."""


def main() -> None:
    """Print the table."""
    print(table(read_records(RECORDS)))


def table(found: dict[str, Record]) -> str:
    """Return the gains of recorded runs with the settings they were trained with."""
    lines = [
        "| model, optimizer | tokens | decay | multiplier lr | gain in nats [95%] | runs of |",
        "|---|---|---|---|---|---|",
    ]
    for model, experiment, arm, plain in ROWS:
        runs = [
            Labelled(labels=run.labels, record=found[run.key])
            for run in catalogue.load(experiment).runs("gpu")
            if run.key in found
        ]
        gains = between(runs, {"arm": "plain", **plain}, arm)
        config = next(run.record.config for run in runs if arm.items() <= dict(run.labels).items())
        optimizer, tokens = config["optimizer"], config["schedule"]["tokens"]
        mean, low, high = mean_interval(list(gains.values()))
        lines.append(
            f"| {model} | {tokens / 1e6:.0f}M | {optimizer['weight_decay']:.2g} "
            f"| x {optimizer['multiplier_lr_scale']:g} | {mean:.4f} [{low:.4f}, {high:.4f}] "
            f"| `{experiment}` |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

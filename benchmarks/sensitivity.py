"""How much a run's loss depends on the last digits of its start: tiny models on a CPU.

All weights are changed by a relative 1e-6 before the first step, with other draws each time; data
and seed stay. Repeats of a run on a GPU differ by rounding in the same way.

python benchmarks/sensitivity.py --out results/sensitivity.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from learnable_multipliers.experiments.presets import Family, base, lengthened, with_optimizer
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import default_corpus
from learnable_multipliers.pretrain.optimizer_config import OptimizerKind
from learnable_multipliers.pretrain.trainer.trainer import Trainer

_CHANGE = 1e-6
_TIMES = 4
"""Length of a run over that of the experiments' preset `cpu`: 400 steps."""


def main() -> None:
    """Print the spread of losses for each model, optimizer and rate, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lrs", nargs="*", type=float, default=[2e-3, 8e-3, 1.6e-2])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write the losses here as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = default_corpus(1024)
    families: tuple[Family, ...] = ("llama", "hybrid")
    kinds: tuple[OptimizerKind, ...] = ("adamw", "muon")
    rows = []
    for family in families:
        for kind in kinds:
            for lr in options.lrs:
                config = plain(family, kind, lr)
                losses = [loss_of(config, data, draw) for draw in range(options.repeats)]
                rows.append({"model": family, "optimizer": kind, "lr": lr, "losses": losses})
                print(f"{family} {kind} {lr:g}: {statistics.stdev(losses):.5f}", flush=True)
    if options.out:
        found = {"change": _CHANGE, "torch": torch.__version__, "runs": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def plain(family: Family, kind: OptimizerKind, lr: float) -> TrainConfig:
    """Return a run without multipliers; decay is such that 2 wd sum(lr) is always the same."""
    config = lengthened(base("cpu", family), _TIMES)
    usual = config.optimizer
    decay = usual.weight_decay * usual.lr / lr / _TIMES
    return with_optimizer(config, kind=kind, lr=lr, weight_decay=decay)


def loss_of(config: TrainConfig, data: Path, draw: int) -> float:
    """Return the held-out loss of a run that starts a little off."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            replace(
                config,
                out=Path(folder) / "run",
                data=replace(config.data, path=data),
                runtime=replace(config.runtime, device="cpu"),
            )
        )
        generator = torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                change = _CHANGE * torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + change)
        trainer.train()
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    evaluated = [found for line in lines if (found := json.loads(line)).get("kind") == "eval"]
    return evaluated[-1]["loss"]


if __name__ == "__main__":
    main()

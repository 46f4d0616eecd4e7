"""An experiment of runs that take a moment, for tests of the runner."""

import os
from dataclasses import replace
from pathlib import Path

from learnable_multipliers.experiments.claim import Claim, Test
from learnable_multipliers.experiments.run import Run
from runs import LLAMA, small_run

TITLE = "Loss by learning rate"
FIGURE = "Fig. 0"
CLAIMS = (
    Claim(
        id="C0",
        statement="A low rate learns less.",
        where="sec. 0",
        tests=(Test(name="C0.gap", what="nats", bound=0.1, opposite=-0.1, effect=0.5),),
    ),
)
STEPS = int(os.environ.get("SMALL_EXPERIMENT_STEPS", "12"))


def run_of(lr: float, **changes: object) -> Run:
    config = small_run(Path("data"), Path("run"), steps=STEPS, model=LLAMA)
    config = replace(config, optimizer=replace(config.optimizer, lr=lr), **changes)
    return Run(labels={"lr": lr, "seed": config.seed}, config=config)


def runs(preset):
    return [run_of(lr) for lr in (4e-3, 1e-3, 2e-4)]


def analyse(records):
    losses = {one.labels["lr"]: one.record.loss for one in records}
    return {"C0.gap": {0: losses[2e-4] - losses[4e-3]}} if len(losses) == 3 else {}


def plot(records):
    return []

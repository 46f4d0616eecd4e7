"""`lrm demo`: one model trained without and with multipliers, side by side.

The text is the source of the Python standard library on this machine; both runs see the same
batches from the same start. It shows what the library does to a model, not what multipliers are
worth: minutes of training on one seed prove nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from learnable_multipliers.cli.arguments import command
from learnable_multipliers.pretrain.config import Placement, TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.metrics.progress import Display
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.spikes import DivergenceError
from learnable_multipliers.pretrain.trainer.trainer import Interrupt, Trainer
from learnable_multipliers.report.page import write_page
from learnable_multipliers.report.records import Run

RUNS: dict[str, Placement] = {"plain": "none", "multipliers": "full"}


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Length and place of the demo."""

    out: Path = Path("demo")
    """Folder of the two runs and of report.html; an earlier demo there is replaced."""
    tokens: int = RECIPES["tiny"][1].schedule.tokens
    """Length of each run, in tokens."""
    seed: int = 0
    """Seed of weights and batches."""


@command(DemoConfig)
def demo(config: DemoConfig) -> None:
    """Train a tiny language model without and with multipliers, and compare both in a report.

    The text is the sources of Python's standard library. Takes a few minutes on a laptop's CPU.
    """
    try:
        page = compare(training(config), config.out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("no report was written; lrm demo starts afresh") from None
    runs = [Run.load(config.out / name) for name in RUNS]
    for run in runs:
        print(
            f"{run.name:12} held-out loss {run.final('eval', 'loss'):.4f} nats per token, "
            f"{run.final('eval', 'bits_per_byte'):.4f} bits per byte"
        )
    print(f"Report: {page}")
    for run in runs:
        if run.diverged:
            raise DivergenceError(f"run {run.name} has diverged: {run.diverged}")


def training(config: DemoConfig) -> TrainConfig:
    """Return the recipe of both runs: `lrm train tiny`, as long as asked for."""
    base = RECIPES["tiny"][1]
    part = config.tokens / base.schedule.tokens
    schedule = replace(
        base.schedule,
        tokens=config.tokens,
        warmup_tokens=int(base.schedule.warmup_tokens * part),
        decay_tokens=int(base.schedule.decay_tokens * part),
    )
    return replace(base, seed=config.seed, schedule=schedule)


def compare(base: TrainConfig, out: Path, console: Console | None = None) -> Path:
    """Train both, write the report and return its path; a signal ends it with KeyboardInterrupt."""
    console = console or Console()
    text = base.data.path or "the sources of the Python standard library of this machine"
    with console.status(f"reading {text}"):
        TrainingData.open(base.data, base.model.vocab_size, base.seed)
    _make_room(out)
    configs = {
        name: replace(
            base,
            out=out / name,
            name=name,
            optimizer=replace(base.optimizer, placement=placement),
        )
        for name, placement in RUNS.items()
    }
    _train(configs, console)
    return write_page(
        out / "report.html",
        [Run.load(out / name) for name in RUNS],
        title="Learnable multipliers: a first look",
        note=f"Both runs train the same model on {text}, from the same start and on the same "
        "batches. This shows what the library does to a model, not what multipliers are worth: "
        "minutes of training are far from the equilibrium they are made for, and one seed "
        "proves nothing.",
    )


def _train(configs: Mapping[str, TrainConfig], console: Console) -> None:
    """Train step by step in turn: the curves grow together, under the same load of the machine."""
    shown: list[Display] = []

    def observe(name: str, record: dict[str, Any]) -> None:
        if shown:
            shown[0].record(name, record)

    with ExitStack() as stack:
        trainers = {
            name: stack.enter_context(closing(Trainer(config, partial(observe, name))))
            for name, config in configs.items()
        }
        # They differ in their multipliers, not in their schedule.
        tokens = next(iter(trainers.values())).tokens_after
        interrupt = stack.enter_context(Interrupt())
        shown.append(stack.enter_context(Display(list(trainers), tokens, console)))
        # A run that went back to a checkpoint takes more steps than the other.
        for steps in zip_longest(*(trainer.steps() for trainer in trainers.values())):
            for name, step in zip(trainers, steps, strict=True):
                if step is not None:
                    shown[0].advance(name, step)
            if interrupt.received:
                raise KeyboardInterrupt


def _make_room(out: Path) -> None:
    """Remove what an earlier demo left, and nothing that anybody else wrote."""
    mark = out / ".lrm-demo"
    for folder in [out / name for name in RUNS if (out / name).exists()]:
        if not mark.is_file():
            raise ValueError(f"{folder} is not from an earlier demo: choose another folder (--out)")
        shutil.rmtree(folder)
    out.mkdir(parents=True, exist_ok=True)
    mark.write_text("Made by lrm demo, which replaces its runs when it is run again.\n")
    (out / "report.html").unlink(missing_ok=True)

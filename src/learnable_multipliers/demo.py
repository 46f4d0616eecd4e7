"""A small honest comparison: one model trained without and with multipliers, side by side.

The text is the source of the Python standard library on this machine; both runs see the same
batches from the same start. It shows what the library does to a model, not what multipliers are
worth: minutes of training on one seed prove nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from learnable_multipliers.pretrain.config import Placement, TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.metrics.progress import Display
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.interrupt import Interrupt
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from learnable_multipliers.report.page import write_page
from learnable_multipliers.report.records import Run

RUNS: dict[str, Placement] = {"plain": "none", "multipliers": "full"}
_MARK = ".lrm-demo"
_TEXT = "the sources of the Python standard library of this machine"


def run(
    config: TrainConfig | None = None, out: Path = Path("demo"), console: Console | None = None
) -> Path:
    """Train both, write the report and return its path; a signal ends it with KeyboardInterrupt."""
    base = config or RECIPES["tiny"][1]
    console = console or Console()
    folders = {name: out / name for name in RUNS}
    with console.status(f"reading {base.data.path or _TEXT}"):
        # Data that cannot be read must not cost an earlier demo.
        TrainingData.open(base.data, base.model.vocab_size, base.seed)
    _make_room(out)
    _train({name: _variant(base, name, folders[name]) for name in RUNS}, console)
    return write_page(
        out / "report.html",
        [Run.load(folder) for folder in folders.values()],
        title="Learnable multipliers: a first look",
        notes=[
            f"Both runs train the same model on {base.data.path or _TEXT}, from the same start and "
            "on the same batches. This shows what the library does to a model, not what "
            "multipliers are worth: minutes of training are far from the equilibrium they are made "
            "for, and one seed proves nothing."
        ],
    )


def _train(configs: Mapping[str, TrainConfig], console: Console) -> None:
    """Train step by step in turn: the curves grow together, and all meet the same machine."""
    shown: list[Display] = []

    def observe(name: str, record: dict[str, Any]) -> None:
        if shown:
            shown[0].record(name, record)

    with ExitStack() as stack:
        trainers: dict[str, Trainer] = {}
        for name, config in configs.items():
            trainers[name] = Trainer(config, partial(observe, name))
            stack.callback(trainers[name].close)
        # They differ in their multipliers, not in their schedule.
        tokens = next(iter(trainers.values())).tokens_after
        interrupt = stack.enter_context(Interrupt())
        display = stack.enter_context(Display(list(trainers), tokens, console))
        shown.append(display)
        going = {name: trainer.steps() for name, trainer in trainers.items()}
        while going:
            for name in list(going):
                step = next(going[name], None)
                if step is None:
                    del going[name]
                else:
                    display.advance(name, step)
                if interrupt.received:
                    raise KeyboardInterrupt


def _variant(base: TrainConfig, name: str, folder: Path) -> TrainConfig:
    optimizer = replace(base.optimizer, placement=RUNS[name])
    return replace(base, out=folder, name=name, optimizer=optimizer)


def _make_room(out: Path) -> None:
    """Remove what an earlier demo left, and nothing that anybody else wrote."""
    mark = out / _MARK
    for folder in (out / name for name in RUNS):
        if not folder.exists():
            continue
        if not mark.is_file():
            raise ValueError(f"{folder} is not from an earlier demo: choose another folder (--out)")
        shutil.rmtree(folder)
    out.mkdir(parents=True, exist_ok=True)
    mark.write_text("Made by lrm demo, which replaces its runs when it is run again.\n")
    (out / "report.html").unlink(missing_ok=True)

"""A small honest comparison: one model trained without and with multipliers, side by side.

The text is the source of the Python standard library on this machine; both runs see the same
batches from the same start. It shows what the library does to a model, not what multipliers are
worth: minutes of training on one seed prove nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from learnable_multipliers.pretrain.baseline import kneser_ney_loss
from learnable_multipliers.pretrain.config import Placement, TrainConfig
from learnable_multipliers.pretrain.interrupt import Interrupt
from learnable_multipliers.pretrain.progress import Display
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.train import Trainer
from learnable_multipliers.pretrain.training_data import TrainingData
from learnable_multipliers.report.page import write_page
from learnable_multipliers.report.records import Run

RUNS: dict[str, Placement] = {"plain": "none", "multipliers": "full"}
NGRAM_ORDER = 5
_NOTE = (
    "Both runs train the same model on the sources of the Python standard library of this "
    "machine, from the same start and on the same batches. This shows what the library does to a "
    "model, not what multipliers are worth: minutes of training are far from the equilibrium they "
    "are made for, and one seed proves nothing."
)


def run(config: TrainConfig | None = None, out: Path = Path("demo")) -> Path:
    """Train both, write the report and return its path."""
    base = config or RECIPES["tiny"][1]
    console = Console()
    folders = {name: out / name for name in RUNS}
    _clear(folders.values())
    with console.status("preparing the sources of Python's standard library"):
        data = TrainingData.open(base.data, base.model.vocab_size, base.seed)
    shown: list[Display] = []

    def observe(name: str, record: dict[str, Any]) -> None:
        if shown and record["kind"] in ("train", "eval"):
            shown[0].record(name, record)

    trainers = {
        name: Trainer(_variant(base, name, folders[name]), partial(observe, name)) for name in RUNS
    }
    with Interrupt() as interrupt:
        with Display(list(RUNS), trainers["plain"].total_steps, console) as display:
            shown.append(display)
            # Step by step in turn: the curves grow together, and both meet the same machine.
            going = {name: trainer.going() for name, trainer in trainers.items()}
            while going and not interrupt.received:
                for name in list(going):
                    step = next(going[name], None)
                    if step is None:
                        del going[name]
                    else:
                        display.advance(name, step)
        if interrupt.received:
            raise KeyboardInterrupt
    with console.status(f"fitting a {NGRAM_ORDER}-gram model to the same text"):
        reference = (f"byte {NGRAM_ORDER}-gram model", kneser_ney_loss(data, NGRAM_ORDER))
    return write_page(
        out / "report.html",
        [Run.load(folder) for folder in folders.values()],
        title="Learnable multipliers: a first look",
        notes=[_NOTE],
        reference=reference,
    )


def _variant(base: TrainConfig, name: str, folder: Path) -> TrainConfig:
    optimizer = replace(base.optimizer, placement=RUNS[name])
    return replace(base, out=folder, name=name, optimizer=optimizer)


def _clear(folders: Any) -> None:
    """Make room: a demo can be run again. Only folders that a run wrote are removed."""
    for folder in folders:
        if (folder / "metrics.jsonl").is_file():
            shutil.rmtree(folder)

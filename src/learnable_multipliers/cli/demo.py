"""`lrm demo`: one model trained without and with multipliers, side by side.

The text is the source of the Python standard library on this machine; both runs see the same
batches from the same start. It shows what the library does to a model, not what multipliers are
worth: minutes of training with one seed prove nothing.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from learnable_multipliers._atomic import write_output
from learnable_multipliers._placement import Placement
from learnable_multipliers.cli.arguments import command
from learnable_multipliers.pretrain.atomic_folder import new_folder, remove
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.metrics.progress import Display
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.interrupt import Interrupt
from learnable_multipliers.pretrain.trainer.run_folder import FILES
from learnable_multipliers.pretrain.trainer.spikes import DivergenceError
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from learnable_multipliers.report.page import render
from learnable_multipliers.report.records import Run

RUNS: dict[str, Placement] = {"plain": "none", "multipliers": "full"}
_PAGE = "report.html"
_MARK = ".lrm-demo"
"""Marks the folder of a run as the demo's."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Length and place of the demo."""

    out: Path = Path("demo")
    """Folder of the two runs and report.html; replaces an earlier demo there and nothing else."""
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
        raise KeyboardInterrupt("no report was written; run lrm demo again to start over") from None
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
    """Return the recipe of both runs: `lrm train tiny`, at the given length."""
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
    """Train both, write the report and return its path; a signal raises KeyboardInterrupt."""
    console = console or Console()
    # Before minutes of work.
    _check_room(out)
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
    page = render(
        [Run.load(out / name) for name in RUNS],
        title="Learnable multipliers: a first look",
        note=f"Both runs train the same model on {text}, from the same start and on the same "
        "batches. This shows what the library does to a model, not what multipliers are worth: "
        "minutes of training are far from the equilibrium, and one seed proves nothing.",
    )
    if _is_foreign_page(out / _PAGE):
        runs = shlex.join(str(out / name) for name in RUNS)
        raise ValueError(
            f"{out / _PAGE} was changed by another process and is kept: lrm report {runs} --out "
            "FILE writes the page elsewhere"
        )
    write_output(out / _PAGE, page + _signature(page))
    return out / _PAGE


def _train(configs: Mapping[str, TrainConfig], console: Console) -> None:
    """Train both runs in turn, step by step, so both see the same load of the machine."""
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
        plan = next(iter(trainers.values())).schedule
        interrupt = stack.enter_context(Interrupt())
        display = Display(list(trainers), len(plan), plan.tokens_before, console)
        shown.append(stack.enter_context(display))
        # A run that rolled back takes more steps than the other.
        for steps in zip_longest(*(trainer.steps() for trainer in trainers.values())):
            for name, step in zip(trainers, steps, strict=True):
                if step is not None:
                    shown[0].advance(name, step)
            if interrupt.received:
                raise KeyboardInterrupt


# -- the folder -------------------------------------------------------------------------------


def _check_room(out: Path) -> None:
    """Raise a ValueError that names any file that the demo did not write."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: choose another folder (--out)")
    foreign = [path for name in RUNS for path in _foreign_in_run(out / name)]
    if _is_foreign_page(out / _PAGE):
        foreign.append(out / _PAGE)
    if foreign:
        more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        raise ValueError(
            f"{foreign[0]}{more} was not written by lrm demo and is kept: move it, or choose "
            "another folder (--out)"
        )


def _make_room(out: Path) -> None:
    """Remove an earlier demo, and mark the folders of the new runs."""
    _check_room(out)
    (out / _PAGE).unlink(missing_ok=True)
    for name in RUNS:
        if (out / name).exists():
            remove(out / name)
        # The folder appears with its mark.
        with new_folder(out / name) as folder:
            text = "Made by lrm demo, which replaces this run when it is run again.\n"
            (folder / _MARK).write_text(text)


def _foreign_in_run(folder: Path) -> list[Path]:
    """Return the files of a folder to be replaced that the demo did not write."""
    if folder.is_symlink() or (folder.exists() and not (folder / _MARK).is_file()):
        return [folder]
    known = {_MARK, *FILES}
    paths = sorted(folder.iterdir()) if folder.exists() else []
    # A killed process leaves temporary files.
    return [path for path in paths if path.name.removesuffix(".tmp") not in known]


def _signature(page: bytes) -> bytes:
    """Return the last line of a page, which marks it as the demo's."""
    return f"<!-- lrm demo {hashlib.sha256(page).hexdigest()} -->\n".encode()


def _is_foreign_page(path: Path) -> bool:
    """Return whether a page exists that the demo did not write, or that was changed since."""
    if not path.is_file():
        return path.exists() or path.is_symlink()
    content = path.read_bytes()
    length = len(_signature(b""))
    return content[-length:] != _signature(content[:-length])

"""The command `lrm diagnose`: runs of `lrm train`, and checkpoints of other trainers."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from learnable_multipliers.cli.arguments import command
from learnable_multipliers.cli.models import named_model
from learnable_multipliers.equilibrium import Diagnosis
from learnable_multipliers.equilibrium import diagnose as diagnose_optimizer
from learnable_multipliers.integrations.dcp_checkpoint import METADATA, read_dcp_checkpoint
from learnable_multipliers.integrations.saved_run import SavedRun
from learnable_multipliers.integrations.trainer_checkpoint import (
    OPTIMIZER,
    newest_checkpoint,
    read_trainer_checkpoint,
)
from learnable_multipliers.pretrain.trainer.build import build_model, make_optimizer
from learnable_multipliers.pretrain.trainer.load import is_run, load_checkpoint
from learnable_multipliers.pretrain.trainer.run_state import check_model, restore_, state_of
from learnable_multipliers.pretrain.trainer.schedule import Schedule
from learnable_multipliers.report import figures
from learnable_multipliers.report.diagnosis_page import write_diagnosis


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """What to diagnose."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run (its newest good checkpoint is read) or of one checkpoint: of lrm train, of
    the Hugging Face Trainer, or of torch.distributed.checkpoint."""
    model: str | None = None
    """For torch.distributed.checkpoint: a preset or a Hugging Face folder, for roles."""
    json: bool = False
    """Print JSON, with every layer separately, instead of a table."""
    plot: Path | None = None
    """File to plot every tensor to (.svg, .png, .pdf)."""
    out: Path | None = None
    """File to write a page with the table and plots to (.html)."""


@command(DiagnoseConfig)
def diagnose(config: DiagnoseConfig) -> None:
    """Find the tensors of a run whose scale is set by gradient noise and weight decay.

    Those are trapped; the others, whose scale is learned, are free. Compares their rms with the rms
    that pure noise gives from the same start at the same learning rates, and prints how noisy their
    gradients are. Rows are medians over layers.
    """
    figures.check_format(config.plot)
    with Console(stderr=True).status(f"reading {config.run}"):
        name, step, diagnosis, notes = _diagnose(config.run, config.model)
    for note in notes:
        print(f"lrm diagnose: {note}", file=sys.stderr)
    plain = diagnosis.to_dict()
    title = f"{name}, step {step:,}"
    if config.plot is not None:
        figures.save(figures.diagnosis(title, plain["readings"]), config.plot)
    if config.out is not None:
        said = [diagnosis.summary(), *notes, *diagnosis.assumptions]
        write_diagnosis(config.out, title, said, diagnosis.table(), plain)
    if config.json:
        asked = {"run": str(config.run), "name": name, "step": step}
        counted = {"verdicts": diagnosis.verdicts()}
        print(json.dumps(asked | counted | plain, indent=1))
        return
    print(f"{diagnosis}\n\n{title}: {diagnosis.summary()}")


def _diagnose(source: Path, model: str | None) -> tuple[str, int, Diagnosis, list[str]]:
    """Diagnose a checkpoint; return the run's name, the step, the result and notes."""
    is_dcp = (source / METADATA).is_file()
    if model is not None and not is_dcp:
        raise ValueError(
            f"--model is for folders of torch.distributed.checkpoint; {source} is not one"
        )
    if is_dcp:
        made = None if model is None else named_model(model, weights=False)
        saved = read_dcp_checkpoint(source, made)
        unknown = [
            "without --model the role of each matrix is unknown, and an embedding is treated as "
            "one matrix: rows of rare tokens lower its rms"
        ]
        return _diagnose_saved(saved, unknown if made is None else [])
    checkpoint = newest_checkpoint(source)
    if checkpoint is not None:
        return _diagnose_saved(read_trainer_checkpoint(checkpoint), [])
    if (source / "config.json").is_file() and any(source.glob("*.safetensors")):
        raise ValueError(
            f"{source} has a model but no optimizer state, like an export: give the folder of the "
            "run, such as runs/tiny, or a checkpoint with optimizer state, such as the Hugging "
            "Face Trainer's checkpoint-1000 with optimizer.pt"
        )
    if not is_run(source):
        raise ValueError(
            f"{source} is neither a run nor a checkpoint: give the folder that lrm train wrote "
            "(--out), one of those in its checkpoints folder, an output folder or checkpoint-1000 "
            f"of the Hugging Face Trainer ({OPTIMIZER}), or a folder of "
            f"torch.distributed.checkpoint ({METADATA})"
        )
    return _diagnose_run(source)


def _diagnose_saved(saved: SavedRun, notes: list[str]) -> tuple[str, int, Diagnosis, list[str]]:
    """Diagnose a plain optimizer saved by another trainer."""
    notes = [*saved.notes, *notes]
    steps = [int(s["step"]) for s in saved.optimizer.state.values() if "step" in s]
    taken, lrs = max(steps, default=saved.step), saved.lrs
    if lrs is not None and 0 < taken < len(lrs):
        notes.append(_left_out(len(lrs) - taken, len(lrs)))
        lrs = _thinned(lrs, len(lrs) - taken)
    diagnosis = diagnose_optimizer(saved.optimizer, saved.model, lrs=lrs)
    return saved.name, saved.step, diagnosis, notes


def _diagnose_run(source: Path) -> tuple[str, int, Diagnosis, list[str]]:
    """Diagnose a checkpoint of `lrm train`.

    The run's seed gives its initial weights, and its schedule the learning rate of every step.
    """
    checkpoint, notes = load_checkpoint(source)
    state = state_of(checkpoint)
    config = state.config
    check_model(config.model, checkpoint)
    model = build_model(config)
    optimizer, _ = make_optimizer(model, config.optimizer)
    start = diagnose_optimizer(optimizer)
    restore_(model, optimizer, checkpoint)
    planned = Schedule.of_run(config)
    lrs = [config.optimizer.lr * step.lr_factor for step in islice(planned, checkpoint.step)]
    if state.skipped_steps:
        lrs = _thinned(lrs, state.skipped_steps)
        notes.append(_left_out(state.skipped_steps, checkpoint.step))
    diagnosis = diagnose_optimizer(optimizer, lrs=lrs, start=start)
    return config.name, checkpoint.step, diagnosis, notes


def _left_out(count: int, steps: int) -> str:
    return (
        f"{count:,} of {steps:,} steps were skipped for non-finite gradients; the checkpoint does "
        "not record which, so predictions omit as many, evenly over the run"
    )


def _thinned(lrs: list[float], count: int) -> list[float]:
    """Return the rates without `count` of them, removed evenly."""
    out = {(2 * part + 1) * len(lrs) // (2 * count) for part in range(count)}
    return [lr for step, lr in enumerate(lrs) if step not in out]

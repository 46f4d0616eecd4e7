"""Commands about runs and their checkpoints: `lrm diagnose`, `lrm export` and `lrm report`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from learnable_multipliers.cli.arguments import command, usage_error
from learnable_multipliers.equilibrium import Diagnosis
from learnable_multipliers.equilibrium import diagnose as diagnose_optimizer
from learnable_multipliers.pretrain import export as exporting
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer.optimizer import make_optimizer
from learnable_multipliers.pretrain.trainer.run_folder import load_checkpoint
from learnable_multipliers.pretrain.trainer.run_state import (
    check_model,
    parse_state,
    restore_,
    state_of,
)
from learnable_multipliers.pretrain.trainer.schedule import Schedule
from learnable_multipliers.report import analysis
from learnable_multipliers.report.page import write_page
from learnable_multipliers.report.records import Run

_Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """What to look at."""

    run: _Run
    """Folder of a run (its newest good checkpoint is read) or of one checkpoint."""
    json: bool = False
    """Print JSON, with every layer separately, instead of a table."""
    plot: Path | None = None
    """File to plot every tensor to (.svg, .png, .pdf)."""


@command(DiagnoseConfig)
def diagnose(config: DiagnoseConfig) -> None:
    """Find the tensors of a run whose scale is set by gradient noise and weight decay.

    Those are trapped; the others, whose scale is learned, are free. Compares their rms with the one
    that pure noise gives from the same start under the same learning rates, and prints how noisy
    their gradients are. Rows are medians over layers.
    """
    if config.plot is not None:
        analysis.check_format(config.plot)
    with Console(stderr=True).status(f"reading {config.run}"):
        name, step, diagnosis, notes = _diagnose(config.run)
    for note in notes:
        print(f"lrm diagnose: {note}", file=sys.stderr)
    if config.plot is not None:
        plot = analysis.diagnosis(f"{name}, step {step:,}", diagnosis.to_dict()["readings"])
        analysis.save(plot, config.plot)
    if config.json:
        asked = {"run": str(config.run), "name": name, "step": step}
        counted = {"verdicts": diagnosis.verdicts()}
        print(json.dumps(asked | counted | diagnosis.to_dict(), indent=1))
        return
    print(f"{diagnosis}\n\n{name}, step {step:,}: {diagnosis.summary()}")


def _diagnose(source: Path) -> tuple[str, int, Diagnosis, list[str]]:
    """Read every tensor of a checkpoint; return the run's name, the step, the result and notes.

    The seed of the run gives its initial weights, and its schedule the rate of every step.
    """
    checkpoint, notes = load_checkpoint(source)
    state = state_of(checkpoint)
    config: TrainConfig = parse_state(checkpoint, TrainConfig, state.config, "config")
    check_model(config.model, checkpoint)
    model = build(config.model, config.seed)
    optimizer, _ = make_optimizer(model, config.optimizer)
    start = diagnose_optimizer(optimizer)
    restore_(model, optimizer, checkpoint)
    planned = Schedule(config.schedule, config.data.batch_sequences, config.data.sequence_length)
    lrs = [config.optimizer.lr * step.lr_factor for step in islice(planned, checkpoint.step)]
    if state.skipped_steps:
        lrs = _thinned(lrs, state.skipped_steps)
        notes.append(
            f"{state.skipped_steps:,} of {checkpoint.step:,} steps were skipped for bad gradients, "
            "and a checkpoint does not tell which: predictions leave out as many, evenly over the "
            "run"
        )
    diagnosis = diagnose_optimizer(optimizer, lrs=lrs, start=start)
    return config.name, checkpoint.step, diagnosis, notes


def _thinned(lrs: list[float], count: int) -> list[float]:
    """Return the rates without `count` of them, taken out at equal distances."""
    out = {(2 * part + 1) * len(lrs) // (2 * count) for part in range(count)}
    return [lr for step, lr in enumerate(lrs) if step not in out]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export, and where to."""

    run: _Run
    """Folder of a run (its newest good checkpoint is read) or of one checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to create."""
    dtype: exporting.ExportDtype = "float32"
    """Dtype of the exported weights."""


@command(ExportConfig)
def export(config: ExportConfig) -> None:
    """Export a trained model to a Hugging Face folder that from_pretrained loads.

    It holds config, safetensors and tokenizer. The weights include the multipliers, which are also
    written to a file of their own for analysis.
    """
    done = exporting.export(config.run, config.out, config.dtype)
    for note in done.notes:
        print(f"lrm export: {note}", file=sys.stderr)
    print(
        f"{done.folder}: {done.architecture} of {done.num_parameters:,} parameters, step "
        f"{done.step:,}\n"
        f"Load it: AutoModelForCausalLM.from_pretrained({str(done.folder)!r})"
    )


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What to report on."""

    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)"),
    ]
    """Folders of runs; the first is the baseline."""
    out: Path = Path("report.html")
    """File to write."""
    title: str = "Training runs"
    """Heading of the page."""


@command(ReportConfig)
def report(config: ReportConfig) -> None:
    """Write one self-contained page about one or several runs.

    It shows losses, norms against the noise prediction, multipliers and samples.
    """
    if not config.runs:
        usage_error("lrm report: name one or several folders of runs: lrm report runs/tiny")
    page = write_page(config.out, [Run.load(run) for run in config.runs], title=config.title)
    print(f"Report: {page}")

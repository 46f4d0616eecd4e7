"""Commands about runs and their checkpoints: `lrm diagnose`, `lrm export` and `lrm report`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from learnable_multipliers.cli.arguments import command, usage_error
from learnable_multipliers.pretrain import export as exporting
from learnable_multipliers.pretrain.diagnosis import diagnose_run
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
        found = diagnose_run(config.run)
    for note in found.notes:
        print(f"lrm diagnose: {note}", file=sys.stderr)
    if config.plot is not None:
        title = f"{found.name}, step {found.step:,}"
        readings = found.diagnosis.to_dict()["readings"]
        analysis.save(analysis.diagnosis(title, readings), config.plot)
    if config.json:
        asked = {"run": str(config.run), "name": found.name, "step": found.step}
        counted = {"verdicts": found.diagnosis.verdicts()}
        print(json.dumps(asked | counted | found.diagnosis.to_dict(), indent=1))
        return
    print(f"{found.diagnosis}\n\n{found.name}, step {found.step:,}: {found.diagnosis.summary()}")


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

"""Commands about runs and their checkpoints: `lrm export` and `lrm report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from learnable_multipliers.cli.arguments import command, usage_error
from learnable_multipliers.pretrain import export as exporting
from learnable_multipliers.pretrain.model.hugging_face import ExportDtype
from learnable_multipliers.report.page import write_page
from learnable_multipliers.report.records import Run

_Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export, and where to."""

    run: _Run
    """Folder of a run (its newest good checkpoint is read) or of one checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to create."""
    dtype: ExportDtype = "float32"
    """Dtype of the exported weights."""
    gguf: bool = False
    """Write model.gguf too, for llama.cpp; needs the package gguf."""


@command(ExportConfig)
def export(config: ExportConfig) -> None:
    """Export a trained model to a Hugging Face folder that from_pretrained loads.

    It holds config, safetensors and tokenizer. The weights include the multipliers, which are also
    written to a file of their own for analysis.
    """
    done = exporting.export(config.run, config.out, config.dtype, with_gguf=config.gguf)
    for note in done.notes:
        print(f"lrm export: {note}", file=sys.stderr)
    print(
        f"{done.folder}: {done.architecture} of {done.num_parameters:,} parameters, step "
        f"{done.step:,}\n"
        f"Load it: AutoModelForCausalLM.from_pretrained({str(done.folder)!r})"
    )
    if config.gguf:
        print(f"In llama.cpp: {done.folder / exporting.GGUF_FILE}")


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

"""`lrm report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from learnable_multipliers.cli.arguments import read, refuse
from learnable_multipliers.report.page import write_page
from learnable_multipliers.report.records import Run


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


def run(arguments: Sequence[str]) -> None:
    """Write the page."""
    config = read(
        ReportConfig,
        "report",
        arguments,
        description="Write one self-contained page about one or several runs: losses, norms "
        "against the noise prediction, multipliers and samples.",
    )
    if not config.runs:
        refuse("lrm report: name one or several folders of runs: lrm report runs/tiny")
    page = write_page(config.out, [Run.load(run) for run in config.runs], title=config.title)
    print(f"Report: {page}")

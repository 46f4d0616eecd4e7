"""`lrm report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from learnable_multipliers.report.page import write_page
from learnable_multipliers.report.records import Run


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Make one self-contained page about one or several runs; the first is the baseline."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: Path = Path("report.html")
    """File to write."""
    title: str = "Training runs"
    """Heading of the page."""


def run(arguments: Sequence[str]) -> None:
    """Write the page."""
    config = tyro.cli(ReportConfig, prog="lrm report", args=arguments)
    print(write_page(config.out, [Run.load(run) for run in config.runs], title=config.title))

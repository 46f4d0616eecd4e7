"""`lrm diagnose`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from learnable_multipliers.cli.arguments import read
from learnable_multipliers.pretrain.diagnosis import diagnose_run
from learnable_multipliers.report import analysis


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """What to look at."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run (its newest good checkpoint is read) or of one checkpoint."""
    json: bool = False
    """Print JSON, with every layer separately, instead of a table."""
    plot: Path | None = None
    """File to plot every tensor to (.svg, .png, .pdf)."""


def run(arguments: Sequence[str]) -> None:
    """Print the diagnosis of a checkpoint."""
    config = read(
        DiagnoseConfig,
        "diagnose",
        arguments,
        description="Find the tensors of a run whose scale is set by gradient noise and weight "
        "decay (trapped) and those whose scale is learned (free). Compares their rms with the one "
        "that pure noise gives from the same start under the same learning rates, and prints how "
        "noisy their gradients are. Rows are medians over layers.",
    )
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

"""`lrm symmetries`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from learnable_multipliers._planner import plan
from learnable_multipliers.cli.architecture import named_model
from learnable_multipliers.cli.arguments import read
from learnable_multipliers.report import analysis
from learnable_multipliers.symmetry import find_symmetries


@dataclass(frozen=True, kw_only=True)
class SymmetriesConfig:
    """What to look at."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A preset (tiny, 20m, falcon-h1-0.5b, ...) or a local Hugging Face folder."""
    placement: Literal["all", "full", "symmetry-aware", "scalar"] = "all"
    """Scales to look at: all rows and columns, or the multipliers of a placement."""
    json: bool = False
    """Print JSON, with every layer separately, instead of text."""
    plot: Path | None = None
    """File to plot to (.svg, .png, .pdf): which axes take part in which symmetry."""


def run(arguments: Sequence[str]) -> None:
    """Print the symmetries of a model."""
    config = read(
        SymmetriesConfig,
        "symmetries",
        arguments,
        description="Find the rescalings of a model's matrices and norms that do not change its "
        "outputs. They are computed from the forward pass at random weights, in seconds to "
        "minutes; for a large model, from a small one of the same architecture. The numbers in "
        "front count independent rescalings.",
    )
    if config.plot is not None:
        analysis.check_format(config.plot)
    start = time.perf_counter()
    # Not on stdout, which may be a file.
    with Console(stderr=True).status(f"analysing {config.model}"):
        model = named_model(config.model, weights=True)
        planned = None if config.placement == "all" else plan(model, config.placement)
        found = find_symmetries(model, planned)
    seconds = time.perf_counter() - start
    if config.plot is not None:
        analysis.save(analysis.symmetry_map(config.model, found.powers()), config.plot)
    if config.json:
        asked = {"model": config.model, "placement": config.placement, "seconds": seconds}
        print(json.dumps(asked | found.to_dict(), indent=1))
        return
    scales = "all rows and columns" if planned is None else f"the {config.placement} placement"
    print(f"{config.model}, {scales}: {len(found)} symmetries, found in {seconds:.1f} s\n")
    print(found.summary())

"""`lrm plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from learnable_multipliers._placement import Placement
from learnable_multipliers._planner import plan
from learnable_multipliers.cli.architecture import named_model
from learnable_multipliers.cli.arguments import read


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan for."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A preset (tiny, 20m, falcon-h1-0.5b, ...) or a local Hugging Face folder."""
    placement: Placement = "full"
    """Rows and columns (full), without redundant ones (symmetry-aware), or one each (scalar)."""
    json: Path | None = None
    """Also write the plan to this file."""


def run(arguments: Sequence[str]) -> None:
    """Print the plan of a model."""
    config = read(
        PlanConfig,
        "plan",
        arguments,
        description="Show which multipliers each matrix of a model would carry, and why. Reads "
        "only names and shapes: no weights are loaded.",
    )
    planned = plan(named_model(config.model, weights=False), config.placement)
    print(planned)
    if config.json is not None:
        config.json.write_text(planned.to_json() + "\n", encoding="utf8")

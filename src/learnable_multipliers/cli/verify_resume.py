"""`lrm verify-resume`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from learnable_multipliers.cli.arguments import read
from learnable_multipliers.cli.train import recipe
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.preflight.resume_check import check_resume

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(TrainConfig):
    """A training run, and how many of its steps are checked."""

    steps: int = 10
    """Steps before the checkpoint, and again after it."""
    out: Path = Path("runs/verify-resume")
    """New folder for both runs; removed if they are the same."""
    # The command itself starts and resumes.
    resume: tyro.conf.Suppress[bool] = False
    dry_run: tyro.conf.Suppress[bool] = False


def verify_resume(arguments: Sequence[str]) -> None:
    """Check a recipe, print a table, and fail if the runs differ."""
    config = configure(arguments)
    training = TrainConfig(**{f.name: getattr(config, f.name) for f in fields(TrainConfig)})
    if config.out.exists():
        raise ValueError(f"{config.out} exists: remove it, or choose another folder (--out)")
    console = Console(stderr=True)
    try:
        with console.status("getting ready") as status:
            found = check_resume(training, config.steps, status.update)
    except BaseException:
        shutil.rmtree(config.out, ignore_errors=True)
        raise
    print(f"{'':10}{'compared':>10}{'differ':>10}")
    for one in found:
        print(f"{one.what:10}{one.compared:>10,}{len(one.differences):>10,}")
        for difference in one.differences[:_SHOWN]:
            print(f"  {difference}")
    if any(one.differences for one in found):
        sys.exit(
            f"lrm verify-resume: the resumed run differs from the one without a stop; both are in "
            f"{config.out}. On a GPU, kernels that add in no fixed order do this: compare "
            "two runs without a stop as well"
        )
    shutil.rmtree(config.out)
    print(
        f"\nThe same, bit for bit: {2 * config.steps} steps in one go, and a run that was killed "
        f"and resumed from step {config.steps}."
    )


def configure(arguments: Sequence[str]) -> VerifyConfig:
    """Return the config of `lrm verify-resume` with these arguments; without a recipe, of tiny."""
    named = bool(arguments) and not arguments[0].startswith("-")
    name, settings = (arguments[0], arguments[1:]) if named else ("tiny", arguments)
    what, default = recipe("verify-resume", name)
    defaults: dict[str, Any] = {f.name: getattr(default, f.name) for f in fields(TrainConfig)}
    return read(
        VerifyConfig,
        f"verify-resume {name}",
        settings,
        description=f"Train the first steps of a {what} twice: once without a stop, once killed "
        "and resumed. Compare weights, optimizer, counters and metrics bit for bit. Exit code 1 if "
        "anything differs. The options are those of lrm train.",
        default=replace(VerifyConfig(**defaults), out=VerifyConfig.out),
    )

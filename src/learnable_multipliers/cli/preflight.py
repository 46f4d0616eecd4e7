"""Commands before a run: `lrm doctor` and `lrm verify-resume`."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.text import Text

from learnable_multipliers._checksum import read_verified
from learnable_multipliers._formats import duration
from learnable_multipliers._serialization import from_dict
from learnable_multipliers.cli.arguments import closest, read
from learnable_multipliers.cli.train import recipe
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.metrics.progress import printable
from learnable_multipliers.pretrain.preflight.checks import CheckResult
from learnable_multipliers.pretrain.preflight.doctor import run_checks, summary
from learnable_multipliers.pretrain.preflight.resume_check import check_resume
from learnable_multipliers.pretrain.recipes import RECIPES

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}
_SHOWN = 3


def _name_and_settings(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the recipe or run that is named first, tiny where none is, and the settings."""
    named = bool(arguments) and not arguments[0].startswith("-")
    return (arguments[0], arguments[1:]) if named else ("tiny", arguments)


def doctor(arguments: Sequence[str]) -> None:
    """Print one line per check."""
    name, settings = _name_and_settings(arguments)
    config = read(
        TrainConfig,
        f"doctor {name}",
        settings,
        description="Check machine, data and model before a run: packages, device, disk and "
        "memory, checksums of the data and all settings. Then take one step with learning rate 0, "
        "which must change nothing, save and load a checkpoint, and time a step. Leaves nothing "
        "behind. Exit code 1 if a check fails. The first argument is a recipe (lrm doctor 20m "
        "--data.path DATA) or the folder of a run, whose checkpoints are then read too (lrm doctor "
        f"runs/tiny); without one it is tiny. The defaults below are those of {name}.",
        default=RECIPES[name][1] if name in RECIPES else _config_of(name),
    )
    console, began = Console(), time.perf_counter()
    results: list[CheckResult] = []
    with console.status("checking"):
        for result in run_checks(config):
            results.append(result)
            line = Text(f"{result.verdict:<8}", style=_STYLES[result.verdict])
            line.append(f"{result.name:<20}{printable(result.text)}", style="default")
            if result.advice:
                line.append(f"\n{'':8}-> {printable(result.advice)}", style="default")
            console.print(line, highlight=False, soft_wrap=True)
    took = duration(time.perf_counter() - began)
    console.print(f"{summary(results)}, in {took}", highlight=False, soft_wrap=True)
    if any(result.verdict == "failed" for result in results):
        sys.exit(1)


def _config_of(name: str) -> TrainConfig:
    file = Path(name) / "config.json"
    if not file.is_file():
        near = closest(name, list(RECIPES))
        raise ValueError(
            f"{name!r} is neither a recipe ({', '.join(RECIPES)}) nor the folder of a run"
            + (f"; did you mean {near}?" if near else "")
        )
    try:
        stored = from_dict(TrainConfig, read_verified(file), str(file))
    except ValueError as error:
        advice = "lrm train RECIPE --resume writes it again, if the run has a checkpoint"
        raise ValueError(f"{error}; {advice}") from error
    return replace(stored, out=Path(name))


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
    name, settings = _name_and_settings(arguments)
    _, default = recipe("verify-resume", name)
    defaults: dict[str, Any] = vars(default) | {"out": VerifyConfig.out}
    config = read(
        VerifyConfig,
        f"verify-resume {name}",
        settings,
        description=f"Train the first steps of {name} twice: once without a stop, once killed and "
        "resumed. Compare weights, optimizer, counters and metrics bit for bit. Exit code 1 if "
        "anything differs. Any recipe may come first: lrm verify-resume 20m --data.path DATA. The "
        "options are those of lrm train.",
        default=VerifyConfig(**defaults),
    )
    training = TrainConfig(**{f.name: getattr(config, f.name) for f in fields(TrainConfig)})
    if config.out.exists():
        raise ValueError(f"{config.out} exists: remove it, or choose another folder (--out)")
    try:
        with Console(stderr=True).status("getting ready") as status:
            comparisons = check_resume(training, config.steps, status.update)
    except BaseException:
        shutil.rmtree(config.out, ignore_errors=True)
        raise
    print(f"{'':10}{'compared':>10}{'differ':>10}")
    for one in comparisons:
        print(f"{one.what:10}{one.compared:>10,}{len(one.differences):>10,}")
        for difference in one.differences[:_SHOWN]:
            print(f"  {difference}")
    if any(one.differences for one in comparisons):
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

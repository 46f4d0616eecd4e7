"""`lrm doctor`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from learnable_multipliers._formats import duration
from learnable_multipliers.cli.arguments import closest, read, wrapped
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.metrics.progress import printable
from learnable_multipliers.pretrain.preflight.checks import CheckResult
from learnable_multipliers.pretrain.preflight.doctor import run_checks, summary
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.serialization import from_dict

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}
_WHAT = (
    "Check machine, data and model before a run: packages, device, disk and memory, checksums of "
    "the data and all settings. Then take one step with learning rate 0, which must change "
    "nothing, save and load a checkpoint, and time a step. Leaves nothing behind. Exit code 1 if a "
    "check fails."
)


def doctor(arguments: Sequence[str]) -> None:
    """Print one line per check."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_help())
        return
    config = configure(arguments)
    console, began = Console(), time.perf_counter()
    results: list[CheckResult] = []
    with console.status("checking"):
        for result in run_checks(config):
            results.append(result)
            _show(result, console)
    took = duration(time.perf_counter() - began)
    console.print(f"{summary(results)}, in {took}", highlight=False, soft_wrap=True)
    if any(result.verdict == "failed" for result in results):
        sys.exit(1)


def configure(arguments: Sequence[str]) -> TrainConfig:
    """Return the config to check: a recipe's or a run's, with its settings overridden."""
    named = bool(arguments) and not arguments[0].startswith("-")
    name, settings = (arguments[0], arguments[1:]) if named else ("tiny", arguments)
    default = RECIPES[name][1] if name in RECIPES else _config_of(name)
    return read(
        TrainConfig,
        f"doctor {name}",
        settings,
        description=f"{_WHAT} The defaults below are those of {name}.",
        default=default,
    )


def _config_of(name: str) -> TrainConfig:
    file = Path(name) / "config.json"
    if not file.is_file():
        near = closest(name, list(RECIPES))
        raise ValueError(
            f"{name!r} is neither a recipe ({', '.join(RECIPES)}) nor the folder of a run"
            + (f"; did you mean {near}?" if near else "")
        )
    try:
        kept = json.loads(file.read_text(encoding="utf8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    config = from_dict(TrainConfig, kept, str(file))
    return replace(config, out=Path(name))


def _show(result: CheckResult, console: Console) -> None:
    line = Text(f"{result.verdict:<8}", style=_STYLES[result.verdict])
    line.append(f"{result.name:<20}{printable(result.text)}", style="default")
    console.print(line, highlight=False, soft_wrap=True)
    if result.advice:
        advice = Text(f"{'':8}-> {printable(result.advice)}")
        console.print(advice, highlight=False, soft_wrap=True)


def _help() -> str:
    return "\n".join(
        [
            "usage: lrm doctor [RECIPE or RUN] [--help] [SETTINGS]",
            "",
            wrapped(_WHAT),
            "",
            "For instance:",
            "  lrm doctor                        the recipe tiny; takes seconds",
            "  lrm doctor 20m --data.path DATA   a recipe with the settings of lrm train",
            "  lrm doctor runs/tiny              an existing run and its checkpoints",
        ]
    )

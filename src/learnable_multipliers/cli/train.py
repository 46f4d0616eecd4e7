"""`lrm train`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.markup import escape

from learnable_multipliers._formats import count, duration
from learnable_multipliers.cli.arguments import (
    closest,
    read,
    terminal_columns,
    usage_error,
    wrapped,
)
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.distributed import AXES
from learnable_multipliers.pretrain.metrics.progress import Display, printable
from learnable_multipliers.pretrain.model import hugging_face
from learnable_multipliers.pretrain.preflight import dry_run
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.interrupt import Interrupt
from learnable_multipliers.pretrain.trainer.memory import MEMORY_ADVICE
from learnable_multipliers.pretrain.trainer.run_folder import checkpoint_folder
from learnable_multipliers.pretrain.trainer.trainer import Trainer


def train(arguments: Sequence[str]) -> None:
    """Train a model by a named recipe; options override its settings."""
    config = configure(arguments)
    if config.dry_run:
        print(dry_run.describe(config, terminal_columns()))
        return
    # One rank prints for all.
    console = Console(file=_SteadyOutput(sys.stdout), quiet=int(os.environ.get("RANK", "0")) > 0)  # pyright: ignore[reportArgumentType]
    _train(config, console, arguments)


def configure(arguments: Sequence[str]) -> TrainConfig:
    """Return the config of `lrm train` with these arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_recipes())
        # Without a recipe nothing is trained: scripts should notice.
        sys.exit(0 if arguments else 2)
    name, *settings = arguments
    if name.startswith("-"):
        usage_error(f"lrm train: the recipe comes first: lrm train RECIPE {name} ... {_LIST}")
    what, default = recipe("train", name)
    return read(
        TrainConfig,
        f"train {name}",
        settings,
        description=f"Train a {what}. The defaults below are those of this recipe.",
        default=default,
    )


_LIST = "lrm train --help lists the recipes."


def recipe(command: str, name: str) -> tuple[str, TrainConfig]:
    """Return what a recipe trains, and its config; an unknown name ends the process."""
    if name not in RECIPES:
        near = closest(name, list(RECIPES))
        hint = f"Did you mean lrm {command} {near}? {_LIST}" if near else _LIST
        usage_error(f"lrm {command}: there is no recipe {name!r}. {hint}")
    return RECIPES[name]


def _recipes() -> str:
    width = max(map(len, RECIPES))
    return "\n".join(
        [
            "usage: lrm train RECIPE [--help] [SETTINGS]",
            "",
            wrapped("Train a language model. A recipe sets everything; options override it."),
            "",
            *(wrapped(what, first=f"  {name:<{width}}  ") for name, (what, _) in RECIPES.items()),
            "",
            "For instance:",
            "  lrm train tiny                        train; Ctrl-C saves, --resume continues",
            "  lrm train 20m --data.path DATA        on the output of lrm data prepare",
            "  lrm train 20m --optimizer.lr 2e-3     with another learning rate",
            "  lrm train 20m --dry-run               show plan and memory; do not train",
            "  lrm train 20m --help                  list all settings with their values",
        ]
    )


def _train(config: TrainConfig, console: Console, arguments: Sequence[str]) -> None:
    """Train with a live table on the terminal; Ctrl-C saves and ends."""
    shown: list[Display] = []

    def observe(record: dict[str, Any]) -> None:
        if record["kind"] == "warning":
            _say(console, f"[yellow]{escape(record['text'])}[/]")
        elif record["kind"] == "sample":
            text = escape(printable(record["prompt"] + record["text"]))
            _say(console, f"[dim]sample at step {record['step']:,}:[/]\n{text}")
        elif shown:
            shown[0].record(name, record)

    with console.status("getting ready"), _memory_advice(config.out):
        trainer = Trainer(config, observe)
    name, plan = trainer.config.name, trainer.schedule
    _announce(trainer, console)
    with (
        _resume_advice(config.out),
        closing(trainer),
        Interrupt() as interrupt,
        Display([name], len(plan), plan.tokens_before, console) as display,
        _memory_advice(config.out),
    ):
        shown.append(display)
        for step in trainer.steps(interrupt):
            display.advance(name, step)
    if trainer.stopped_by is not None:
        more = [] if config.resume else ["--resume"]
        command = shlex.join(["lrm", "train", *arguments, *more])
        _say(console, f"Resume with: {escape(command)}")
        sys.exit(128 + trainer.stopped_by)
    trainer.raise_if_diverged()
    out = escape(str(config.out))
    took = duration(trainer.seconds) + (" in all" if config.resume else "")
    _say(console, f"Done in {took}. Metrics and checkpoints: {out}")
    exports = hugging_face.unsupported_reason(trainer.config.model) is None
    export = f"; lrm export {out} OUT" if exports else ""
    _say(console, f"Next: lrm report {out}{export}")


@contextmanager
def _resume_advice(out: Path) -> Iterator[None]:
    """Add to an OSError how to continue once its cause, such as a full disk, is fixed."""
    try:
        yield
    except OSError as error:
        advice = "there is no checkpoint yet: start again in an empty folder"
        if saved := checkpoints.steps(checkpoint_folder(out)):
            advice = f"--resume continues from the checkpoint of step {saved[-1]:,}"
        raise OSError(f"{error}. Then: {advice}") from error


@contextmanager
def _memory_advice(out: Path) -> Iterator[None]:
    """Add advice to errors about memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # On a CPU torch raises a plain RuntimeError.
        text = str(error).partition("\n")[0] or "memory ran out"
        kinds = (torch.OutOfMemoryError, MemoryError)
        if not isinstance(error, kinds) and "allocate memory" not in text:
            raise
        resume = ", also with --resume" if checkpoints.steps(checkpoint_folder(out)) else ""
        raise ValueError(
            f"{text} {MEMORY_ADVICE.capitalize()}{resume}; --dry-run shows what takes how much"
        ) from error


def _announce(trainer: Trainer, console: Console) -> None:
    config, device = trainer.config, trainer.device
    carried = (
        f"{trainer.plan.num_multipliers:,} multipliers ({config.optimizer.placement})"
        if trainer.plan.num_multipliers
        else "no multipliers"
    )
    variant = config.optimizer.variant
    kind = config.optimizer.kind + (f" ({variant})" if variant != "none" else "")
    world = trainer.world
    axes = ", ".join(f"{axis} {n}" for axis, n in zip(AXES, world.axes, strict=True) if n > 1)
    ranks = f"{world.size} ranks ({axes}) of " if axes else ""
    _say(
        console,
        f"{escape(config.name)}: {count(trainer.model.num_parameters)} parameters, {carried}, "
        f"{kind}, on {ranks}{device.name} in {device.precision}"
        f"{', compiled' if device.compiled else ''}"
        f"{f', resumed from step {trainer.step:,}' if trainer.step else ''}",
    )


def _say(console: Console, text: str) -> None:
    # Do not wrap: a message is one line in a log file, and terminals wrap by themselves.
    console.print(text, highlight=False, soft_wrap=True)


class _SteadyOutput:
    """A stream that discards output once its reader or terminal is gone; the run continues."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or discard."""
        with self._discarding_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or discard."""
        with self._discarding_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _discarding_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # Buffered output goes there too, or Python would report an error at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

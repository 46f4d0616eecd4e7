"""Progress of runs: live bars on a terminal, plain lines elsewhere.

Time left is estimated from tokens, not steps: while the batch ramps up, steps get longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from learnable_multipliers._formats import count, duration

_WINDOW = 600.0
"""Seconds over which the speed is averaged; at least eight steps."""
_PLAIN_LINES = 40
"""Lines of a whole run without a terminal."""
_LONGEST_NAME = 24

# Numbers shown of each kind of record: key -> format and minimum width of the terminal. In order of
# importance.
_SHOWN: dict[str, tuple[str, int]] = {
    "train/loss": ("loss {:.3f}", 0),
    "eval/loss": ("held-out {:.3f}", 80),
    "train/grad_norm": ("grad {:.2f}", 110),
    "train/tokens_per_second": ("{} tok/s", 64),
    "train/mfu": ("MFU {:.0%}", 100),
}


class Display:
    """Shows one or several runs of one schedule; hand it each record of their metrics.

    Args:
        num_steps: Steps of a whole run.
        tokens_before: Tokens that a run has been trained on before a step, counted from 0.
    """

    def __init__(
        self,
        names: Sequence[str],
        num_steps: int,
        tokens_before: Callable[[int], int],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console = console or Console()
        self._num_steps, self._tokens_before = num_steps, tokens_before
        self._clock, self._last_advance = clock, clock()
        # A dumb terminal cannot draw in place.
        self._is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._progress = Progress(
            *_columns(self.console.width),
            console=self.console,
            get_time=clock,
            refresh_per_second=4,
            speed_estimate_period=_WINDOW,
            disable=not self._is_live,
        )
        # Rich reads a description as markup.
        empty: dict[str, Any] = dict.fromkeys(_SHOWN, "")
        total = tokens_before(num_steps)
        self._tasks = {
            name: self._progress.add_task(
                "", total=total, name=name[:_LONGEST_NAME], step=self._step(0), **empty
            )
            for name in names
        }
        self._trained_at = dict.fromkeys(names, 0)
        self._last_line = dict.fromkeys(names, -1)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, name: str, step: int) -> None:
        """Show that a run has finished a step."""
        now = self._clock()
        self._progress.speed_estimate_period = max(
            self._progress.speed_estimate_period, 8 * (now - self._last_advance)
        )
        self._last_advance = now
        self._progress.update(
            self._tasks[name], completed=self._tokens_before(step), step=self._step(step)
        )

    def record(self, name: str, record: Mapping[str, Any]) -> None:
        """Show the numbers of a record."""
        kind, step = record["kind"], record["step"]
        if kind not in ("train", "eval"):
            return
        shown: dict[str, Any] = {}
        if kind == "train":
            self._trained_at[name] = step
        elif self._trained_at[name] == 1 < step:
            # If only the first step is logged, do not show its loss at later ones.
            shown = {key: "" for key in _SHOWN if key.startswith("train/")}
        for key, (text, _) in _SHOWN.items():
            value = record.get(key.removeprefix(f"{kind}/"))
            if value is not None:
                shown[key] = text.format(count(value) if "tok/s" in text else value)
        if "train/loss" in shown and record.get("skipped_steps"):
            # Next to the loss: a separate column would be empty in nearly all runs.
            shown["train/loss"] += f"  {record['skipped_steps']:,} skipped"
        self._progress.update(self._tasks[name], **shown)
        if not self._is_live:
            self._print_line(name, kind, step)

    def seconds_left(self, name: str) -> float | None:
        """Return the estimated time until the end of a run; None before two steps."""
        return self._progress.tasks[self._tasks[name]].time_remaining

    def _step(self, step: int) -> str:
        return f"{step:,}/{self._num_steps:,}"

    def _print_line(self, name: str, kind: str, step: int) -> None:
        line = step * _PLAIN_LINES // self._num_steps
        if kind == "train" and self._last_line[name] == line:
            return
        self._last_line[name] = line
        fields, left = self._progress.tasks[self._tasks[name]].fields, self.seconds_left(name)
        parts = [name.ljust(max(map(len, self._tasks))), f"step {self._step(step)}"]
        parts += [fields[key] for key in _SHOWN if fields[key]]
        if left is not None and step < self._num_steps:
            parts.append(f"{duration(left)} left")
        self.console.print("  ".join(parts), highlight=False, markup=False, soft_wrap=True)


def _columns(width: int) -> list[ProgressColumn]:
    """Return the columns that fit the width of a terminal."""
    fits = (key for key, (_, least) in _SHOWN.items() if width >= least)
    name, step, *numbers = (
        TextColumn(f"{{task.fields[{field}]}}", markup=False) for field in ("name", "step", *fits)
    )
    bar = [BarColumn(bar_width=None if width < 120 else 40)] if width >= 48 else []
    return [name, *bar, step, *numbers, TimeRemainingColumn(elapsed_when_finished=True)]


def printable(text: str) -> str:
    """Return text without control characters, so that it cannot command a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )

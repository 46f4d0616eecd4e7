"""What a user sees while a run is going on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text


class _Remaining(ProgressColumn):
    """The time left, from the speed of the run so far."""

    def render(self, task: Task) -> Text:
        if task.finished or not task.time_remaining:
            return Text(f"{duration(task.elapsed or 0)} taken", style="dim")
        return Text(f"{duration(task.time_remaining)} left", style="dim")


class Display:
    """Shows one or several runs; hand it each record of their metrics."""

    def __init__(self, names: Sequence[str], total: int, console: Console | None = None):
        self.console = console or Console()
        self._total = total
        self._live = self.console.is_terminal
        width = max(map(len, names))
        self._progress = Progress(
            TextColumn(f"{{task.description:<{width}}}", style="bold"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.fields[shown]}"),
            _Remaining(),
            console=self.console,
            # Speed over the whole run, not the last seconds: evaluations come in bursts.
            speed_estimate_period=300.0,
        )
        self._names, self._tasks = list(names), {}
        self._numbers: dict[str, dict[str, float]] = {name: {} for name in names}
        self._shown_at: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._live:
            self._tasks: dict[str, TaskID] = {
                name: self._progress.add_task(name, total=self._total, shown="starting")
                for name in self._names
            }
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._progress.stop()

    def advance(self, name: str, step: int) -> None:
        """Tell that a run has finished a step."""
        if self._live:
            self._progress.update(self._tasks[name], completed=step)

    def record(self, name: str, record: Mapping[str, Any]) -> None:
        """Show the numbers of a record."""
        numbers = self._numbers[name]
        if record["kind"] == "train":
            for key in ("loss", "tokens_per_second", "mfu", "grad_norm"):
                if record.get(key) is not None:
                    numbers[key] = record[key]
        elif record["kind"] == "eval":
            numbers["held_out"] = record["loss"]
        else:
            return
        if self._live:
            self._progress.update(self._tasks[name], shown=summary(numbers))
        else:
            self._plain_line(name, record)

    def say(self, text: str) -> None:
        """Print a line above the live ones."""
        self.console.print(text, highlight=False)

    def _plain_line(self, name: str, record: Mapping[str, Any]) -> None:
        # A log file wants some forty lines of a run, not a line for each record.
        every = max(1, self._total // 40)
        step = record["step"]
        if record["kind"] == "train" and self._shown_at.get(name) == step // every:
            return
        self._shown_at[name] = step // every
        shown = summary(self._numbers[name])
        self.console.print(f"{name} step {step:,}/{self._total:,}  {shown}", highlight=False)


def summary(numbers: Mapping[str, float]) -> str:
    """Return the numbers of a run in one line."""
    shown = []
    if "loss" in numbers:
        shown.append(f"loss {numbers['loss']:.3f}")
    if "held_out" in numbers:
        shown.append(f"held-out {numbers['held_out']:.3f}")
    if "grad_norm" in numbers:
        shown.append(f"grad {numbers['grad_norm']:.2f}")
    if "tokens_per_second" in numbers:
        shown.append(f"{in_short(numbers['tokens_per_second'])} tok/s")
    if "mfu" in numbers:
        shown.append(f"MFU {numbers['mfu']:.0%}")
    return "  ".join(shown)


def in_short(number: float) -> str:
    """Return a number with three digits and a letter: 12.3k, 4.56M."""
    if not math.isfinite(number):
        return str(number)
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Return a time in words: 2h 05m, 3m 20s, 12s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"

"""What a user sees while runs go on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from learnable_multipliers.pretrain.metrics.pace import Pace

_COLUMNS = ("step", "loss", "held-out", "grad", "tok/s", "MFU", "left")
# What a narrow terminal does without, the first one first; the bar goes before them all.
_LESS = ("grad", "MFU", "tok/s", "held-out")
_BAR = range(8, 41)
_LONGEST_NAME = 24
_GAP = 2
# A log file wants some forty lines of a run, not a line for each record.
_PLAIN_LINES = 40
_UNKNOWN = "-"


@dataclass
class _Line:
    """One run, as far as it is known."""

    step: int = 0
    shown_at: int = -1
    trained_at: int = 0
    """Step that the numbers about training are of."""
    numbers: dict[str, float] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)

    def cells(self, total: int, left: float | None) -> dict[str, str]:
        cells = {"step": f"{self.step:,}/{total:,}"}
        for key, show in _SHOWN.items():
            cells[key] = show(self.numbers[key]) if key in self.numbers else _UNKNOWN
        if self.step >= total:
            cells["left"] = "done"
        else:
            cells["left"] = _UNKNOWN if left is None else duration(left)
        return cells


class Display:
    """Shows one or several runs of one schedule; hand it each record of their metrics.

    Args:
        tokens: Tokens that a run has been trained on after 0, 1, 2, ... and all of its steps.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokens: Sequence[int],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console = console or Console()
        self._tokens, self._total, self._clock = tokens, len(tokens) - 1, clock
        self._lines = {name: _Line() for name in names}
        self._live = (
            Live(get_renderable=self.frame, console=self.console, refresh_per_second=4)
            # A dumb terminal cannot draw in place.
            if self.console.is_terminal and not self.console.is_dumb_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def advance(self, name: str, step: int) -> None:
        """Tell that a run has finished a step."""
        line = self._lines[name]
        line.step = step
        line.pace.advance(self._tokens[step], self._clock())

    def record(self, name: str, record: Mapping[str, Any]) -> None:
        """Show the numbers of a record."""
        line = self._lines[name]
        known = _KEYS.get(record["kind"])
        if known is None:
            return
        if record["kind"] == "train":
            line.trained_at = record["step"]
        elif line.trained_at == 1 < record["step"]:
            # Where nothing is logged but the first step, its loss is not that of a later one.
            for stale in _KEYS["train"].values():
                line.numbers.pop(stale, None)
        for key, shown in known.items():
            if record.get(key) is not None:
                line.numbers[shown] = record[key]
        if self._live is None:
            self._plain_line(name, line, record)

    def say(self, text: RenderableType) -> None:
        """Print something above the live table."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def frame(self) -> Table:
        """Return the table as it is now, no wider than the terminal."""
        rows = {
            name: line.cells(self._total, self._left(line)) for name, line in self._lines.items()
        }
        known = [c for c in _COLUMNS if c != "MFU" or any(r[c] != _UNKNOWN for r in rows.values())]
        widths = {c: max(len(c), *(len(row[c]) for row in rows.values())) for c in known}
        # As wide as it will ever be: nothing moves when a digit is added.
        widths["step"] = max(4, len(f"{self._total:,}/{self._total:,}"))
        name_width = min(max(map(len, rows)), _LONGEST_NAME)
        columns, bar = _fit(widths, self.console.width - name_width)
        table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
        table.add_column(width=name_width, no_wrap=True)
        if bar:
            table.add_column(width=bar)
        for column in columns:
            table.add_column(width=widths[column], no_wrap=True, justify="right")
        heads = (Text(column, style="dim") for column in columns)
        table.add_row(*[""] * (2 if bar else 1), *heads)
        for name, line in self._lines.items():
            shown: list[RenderableType] = [Text(name, style="bold", overflow="ellipsis")]
            if bar:
                shown.append(ProgressBar(self._total, line.step, width=bar))
            table.add_row(*shown, *(rows[name][column] for column in columns))
        return table

    def _left(self, line: _Line) -> float | None:
        return line.pace.left(self._tokens[-1], self._clock())

    def _plain_line(self, name: str, line: _Line, record: Mapping[str, Any]) -> None:
        step = record["step"]
        at = step * _PLAIN_LINES // self._total
        if record["kind"] == "train" and line.shown_at == at:
            return
        line.shown_at = at
        left = self._left(line)
        told = [
            name.ljust(max(map(len, self._lines))),
            f"step {step:,}/{self._total:,}",
            summary(line.numbers),
        ]
        if left is not None and step < self._total:
            told.append(f"{duration(left)} left")
        self.console.print("  ".join(told), highlight=False, markup=False, soft_wrap=True)


def _fit(widths: Mapping[str, int], width: int) -> tuple[list[str], int]:
    """Return the columns that go into a width, and the width of the bar; 0 is no bar."""
    columns = list(widths)

    def room() -> int:
        return width - sum(_GAP + widths[column] for column in columns)

    if room() >= _GAP + _BAR.start:
        return columns, min(room() - _GAP, _BAR.stop - 1)
    for less in _LESS:
        if room() < 0 and less in columns:
            columns.remove(less)
    return columns, 0


# Of each kind of record, the numbers that are shown and the column of each.
_KEYS = {
    "train": {"loss": "loss", "grad_norm": "grad", "tokens_per_second": "tok/s", "mfu": "MFU"},
    "eval": {"loss": "held-out"},
}


def in_short(number: float) -> str:
    """Return a number with three digits and a letter: 12.3k, 4.56M."""
    if not math.isfinite(number):
        return str(number)
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # What rounds up to the letter has it: 999,700 is 1M, not 1e+03k.
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": "{:.3f}".format,
    "held-out": "{:.3f}".format,
    "grad": "{:.2f}".format,
    "tok/s": in_short,
    "MFU": "{:.0%}".format,
}


def summary(numbers: Mapping[str, float]) -> str:
    """Return the numbers of a run, by column, in one line."""
    told = {key: show(numbers[key]) for key, show in _SHOWN.items() if key in numbers}
    return "  ".join(
        f"{shown} {key}" if key == "tok/s" else f"{key} {shown}" for key, shown in told.items()
    )


def duration(seconds: float) -> str:
    """Return a time in words: 2h 05m, 3m 20s, 12s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"


def printable(text: str) -> str:
    """Return text that a terminal shows and never obeys: no escape sequences, no bells."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )

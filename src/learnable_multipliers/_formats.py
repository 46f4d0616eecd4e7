"""Format numbers and tables for output, messages and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence


def count(value: float) -> str:
    """Return a count with three significant digits and a letter: 12.3k, 4.56M, 30G."""
    if not math.isfinite(value):
        return str(value)
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # A number that rounds up to the next letter takes it: 999,700 is 1M, not 1e+03k.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time to the second, and hours to the minute: 2h 05m, 3m 20s, 12s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"


def size(num_bytes: float) -> str:
    """Return a number of bytes in binary units: 41.60 GiB, 12.5 MiB."""
    if num_bytes >= 2**28:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def aligned(table: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table, aligned right except for the columns with indices in `left`."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        for i in left:
            cells[i] = row[i].ljust(widths[i])
        lines.append("  ".join(cells).rstrip())
    return lines


def first_of(names: Sequence[str], most: int) -> str:
    """Return names with commas between them, or the first few: a, b and 3 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def one_line(error: Exception) -> str:
    """Return the message of an error in one line, shortened, or the error's type."""
    return " ".join(str(error).split())[:300] or type(error).__name__

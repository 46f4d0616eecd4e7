"""Time that is spent on one thing, while others go on in between."""

from __future__ import annotations

import time
from typing import Self


class Stopwatch:
    """Counts the seconds spent inside its context."""

    def __init__(self, seconds: float = 0.0):
        self._before = seconds
        self._since: float | None = None

    def __enter__(self) -> Self:
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._before = self.seconds
        self._since = None

    @property
    def seconds(self) -> float:
        """Seconds so far, those of a context still open included."""
        if self._since is None:
            return self._before
        return self._before + time.perf_counter() - self._since

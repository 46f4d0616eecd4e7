"""How fast a run has been of late, in tokens, and how long the rest of it takes at that pace.

Steps are no measure: while the batch ramps up, a step of the start is a fraction of a later one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY = 300.0
"""Seconds after which what was measured counts for 1/e of what is measured now."""
_AT_ONCE = 0.2
"""Most that one step makes forgotten: steps of many minutes are averaged too."""


@dataclass
class Pace:
    """Averages over the last minutes of this process; its first step is where it begins.

    So a resumed run is judged by what it does now, and a compilation, an evaluation or a
    checkpoint is forgotten soon after.
    """

    _mark: tuple[int, float] | None = None
    """Tokens and time of the last step."""
    _tokens: float = 0.0
    _seconds: float = 0.0

    def advance(self, tokens: int, now: float) -> None:
        """Tell how many tokens a run has been trained on after a step."""
        if self._mark is not None:
            done, seconds = tokens - self._mark[0], now - self._mark[1]
            # A rollback is no pace.
            if done > 0:
                kept = max(math.exp(-seconds / _MEMORY), 1 - _AT_ONCE)
                self._tokens = kept * self._tokens + done
                self._seconds = kept * self._seconds + seconds
        self._mark = tokens, now

    def left(self, total: int, now: float) -> float | None:
        """Return the seconds until `total` tokens; None before there is a pace."""
        if self._mark is None or not self._tokens:
            return None
        tokens, heard = self._mark
        to_go = (total - tokens) * self._seconds / self._tokens
        return max(to_go - (now - heard), 0.0)

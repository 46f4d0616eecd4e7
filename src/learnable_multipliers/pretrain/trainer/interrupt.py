"""Ctrl-C, SIGTERM and a lost terminal end a run after the step in hand, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""Comes when a terminal closes or a connection is lost; Windows has none."""


class Interrupt:
    """Within this context the first signal is noted; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python takes signals on its main thread alone; elsewhere the caller is in charge.
        if threading.current_thread() is threading.main_thread():
            numbers = [*_SIGNALS]
            # Under nohup a run is meant to outlive its terminal.
            if _HANGUP is not None and signal.getsignal(_HANGUP) is not signal.SIG_IGN:
                numbers.append(_HANGUP)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that Python did not set and cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

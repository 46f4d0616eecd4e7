"""Signals that end a run."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupt:
    """Ctrl-C, SIGTERM and a lost terminal end a run after the current step, with a checkpoint.

    Within this context the first signal is recorded; a second one ends the process at once.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python handles signals only on its main thread; elsewhere the caller is in charge.
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            # Windows has no SIGHUP; under nohup a run outlives its terminal.
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that Python did not set and cannot set again.
            signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

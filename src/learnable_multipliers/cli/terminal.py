"""An output that may go away while a run goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class SteadyOutput:
    """A stream that falls silent when nobody takes what is written any more.

    A pipe's reader has gone, or the terminal was closed: what a run is worth is in its files.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or not."""
        with self._told_to_nobody():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is held back, or not."""
        with self._told_to_nobody():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _told_to_nobody(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # What is still held back goes the same way, or Python would complain at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

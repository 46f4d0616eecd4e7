"""Output to a terminal or pipe that may be closed during a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class SteadyOutput:
    """A stream that discards output once its reader or terminal is gone; the run goes on."""

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

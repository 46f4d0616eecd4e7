"""Event files for TensorBoard, written synchronously.

torch's SummaryWriter writes from a separate thread. On a full disk that thread prints a traceback,
and the run notices it late or never.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.record_writer import RecordWriter


class EventFile:
    """A new event file in a folder.

    Args:
        purge_step: Readers drop events of earlier files from this step on.
    """

    def __init__(self, folder: Path, purge_step: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        # Readers recognize event files by name and read them in the order of names.
        self.path = folder / f"events.out.tfevents.{time.time():017.6f}"
        self._writer = RecordWriter(self.path.open("xb"))
        self._add(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        self._add(Event(step=step, summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

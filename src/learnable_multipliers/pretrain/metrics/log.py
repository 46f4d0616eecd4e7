"""The metrics of a run: a file of JSON lines, and TensorBoard, W&B or Trackio if enabled.

`metrics.jsonl` is the record: one JSON object per line with its checksum, flushed as it is written.
After a resume it equals that of a run that never stopped.

It stays bounded however long a run is. The newest records of a kind are kept as they are; of older
ones, those at every second, fourth, eighth, ... interval. Which ones is a function of their steps
alone, and what is kept at a step was kept at all earlier steps. So truncating a thinned file is the
same as thinning a truncated one, once the run is back at the step of the thinning.
"""

from __future__ import annotations

import importlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from learnable_multipliers._atomic import fsync, replace_file
from learnable_multipliers._checksum import decode_line, encode_line
from learnable_multipliers._serialization import to_dict, with_floats
from learnable_multipliers.pretrain.atomic_folder import make_folder

FILE_NAME = "metrics.jsonl"
NEWEST = {
    **{"train": 10_000, "eval": 10_000, "sample": 1000},
    # One of these has every matrix or every layer.
    **{"weights": 100, "health": 100, "signals": 100},
}
"""How many of the newest records of a kind are kept."""
_START = re.compile(rb'\{"step": (\d+), "kind": "(\w+)"')
Metrics = Mapping[str, Any]
Observer = Callable[[dict[str, Any]], None]
"""Called with every record of a run as it is written, and with warnings."""


class MetricLog:
    """The metrics of one run, in one folder. One process of a run keeps it.

    Args:
        folder: Folder of `metrics.jsonl`; its name is the name of the run.
        tensorboard: Also write event files to `folder/tensorboard`, if it is installed.
        wandb: Project to log to with Weights & Biases. `truncate_after` removes nothing there.
        trackio: Project to log to with Trackio; the same holds.
        intervals: Steps between two records of a kind, for the kinds that are thinned.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        tensorboard: bool = True,
        wandb: str = "",
        trackio: str = "",
        intervals: Mapping[str, int] | None = None,
        observer: Observer = lambda record: None,
    ):
        self.folder = Path(folder)
        make_folder(self.folder)
        self.path = self.folder / FILE_NAME
        if self.path.exists() and not self.path.is_file():
            # Opening a pipe would wait for its other end.
            raise ValueError(f"{self.path} is not a regular file: remove it")
        self._observer, self._intervals = observer, intervals or {}
        self._writer = self._event_writer() if tensorboard else None
        self._trackers: list[Any] = []
        for package, project in (("wandb", wandb), ("trackio", trackio)):
            if project:
                tracker = _tracker(package)
                own = {"id": self._wandb_id()} if package == "wandb" else {}
                name = self.folder.resolve().name
                tracker.init(project=project, name=name, resume="allow", **own)
                self._trackers.append(tracker)
        self._file = self.path.open("ab")
        # Without its folder entry on disk the file would be lost in a crash.
        fsync(self.folder)

    def log(self, step: int, metrics: Metrics) -> None:
        """Write metrics of a step: numbers, strings, lists, or mappings of these.

        NaN and infinities become the strings "nan", "inf" and "-inf", so that every line is valid
        JSON; `read_metrics` turns them back. Other places get the numbers only, those of a mapping
        under "kind/key".
        """
        record = {"step": step, **metrics}
        line = encode_line(to_dict(record))
        with self._writing(self.path):
            self._file.write(line)
            self._file.flush()
        self._check_present()
        kind = metrics.get("kind")
        if kind in NEWEST and self._intervals.get(kind):
            self._thin_out(kind, step)
        # Training and held-out loss are two curves.
        numbers = dict(_numbers(metrics, f"{kind}/" if isinstance(kind, str) else ""))
        if self._writer is not None:
            with self._writing(self._writer.path):
                self._writer.log(step, numbers)
        for tracker in self._trackers:
            tracker.log(numbers, step=step)
        self._observer(record)

    def truncate_after(self, step: int, *, has_more: bool = False) -> dict[str, Any] | None:
        """Drop all records after a step: a run that resumes from there writes them again.

        The file is replaced atomically, without a last line that a killed run left incomplete.
        Returns the last record that stays.

        Args:
            has_more: The run continues from here, so that a record of its end is dropped too.
        """
        kept, last = [], None
        for line, record in _lines(self.path):
            if record["step"] <= step and not (has_more and record.get("kind") == "end"):
                kept.append(line)
                last = record
        self._replace(kept)
        if self._writer is not None:
            self._writer.close()
            # Event files cannot be truncated; this makes readers drop later steps.
            self._writer = self._event_writer(purge_step=step + 1)
        return last

    def _thin_out(self, kind: str, newest: int) -> None:
        """Drop older records of a kind, if its newest step is due for thinning."""
        every, count = self._intervals[kind], NEWEST[kind]
        if newest % (every * count) or newest == every * count:
            return
        kept, first = [], None
        with self.path.open("rb") as file:
            for line in file:
                start = _START.match(line)
                if start and start[2].decode() == kind:
                    step = int(start[1])
                    first = step if first is None else first
                    if step != first and not is_kept(step, newest, every, count):
                        continue
                kept.append(line)
        self._replace(kept)

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Replace the file atomically and reopen it at its end."""
        with self._writing(self.path):
            replace_file(self.path, b"".join(lines))
        self._file.close()
        self._file = self.path.open("ab")

    def flush(self) -> None:
        """Flush every line to disk."""
        with self._writing(self.path):
            os.fsync(self._file.fileno())
        self._check_present()

    def close(self) -> None:
        """Flush and close all files."""
        try:
            with self._writing(self.path):
                self._file.close()
        finally:
            if self._writer is not None:
                with self._writing(self._writer.path):
                    self._writer.close()
            for tracker in self._trackers:
                tracker.finish()
            self._trackers = []

    def _check_present(self) -> None:
        """Raise an OSError if the file is no longer in its folder: its lines would be lost."""
        try:
            # The open file keeps its inode, so no other file can have it.
            present = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            present = False
        if not present:
            raise OSError(
                f"{self.path} is gone: its folder was removed, moved or replaced during the run"
            )

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Name the file in an error of the system."""
        try:
            yield
        except OSError as error:
            raise OSError(f"{path} could not be written: {error.strerror or error}") from error

    def _event_writer(self, purge_step: int | None = None) -> Any:
        """Return a new event file, or None where TensorBoard is not installed."""
        try:
            from learnable_multipliers.pretrain.metrics.events import EventFile
        except ImportError:
            return None
        with self._writing(self.folder / "tensorboard"):
            return EventFile(self.folder / "tensorboard", purge_step)

    def _wandb_id(self) -> str:
        """Return the run's id at W&B, the same after a resume."""
        path = self.folder / "wandb_id"
        if not path.exists():
            replace_file(path, f"{uuid.uuid4().hex[:12]}\n".encode())
        return path.read_text().strip()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`, or of the one in a folder.

    A last line that is cut off, as that of a run being written or killed, is left out.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"there are no metrics at {path}")
    return [with_floats(record) for _, record in _lines(path)]


def is_kept(step: int, newest: int, every: int, count: int) -> bool:
    """Return whether a record is kept when the newest one is of the step `newest`.

    The newest `count` are kept, and older ones on a stride that keeps about `count` of them.
    """
    if step > newest - every * count:
        return True
    stride = 1 << (newest // (every * count) - 1).bit_length()
    return step % (every * stride) == 0


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each complete line and its record."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = decode_line(line)
                int(record["step"])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                reason = error if type(error) is ValueError else "it has no step"
                raise ValueError(
                    f"line {number} of {path} is not a record that a run wrote ({reason}): remove "
                    "the line"
                ) from error
            yield line, record


def _numbers(metrics: Metrics, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, value


def _tracker(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"logging to {name} is enabled, but it is not installed: pip install {name}"
        ) from error

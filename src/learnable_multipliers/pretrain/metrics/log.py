"""The metrics of a run: a file of JSON lines, and TensorBoard, W&B or Trackio where asked for.

`metrics.jsonl` is the record: one JSON object per line, flushed as it is written. After a resume it
equals that of a run that never stopped.
"""

from __future__ import annotations

import importlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from learnable_multipliers.pretrain.checkpoint.atomic import make_folder, replace_file, sync
from learnable_multipliers.pretrain.serialization import NOT_FINITE, to_dict

FILE_NAME = "metrics.jsonl"
Metrics = Mapping[str, Any]
Observer = Callable[[dict[str, Any]], None]
"""Called with every record of a run as it is written, and with warnings."""


class MetricLog:
    """The metrics of one run, in one folder. One process of a run keeps it.

    Args:
        folder: Where `metrics.jsonl` lies; its name is the name of the run.
        tensorboard: Also write event files, to `folder/tensorboard`, if it is installed.
        wandb: Project to log to with Weights & Biases. `truncate_after` takes nothing back there.
        trackio: Project to log to with Trackio; the same holds.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        tensorboard: bool = True,
        wandb: str = "",
        trackio: str = "",
        observer: Observer = lambda record: None,
    ):
        self.folder = Path(folder)
        make_folder(self.folder)
        self.path = self.folder / FILE_NAME
        self._observer = observer
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
        sync(self.folder)

    def log(self, step: int, metrics: Metrics) -> None:
        """Write metrics of a step: numbers, strings, lists, or mappings of these.

        NaN and infinities become the strings "nan", "inf" and "-inf", so that every line is valid
        JSON; `read_metrics` turns them back. Other places get the numbers only, those of a mapping
        under "kind/key".
        """
        record = {"step": step, **metrics}
        line = json.dumps(to_dict(record), allow_nan=False) + "\n"
        with self._writing():
            self._file.write(line.encode())
            self._file.flush()
        self._check_present()
        # Training and held-out loss are two curves.
        kind = metrics.get("kind")
        numbers = dict(_numbers(metrics, f"{kind}/" if isinstance(kind, str) else ""))
        if self._writer is not None:
            for key, value in numbers.items():
                self._writer.add_scalar(key, value, step)
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
        with self._writing():
            replace_file(self.path, b"".join(kept))
        self._file.close()
        self._file = self.path.open("ab")
        if self._writer is not None:
            self._writer.close()
            # Event files cannot be truncated; this makes readers drop later steps.
            self._writer = self._event_writer(purge_step=step + 1)
        return last

    def flush(self) -> None:
        """Flush every line to disk."""
        with self._writing():
            os.fsync(self._file.fileno())
        self._check_present()

    def close(self) -> None:
        """Flush and close all files."""
        try:
            with self._writing():
                self._file.close()
        finally:
            if self._writer is not None:
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
                f"{self.path} is gone: its folder was removed, moved or replaced while the run "
                "went on. Put it back and continue from its newest checkpoint with --resume, or "
                "start again"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Add the file and what to do about it to an error of the system."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self.path} could not be written: {error.strerror or error}. Make room, "
                "then resume from the newest checkpoint with --resume"
            ) from error

    def _event_writer(self, purge_step: int | None = None) -> Any:
        """Return TensorBoard's writer, or None where it is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge_step)

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
    return [_with_floats(record) for _, record in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each complete line and its record."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                int(record["step"])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(
                    f"line {number} of {path} is not a record of metrics: fix or remove it"
                ) from error
            yield line, record


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value


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
            f"logging to {name} was asked for, but it is not installed: pip install {name}"
        ) from error

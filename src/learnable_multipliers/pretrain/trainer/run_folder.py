"""The folder of a run: one run's alone, and one process's at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.atomic import lock, make_folder, replace_file
from learnable_multipliers.pretrain.metrics.log import FILE_NAME as METRICS

DESCRIPTIONS = ("config.json", "environment.json", "plan.json", "tokenizer.json")
"""Files that tell what a run is, written when it begins."""
_LOCK = ".lock"


def checkpoint_folder(run: Path) -> Path:
    """Return where a run keeps its checkpoints."""
    return run / "checkpoints"


class RunFolder:
    """A folder, held until `close` or until the process is gone, however it went."""

    def __init__(self, path: Path, *, resume: bool):
        self.path, self.checkpoints = path, checkpoint_folder(path)
        self._lock: int | None = None
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file: choose another folder (--out)")
        if resume and not checkpoints.steps(self.checkpoints):
            raise checkpoints.CheckpointError(
                f"{path} holds no checkpoint to go on from: begin the run anew, without --resume "
                "and in an empty folder"
            )
        make_folder(path)
        self._hold()
        if not resume:
            try:
                refuse_another(path)
            except BaseException:
                self.close()
                raise

    @property
    def is_held(self) -> bool:
        """Whether other processes are kept out; not every file system can."""
        return self._lock is not None

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        self.close()

    def write(self, name: str, data: Any) -> None:
        """Write plain data as a JSON file."""
        text = data if isinstance(data, str) else json.dumps(data, indent=1)
        replace_file(self.path / name, (text + "\n").encode())

    def amend(self, name: str, section: str, data: Any) -> None:
        """Replace a section of a JSON file, if it is another."""
        path = self.path / name
        told = json.loads(path.read_bytes()) if path.exists() else None
        if isinstance(told, dict) and told.get(section) != data:
            self.write(name, told | {section: data})

    def _hold(self) -> None:
        (self.path / _LOCK).touch()
        try:
            self._lock = lock(self.path / _LOCK)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is training in {self.path}: wait for it or end it, or choose "
                "another folder (--out)"
            ) from error


def refuse_another(path: Path) -> None:
    """Keep a new run from mixing with what is in a folder."""
    metrics = path / METRICS
    if checkpoints.steps(checkpoint_folder(path)):
        raise ValueError(
            f"{path} holds a run already: go on with it (--resume), or choose another folder "
            "(--out)"
        )
    if metrics.exists() and metrics.stat().st_size:
        raise ValueError(
            f"{path} holds a run already, one that ended before its first checkpoint: choose "
            "another folder (--out), or remove it"
        )
    foreign = [name for name in DESCRIPTIONS if (path / name).exists()]
    # With metrics, though empty, these are of a run that failed before its first step.
    if foreign and not metrics.exists():
        raise ValueError(
            f"{path} is not a run's folder, and holds {', '.join(foreign)}, which a run would "
            "overwrite: choose another folder (--out)"
        )


def load_checkpoint(source: Path) -> tuple[checkpoints.Checkpoint, list[str]]:
    """Return one checkpoint, or the newest good one of a run and what is wrong with newer ones."""
    if (source / checkpoints.MANIFEST).is_file():
        return checkpoints.load(source), []
    if not (source / METRICS).is_file() and not (checkpoint_folder(source)).is_dir():
        raise ValueError(
            f"{source} is neither a run nor a checkpoint: give the folder that lrm train wrote "
            "(--out), or one of those in its checkpoints folder"
        )
    if not checkpoints.steps(checkpoint_folder(source)):
        raise ValueError(f"{source} holds no checkpoint yet: a run saves one when it ends or stops")
    return checkpoints.load_newest(checkpoint_folder(source))

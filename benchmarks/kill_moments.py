"""Where a process can be killed: before, after and in the midst of each thing it asks of files.

The trainer is unchanged: Python informs a profiler of every call into C, those to the
operating system among them; we count them within one method of the trainer, and at the given one
the process kills itself. Torn files come from the system: it ends a process whose file grows
beyond a limit, in the middle of the write.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from learnable_multipliers.pretrain.trainer.trainer import Trainer

Side = Literal["before", "after", "torn"]
METHODS = {"save": "save", "set-up": "_set_up"}
"""Phases of a run, and the methods of the trainer that they are."""
_OPERATIONS = {
    "posix": {"open", "close", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"}
    | {"scandir", "listdir", "truncate"},
    "io": {"open"},
    "_io": {"read", "readinto", "write", "writelines", "flush", "close", "__exit__"},
    "fcntl": {"flock"},
    "safetensors._safetensors_rust": {"serialize_file"},
}


@dataclass(frozen=True)
class Moment:
    """One moment in one process."""

    phase: str
    occurrence: int
    """Which save of the process, from 1 on."""
    operation: int
    """Which operation within it, from 1 on."""
    side: Side
    limit: int = 0
    """Torn: bytes after which a file is cut off."""
    file: str = ""
    """Torn: its name."""


@dataclass(frozen=True)
class Operation:
    """One operation, as a process that was not killed met it."""

    phase: str
    occurrence: int
    number: int
    call: str
    sizes: dict[str, int]
    """Bytes of each file being written, before the operation."""


def kill_at(moment: Moment, send: Callable[[str], object]) -> None:
    """Kill this process at a moment; `send` gets the place just before."""

    def on_operation(number: int, call: str, side: str) -> None:
        if number != moment.operation:
            return
        if side == moment.side:
            send(f"{side} {call}")
            os.kill(os.getpid(), signal.SIGKILL)
        if moment.side == "torn" and side == "before":
            send(f"within {moment.file}")
            # Python ignores SIGXFSZ; now the system ends the process that writes on.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (moment.limit, resource.RLIM_INFINITY))

    _watch(
        moment.phase,
        lambda occurrence: on_operation if occurrence == moment.occurrence else None,
    )


def record(
    found: list[Operation], checkpoints: Path, own: Callable[[str], bool] = lambda name: True
) -> None:
    """Note every operation of every phase of this process; `own` are the files it writes."""
    for phase in METHODS:

        def follow(occurrence: int, phase: str = phase) -> Callable[[int, str, str], None]:
            def on_operation(number: int, call: str, side: str) -> None:
                if side == "before":
                    files = [file for file in checkpoints.glob(".step-*/*") if own(file.name)]
                    sizes = {file.name: file.stat().st_size for file in files}
                    found.append(Operation(phase, occurrence, number, call, sizes))

            return on_operation

        _watch(phase, follow)


def moments(found: list[Operation]) -> list[Moment]:
    """Return the moments before and after each operation, in order."""
    return [
        Moment(one.phase, one.occurrence, one.number, side)
        for one in found
        for side in ("before", "after")
    ]


def torn_files(found: list[Operation]) -> dict[tuple[int, str], tuple[Operation, int]]:
    """Return, by save and file, the last operation before the file is there, and its full size."""
    torn: dict[tuple[int, str], tuple[Operation, int]] = {}
    for before, after in zip(found, found[1:], strict=False):
        for name, size in after.sizes.items():
            key = after.occurrence, name
            if key in torn:
                torn[key] = (torn[key][0], max(torn[key][1], size))
            elif before.occurrence == after.occurrence and not before.sizes.get(name):
                torn[key] = (before, size)
    return torn


def _watch(phase: str, follow: Callable[[int], Callable[[int, str, str], None] | None]) -> None:
    """Tell of each file operation within a phase: its number, its name, and before or after it."""
    method = getattr(Trainer, METHODS[phase])
    occurrences = 0

    def watched(self: Trainer, *arguments: Any) -> Any:
        nonlocal occurrences
        occurrences += 1
        on_operation = follow(occurrences)
        if on_operation is None:
            return method(self, *arguments)
        number = 0

        def profile(_: Any, event: str, function: Any) -> None:
            nonlocal number
            if not event.startswith("c_") or not _is_file_operation(function):
                return
            if event == "c_call":
                number += 1
                on_operation(number, function.__name__, "before")
            else:
                on_operation(number, function.__name__, "after")

        sys.setprofile(profile)
        try:
            return method(self, *arguments)
        finally:
            sys.setprofile(None)

    setattr(Trainer, METHODS[phase], watched)


def _is_file_operation(function: Any) -> bool:
    module = getattr(function, "__module__", None)
    # Methods have no module of their own; the file they belong to has a type.
    module = module or type(getattr(function, "__self__", None)).__module__
    return function.__name__ in _OPERATIONS.get(module, ())

"""`lrm` in processes forked from one that has imported everything: a cold start takes seconds."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from learnable_multipliers.cli import main as lrm

CRASHED = 70
"""The exit code of a process that ended with a traceback."""
Tell = Callable[[str], None]
"""A word from a process to its parent."""
Prepare = Callable[[Tell], Callable[[], None]]
"""Called in a process before the command; what it returns is called after it."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Less than 0: by that signal."""
    told: str
    seconds: float
    hung: bool = False
    """It did not end in time, and was killed."""


def process(
    arguments: list[str], output: Path, prepared: Prepare, kill_after: float | None
) -> Ended:
    """Run `lrm` in a process of its own, killed after some seconds unless it ended before."""
    (ended,) = processes(arguments, output, prepared, kill_after)
    return ended


def processes(
    arguments: list[str],
    output: Path,
    prepared: Prepare,
    kill_after: float | None,
    environments: Sequence[Mapping[str, str]] = ({},),
    victims: Sequence[int] = (0,),
    patience: float | None = None,
) -> list[Ended]:
    """Run one command in several processes, of which some are killed unless one ended before.

    Args:
        environments: Variables of each process.
        victims: Which of them are killed.
        patience: Seconds that the others have after the first has ended; None is forever.
    """
    start = time.perf_counter()
    started = [start_one(arguments, output, prepared, more) for more in environments]
    # The end of a process is the end of its pipe.
    readers = [reader for _, reader in started]
    if not select.select(readers, [], [], kill_after)[0]:
        for victim in victims:
            os.kill(started[victim][0], signal.SIGKILL)
    deadline = None if patience is None else time.perf_counter() + patience
    return [_wait(child, reader, start, deadline) for child, reader in started]


def start_one(
    arguments: list[str], output: Path, prepared: Prepare, environment: Mapping[str, str]
) -> tuple[int, int]:
    """Return a new process and the pipe it tells through."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.environ.update(environment)
        _become(arguments, output, prepared, lambda text: _write(writer, text))
    os.close(writer)
    return child, reader


def _wait(child: int, reader: int, start: float, deadline: float | None) -> Ended:
    told, hung = b"", False
    while True:
        left = None if deadline is None else max(0, deadline - time.perf_counter())
        if not select.select([reader], [], [], left)[0]:
            # Its stack goes to its output.
            os.kill(child, signal.SIGABRT)
            deadline, hung = None, True
        elif part := os.read(reader, 1 << 16):
            told += part
        else:
            break
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(code, told.decode(), time.perf_counter() - start, hung)


def _write(descriptor: int, text: str) -> None:
    left = text.encode()
    while left:
        left = left[os.write(descriptor, left) :]


def _become(arguments: list[str], output: Path, prepared: Prepare, tell: Tell) -> NoReturn:
    """Be the command, from here to the end of the process."""
    code: object = CRASHED
    try:
        code = _exit_code(arguments, output, prepared, tell)
        # The end of an interpreter waits for threads.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        sys.stdout.flush()
    except BaseException:
        code = CRASHED
        traceback.print_exc()
    finally:
        # Whatever happens, never back into what the parent was doing.
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _exit_code(arguments: list[str], output: Path, prepared: Prepare, tell: Tell) -> object:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    faulthandler.enable()
    sys.argv = ["lrm", *arguments]
    finish = prepared(tell)
    try:
        lrm(arguments)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    finish()
    return 0

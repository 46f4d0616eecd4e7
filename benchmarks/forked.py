"""Run `lrm` in forked processes, which skips the seconds of importing everything."""

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
Send = Callable[[str], None]
"""Sends text from a process to its parent."""
Prepare = Callable[[Send], Callable[[], None]]
"""Called in a process before the command; returns a function to call after it."""


@dataclass(frozen=True)
class ProcessResult:
    """How a process ended."""

    code: int
    """Negative: minus the number of the signal that ended it."""
    message: str
    """Everything it sent to its parent."""
    seconds: float
    hung: bool = False
    """Whether it did not end in time and was killed."""


def process(
    arguments: list[str], output: Path, prepared: Prepare, kill_after: float | None
) -> ProcessResult:
    """Run `lrm` in a new process; kill it after some seconds unless it has ended."""
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
) -> list[ProcessResult]:
    """Run one command in several processes; kill the victims after some seconds.

    Nothing is killed if a process has ended before.

    Args:
        environments: Variables of each process.
        victims: Indices of the processes to kill.
        patience: Timeout in seconds for the others, after the first has ended; None waits forever.
    """
    start = time.perf_counter()
    started = [start_one(arguments, output, prepared, more) for more in environments]
    # A pipe is closed when its process ends.
    readers = [reader for _, reader in started]
    if not select.select(readers, [], [], kill_after)[0]:
        for victim in victims:
            os.kill(started[victim][0], signal.SIGKILL)
    deadline = None if patience is None else time.perf_counter() + patience
    return [_wait(child, reader, start, deadline) for child, reader in started]


def start_one(
    arguments: list[str], output: Path, prepared: Prepare, environment: Mapping[str, str]
) -> tuple[int, int]:
    """Return a new process and the pipe that it sends through."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.environ.update(environment)
        _exec_command(arguments, output, prepared, lambda text: _write(writer, text))
    os.close(writer)
    return child, reader


def _wait(child: int, reader: int, start: float, deadline: float | None) -> ProcessResult:
    received, hung = b"", False
    while True:
        left = None if deadline is None else max(0, deadline - time.perf_counter())
        if not select.select([reader], [], [], left)[0]:
            # It prints its stack to its output.
            os.kill(child, signal.SIGABRT)
            deadline, hung = None, True
        elif part := os.read(reader, 1 << 16):
            received += part
        else:
            break
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ProcessResult(code, received.decode(), time.perf_counter() - start, hung)


def _write(descriptor: int, text: str) -> None:
    left = text.encode()
    while left:
        left = left[os.write(descriptor, left) :]


def _exec_command(arguments: list[str], output: Path, prepared: Prepare, send: Send) -> NoReturn:
    """Run the command and end the process."""
    code: object = CRASHED
    try:
        code = _exit_code(arguments, output, prepared, send)
        # As the interpreter does at its end, wait for threads.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        sys.stdout.flush()
    except BaseException:
        code = CRASHED
        traceback.print_exc()
    finally:
        # Never return into the code of the parent.
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _exit_code(arguments: list[str], output: Path, prepared: Prepare, send: Send) -> object:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    faulthandler.enable()
    sys.argv = ["lrm", *arguments]
    finish = prepared(send)
    try:
        lrm(arguments)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    finish()
    return 0

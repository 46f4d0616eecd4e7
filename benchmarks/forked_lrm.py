"""`lrm` in a forked process: everything is imported once, a command then starts in milliseconds."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch._dynamo  # noqa: F401 - loaded when torch is first used: before the fork

from learnable_multipliers.cli import main as lrm

Prepare = Callable[[], Callable[[], None]]
"""Called in the new process before the command; what it returns, after a command that ended."""


def start(arguments: list[str], stdout: Path, stderr: Path, prepare: Prepare) -> int:
    """Start `lrm` with output appended to files; return the id of its process."""
    # What is buffered here would be written there too.
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become(arguments, stdout, stderr, prepare)
    return child


def _become(arguments: list[str], stdout: Path, stderr: Path, prepare: Prepare) -> NoReturn:
    """Be the command, from here to the end of the process."""
    code: object = 70
    try:
        for standard, path in ((1, stdout), (2, stderr)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), standard)
        sys.argv = ["lrm", *arguments]
        finish = prepare()
        lrm(arguments)
        finish()
        code = 0
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # As the interpreter does when it ends: a thread may go on.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)

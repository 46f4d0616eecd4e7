"""One command in a process of its own: in a copy of the inputs, with limits and without network."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import forked
import torch._dynamo  # noqa: F401 - loaded when torch is first used: before the fork

import learnable_multipliers
from learnable_multipliers.cli import demo
from learnable_multipliers.cli.train import configure
from learnable_multipliers.pretrain.data import documents
from learnable_multipliers.pretrain.preflight import resume_check
from learnable_multipliers.pretrain.recipes import RECIPES

LIMIT = 30.0
"""Seconds after which a command hangs."""
LONG = 4.0
"""Seconds after which a run that makes progress is interrupted, as by Ctrl-C."""
_MEMORY, _FILE, _THREADS = 4 << 30, 64 << 20, 400
_NOBODY = 65534


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Less than 0: by that signal."""
    stdout: str
    stderr: str
    seconds: float
    interrupted: bool = False
    hung: bool = False


def may_drop_privileges() -> bool:
    """Return whether children can run as nobody: only then is it safe to name devices to root."""
    if os.geteuid() != 0:
        return False
    child = os.fork()
    if child == 0:
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
        sources = [
            Path(learnable_multipliers.__file__),
            Path(os.__file__),
            Path(forked.__file__),
        ]
        os._exit(0 if all(os.access(path, os.R_OK) for path in sources) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def prepare_process(small: Sequence[str], library: Path) -> None:
    """Make commands of this process, and of those forked from it, small and independent of it.

    The recipe tiny is a small one, the standard library is a folder of small files, and `lrm
    verify-resume` forks instead of starting Python three times. All else is as users run it.
    """
    tiny = configure(["tiny", *small])
    tiny = replace(tiny, data=replace(tiny.data, path=None))
    demo.RECIPES = {"tiny": ("", tiny)}  # pyright: ignore[reportAttributeAccessIssue]
    # With the usual log: its flags are those of the usual recipe.
    RECIPES["tiny"] = ("small hybrid", replace(tiny, log=RECIPES["tiny"][1].log))
    documents._standard_library = lambda: iter(sorted(library.iterdir()))
    resume_check.get_context = lambda name: multiprocessing.get_context("fork")  # pyright: ignore[reportAttributeAccessIssue]

    def no_network(self: object, address: object) -> NoReturn:
        raise OSError("no network here")

    socket.socket.connect = no_network  # pyright: ignore[reportAttributeAccessIssue]


def run(
    words: Sequence[str],
    here: Path,
    *,
    as_nobody: bool,
    may_be_long: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run `lrm` in a folder; one that takes longer than it may is interrupted or killed."""
    outputs = [here.parent / name for name in ("stdout", "stderr")]
    for path in outputs:
        path.write_bytes(b"")
    start = time.perf_counter()
    child, pipe = forked.start_one(
        list(words), outputs[0], lambda send: _confine(here, outputs[1], as_nobody), {}
    )
    os.close(pipe)
    code = hung = None
    interrupted = 0
    while code is None:
        code = _wait(child, 0.2 if time.perf_counter() - start < LONG else 0.5)
        seconds = time.perf_counter() - start
        if code is not None:
            break
        if seconds > LIMIT:
            hung = True
            _signal(child, signal.SIGKILL)
            code = _wait(child, None)
        elif seconds > LONG and may_be_long():
            # The first ends a run after its step, the second at once.
            interrupted += 1
            _signal(child, signal.SIGINT)
    # What the command may have started.
    _signal(child, signal.SIGKILL)
    text = [path.read_text(encoding="utf8", errors="backslashreplace") for path in outputs]
    return Ended(code, *text, time.perf_counter() - start, interrupted > 0, bool(hung))


def _wait(child: int, seconds: float | None) -> int | None:
    """Wait for a process, at most some seconds; return its exit code if it ended."""
    until = None if seconds is None else time.perf_counter() + seconds
    pause = 0.002
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if until is not None and time.perf_counter() > until:
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _confine(here: Path, stderr: Path, as_nobody: bool) -> Callable[[], None]:
    """Confine this process to a folder."""
    os.setpgid(0, 0)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(here)
    os.environ |= {
        "HOME": str(here / "home"),
        "LRM_CACHE": str(here / "cache"),
        "TMPDIR": str(here / "tmp"),
        "COLUMNS": "80",
    }
    tempfile.tempdir = None
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limits = {resource.RLIMIT_AS: mapped + _MEMORY, resource.RLIMIT_FSIZE: _FILE}
    limits |= {resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: _THREADS}
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if as_nobody:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    return lambda: None


def copy_inputs(inputs: Path, target: Path, *, as_nobody: bool) -> Path:
    """Copy the folder of inputs; return where commands run in it."""
    shutil.copytree(inputs, target, symlinks=True, copy_function=_copy)
    if as_nobody:
        for path in (target, *_below(target)):
            os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
    return target / "here"


def _copy(source: str, target: str) -> None:
    if Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copyfile(source, target, follow_symlinks=False)


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        yield from (Path(root, name) for name in (*folders, *names))


def remove(folder: Path) -> None:
    """Remove a folder, also one that was made unreadable."""
    for root, folders, _ in os.walk(folder):
        for name in folders:
            if not (path := Path(root, name)).is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder)

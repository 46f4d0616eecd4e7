"""`lrm train` in one process or on two ranks, of which some are killed; what is left must end.

Two ranks are forked with the variables of torchrun, or started by torchrun itself. Then this file
is the program of each rank. Linux only: processes whose parent was killed become our children.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from forked import CRASHED, ProcessResult, Send, processes
from kill_moments import Moment, Operation, kill_at, record

from learnable_multipliers._atomic import replace_file
from learnable_multipliers.cli import main as lrm

Launcher = Literal["alone", "ranks", "torchrun"]
RANKS = 2
TIMEOUT = 10.0
"""Seconds that a rank waits for the other."""
PATIENCE = 3 * TIMEOUT + 5
"""Seconds after which what a kill has left counts as hung: torch tries twice to connect."""
TORCHRUN_PATIENCE = 28.0
"""The same under torchrun, which kills it after 30."""
COLD = 120.0
"""The longest start of torchrun and its ranks, in seconds."""
_FOLDER, _KILL = "KILL_FOLDER", "KILL_AT"


@dataclass(frozen=True)
class Victim:
    """The processes that a kill ends."""

    ranks: tuple[int, ...] = (0,)
    launcher: bool = False

    @property
    def name(self) -> str:
        """The word for them."""
        return "rank" if len(self.ranks) == 1 else "group" if self.ranks else "launcher"


VICTIMS: dict[Launcher, list[Victim]] = {
    "alone": [Victim()],
    "ranks": [Victim((0,)), Victim((1,)), Victim((0, 1))],
    "torchrun": [
        Victim((0,)),
        Victim((1,)),
        Victim((0, 1), launcher=True),
        Victim((), launcher=True),
    ],
}


@dataclass(frozen=True)
class Kill:
    """Who is killed, and when: at a moment, or after some seconds."""

    victim: Victim
    moment: Moment | None = None
    after: float | None = None


def run(
    launcher: Launcher,
    arguments: list[str],
    output: Path,
    kill: Kill | None = None,
    recorded: Path | None = None,
) -> ProcessResult:
    """Run `lrm` until all of its processes have ended; the code is less than 0 if one was killed.

    Args:
        recorded: A folder of checkpoints; each rank sends its file operations, in a line.
    """
    output.write_text("")
    if launcher == "torchrun":
        return _torchrun(arguments, output, kill)
    each = _forked(1 if launcher == "alone" else RANKS, arguments, output, kill, recorded)
    orphans = _reap(PATIENCE)
    codes = [one.code for one in each]
    # A rank that lost another ends with a message and code 1.
    wrong = max(codes) if max(codes) > 1 else 0
    return ProcessResult(
        code=wrong or min(codes) or max(codes),
        message="\n".join(one.message for one in each if one.message),
        seconds=max(one.seconds for one in each),
        hung=orphans.hung or any(one.hung for one in each),
    )


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0):
        raise OSError("prctl failed")


# -- forked ranks ------------------------------------------------------------------------------


def _forked(
    ranks: int, arguments: list[str], output: Path, kill: Kill | None, recorded: Path | None
) -> list[ProcessResult]:
    def prepared(send: Send) -> Callable[[], None]:
        found: list[Operation] = []
        rank = int(os.environ.get("RANK", 0))
        if kill is not None and kill.moment is not None and rank in kill.victim.ranks:
            kill_at(kill.moment, send)
        if recorded is not None:
            record(found, recorded, own=lambda name: _rank_of(name) == rank)
        return lambda: send(json.dumps([asdict(one) for one in found]))

    environments = [{}] if ranks == 1 else _environments(ranks)
    victims = kill.victim.ranks if kill is not None else ()
    after = kill.after if kill is not None else None
    return processes(arguments, output, prepared, after, environments, victims, PATIENCE)


def _environments(ranks: int) -> list[Mapping[str, str]]:
    port = _free_port()
    sizes = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return [{"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", **sizes, **place} for rank in range(ranks)]


def _free_port() -> int:
    """Return a port that the system gives to no one who asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _rank_of(file: str) -> int:
    """Return who writes a file of a checkpoint."""
    digits = file.partition(".")[0].rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


# -- torchrun ----------------------------------------------------------------------------------


def _torchrun(arguments: list[str], output: Path, kill: Kill | None) -> ProcessResult:
    folder = output.parent / "torchrun"
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    at = [kill.victim.ranks[0], asdict(kill.moment)] if kill and kill.moment else None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", f"{RANKS}", str(Path(__file__).resolve()), *arguments]
    launcher = os.posix_spawn(
        sys.executable,
        command,
        os.environ | {"OMP_NUM_THREADS": "1", _FOLDER: str(folder), _KILL: json.dumps(at)},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_APPEND, 0),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    pids = [folder / f"pid-{rank}" for rank in range(RANKS)]
    _sleep(COLD, unless=lambda: all(file.exists() for file in pids) or _is_over(launcher))
    start = time.perf_counter()
    if kill and kill.after is not None:
        _sleep(kill.after, unless=lambda: _is_over(launcher))
        victims = [int(pids[rank].read_text()) for rank in kill.victim.ranks if pids[rank].exists()]
        for victim in [*victims, *[launcher] * kill.victim.launcher]:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
    # A run that nobody or only torchrun is killed of goes on.
    patience = TORCHRUN_PATIENCE if kill and kill.after is not None and kill.victim.ranks else COLD
    rest, end = _reap(patience), time.time()
    code = rest.codes[launcher]
    deaths = [*folder.glob("message-*")]
    # torchrun has ended with 1 if a rank was killed.
    killed = code < 0 or (code == 1 and (deaths or (kill and kill.after is not None)))
    return ProcessResult(
        code=CRASHED if [*folder.glob("crashed-*")] else -signal.SIGKILL if killed else code,
        message="".join(file.read_text() for file in deaths),
        seconds=time.perf_counter() - start,
        hung=rest.hung or any(end - file.stat().st_mtime > TORCHRUN_PATIENCE for file in deaths),
    )


def _be_a_rank() -> None:
    """Be the program that torchrun starts."""
    folder, rank = Path(os.environ[_FOLDER]), int(os.environ["RANK"])
    at = json.loads(os.environ[_KILL])
    if at is not None and at[0] == rank:
        kill_at(Moment(**at[1]), (folder / f"message-{rank}").write_text)
    replace_file(folder / f"pid-{rank}", f"{os.getpid()}".encode())
    try:
        lrm(sys.argv[1:])
    except Exception:
        (folder / f"crashed-{rank}").touch()
        raise


# -- children ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reaped:
    """How all processes below this one have ended."""

    codes: dict[int, int]
    hung: bool
    """Some did not end in time, and were killed."""


def _reap(patience: float) -> Reaped:
    """Wait for all processes below this one; kill what has not ended then."""
    codes, hung, deadline = {}, False, time.perf_counter() + patience
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return Reaped(codes, hung)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.perf_counter() < deadline:
            time.sleep(0.005)
        else:
            hung = True
            # When these have ended, those below them are children of ours.
            for child in _children():
                os.kill(child, signal.SIGKILL)
            time.sleep(0.1)


def _children() -> list[int]:
    own = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


def _is_over(child: int) -> bool:
    """Return whether a child has ended, and leave it to be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _sleep(seconds: float, unless: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline and not unless():
        time.sleep(0.005)


if __name__ == "__main__":
    _be_a_rank()

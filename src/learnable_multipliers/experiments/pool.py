"""Worker processes as their parent sees them: started when needed, replaced when they die."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self

from learnable_multipliers.experiments.record import Record
from learnable_multipliers.experiments.worker import TERMINAL_SIGNALS, Failure, Job, work

# A fork would share a CUDA context and the threads of torch.
_SPAWN = multiprocessing.get_context("spawn")
_JOIN_TIMEOUT = 10.0
"""Seconds that an idle process has to end by itself."""


class Worker:
    """One process, and the job it has."""

    def __init__(self, scratch: Path, num_threads: int):
        self.job: Job | None = None
        self.compiled: object = None
        """What the process has compiled its code for."""
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=work, args=(theirs, scratch, num_threads), daemon=True)
        with _without_signals():
            self.process.start()
        # The process holds the only copy: its end is the end of the connection.
        theirs.close()

    def submit(self, job: Job) -> None:
        """Send a job to the process."""
        self.job, self.compiled = job, job.compiled
        # A process that is dead already is noticed when its result is awaited.
        with suppress(BrokenPipeError):
            self.connection.send(job)

    def result(self) -> Record | Failure:
        """Return what has become of the job; the process has sent it, or died."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Failure(_death(self.process.exitcode or 0))

    def end(self) -> None:
        """End the process; one with a job is killed, there is nothing for it to save."""
        self.connection.close()
        if self.job is None:
            # Killed, it would leave what the compiler shares with its own processes.
            self.process.join(_JOIN_TIMEOUT)
        self.process.kill()
        self.process.join()


class Workers:
    """Up to `count` workers."""

    def __init__(self, scratch: Path, count: int, num_threads: int):
        self._scratch, self._count, self._num_threads = scratch, count, num_threads
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    @property
    def busy(self) -> list[Job]:
        """The jobs that are being trained."""
        return [worker.job for worker in self._workers if worker.job is not None]

    def idle(self) -> Iterator[Worker]:
        """Yield the workers without a job, then new ones while there is room for them."""
        yield from [worker for worker in self._workers if worker.job is None]
        while len(self._workers) < self._count:
            self._workers.append(Worker(self._scratch, self._num_threads))
            yield self._workers[-1]

    def completed(self, timeout: float) -> Iterator[tuple[Job, Record | Failure]]:
        """Wait for a while; yield the jobs that ended meanwhile, and their records or failures."""
        busy = {worker.connection: worker for worker in self._workers if worker.job is not None}
        for connection in wait(list(busy), timeout):
            worker = busy[connection]  # pyright: ignore[reportArgumentType]
            job, outcome = worker.job, worker.result()
            assert job is not None
            worker.job = None
            if isinstance(outcome, Failure):
                self._workers.remove(worker)
                worker.end()
            yield job, outcome


@contextmanager
def _without_signals() -> Iterator[None]:
    """Block signals: a process inherits that, and a Ctrl-C finds it deaf from the start."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Started by the first process, it would unblock signals again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _death(code: int) -> str:
    if code == -signal.SIGKILL:
        return (
            "its process was killed (SIGKILL), perhaps by the system for want of memory: fewer "
            "--jobs need less"
        )
    return f"its process died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"

"""Four ranks that run functions of tests: processes of this machine that speak by gloo.

They are started once and shared, because starting costs more than most tests.
"""

import contextlib
import gc
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUMBER = 4
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "learnable_multipliers"]
AXES = {
    "DDP": {"data": 4},
    "FSDP": {"shard": 4},
    "HSDP": {"data": 2, "shard": 2},
    "FSDP x TP": {"shard": 2, "tensor": 2},
    "DDP x TP": {"data": 2, "tensor": 2},
}
"""Ways to lay a run out on four ranks."""
PATIENCE = 120
"""Seconds after which ranks are taken to wait for each other forever."""


class Ranks:
    """Runs functions on all ranks at once."""

    def __init__(self, number=NUMBER):
        self._number = number
        self._processes, self._pipes, self._folder = [], [], None

    def run(self, function, *arguments):
        """Run `function(*arguments)` on every rank; return what it returns on each.

        Seen once, on a busy machine: glibc found the heap of a rank damaged and ended it, which
        nothing in Python does. Then all ranks run once more: what crashes by itself crashes again.
        """
        for is_last in (False, True):
            try:
                if not self._processes:
                    self._start()
                return self._run(function, arguments)
            except BaseException:
                killed = self._killed()
                # A start that failed halfway, a rank that died, or others that wait for this one.
                self.stop()
                if is_last or not killed:
                    raise
                print(f"ranks {killed} were ended by a signal: once more", file=sys.stderr)
        raise AssertionError("not reached")

    def _killed(self):
        """Return the ranks that a signal has ended; of those that wait for them none has."""
        for process in self._processes:
            process.join(0.2)
        return [rank for rank, each in enumerate(self._processes) if (each.exitcode or 0) < 0]

    def _run(self, function, arguments):
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = [None] * self._number
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(waiting, PATIENCE)
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} wait for the others")
            for pipe in ready:
                rank = waiting.pop(pipe)
                error, results[rank] = pipe.recv()
                if error is not None:
                    raise AssertionError(f"rank {rank}: {error}")
        return results

    def stop(self):
        """End the processes; the next run starts new ones."""
        for process in self._processes:
            process.terminate()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self):
        # Forked from a process that has these imported and has never run anything.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # A file to meet at: unlike a port, nothing else can take it.
        self._folder = tempfile.TemporaryDirectory()
        meet = Path(self._folder.name) / "meet"
        for rank in range(self._number):
            pipe, far_end = context.Pipe()
            self._pipes.append(pipe)
            process = context.Process(
                target=_serve, args=(rank, self._number, meet, far_end), daemon=True
            )
            process.start()
            # Only the rank has it now: one that dies is noticed.
            far_end.close()
            self._processes.append(process)


def _serve(rank, number, meet, pipe):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=number)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            torch.manual_seed(0)
            try:
                pipe.send((None, function(*arguments)))
            except BaseException:
                pipe.send((traceback.format_exc(), None))
            # Threads of process groups end with the last model that refers to them.
            gc.collect()

"""A process that trains runs, one after another, and hands their records back."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from learnable_multipliers.experiments.record import Record, summarize
from learnable_multipliers.experiments.run import Run
from learnable_multipliers.experiments.scores import requests_of, scores
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.trainer.run_folder import commit
from learnable_multipliers.pretrain.trainer.spikes import DivergenceError
from learnable_multipliers.pretrain.trainer.trainer import Trainer

TERMINAL_SIGNALS = {
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
}
"""What a terminal or a scheduler sends to a whole group of processes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to train, with its data and device filled in."""

    experiment: str
    """The first one with this run; its file gets the record."""
    run: Run
    ledger: dict[str, str]
    """Claim -> hash of its definition."""
    requests: Path | None = None
    """Benchmark requests for the trained model."""

    @property
    def compiled(self) -> tuple[object, ...]:
        """What compiled code depends on: jobs that share it share the code; nothing on a CPU."""
        config = self.run.config
        if config.runtime.device == "cpu" and config.runtime.compile != "on":
            return ()
        data = replace(config.data, path=None)
        return (config.model, data, config.z_loss)


@dataclass(frozen=True)
class Failure:
    """Why there is no record of a run."""

    text: str


_commit = cache(commit)
"""Asked of git once."""


def work(connection: Connection, scratch: Path, num_threads: int) -> None:
    """Train the jobs that come over a connection; each is answered by a record or a failure.

    A failure may leave the device unusable, so it ends the process.

    Args:
        scratch: Folder for the runs, removed if the parent process is gone.
        num_threads: CPU threads.
    """
    # It takes a second, which the parent does without.
    from torch._dynamo import config as compiler

    # The parent gets them too, and ends its workers.
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(scratch,), daemon=True).start()
    torch.set_num_threads(num_threads)
    # Past its limit of variants the compiler would quietly leave code uncompiled.
    compiler.fail_on_recompile_limit_hit = True
    compiled = None
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        if job.compiled != compiled:
            # Variants of the last job count towards the limit.
            torch.compiler.reset()
            compiled = job.compiled
        try:
            connection.send(train(job, scratch / str(os.getpid())))
        except Exception as error:
            connection.send(Failure(f"{type(error).__name__}: {error}"))
            return
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def train(job: Job, folder: Path) -> Record:
    """Train a run in a folder, which is removed, and return its record."""
    began = time.perf_counter()
    config: TrainConfig = replace(job.run.config, out=folder, resume=False)
    try:
        with closing(Trainer(config)) as trainer:
            outcome = _outcome(trainer)
            requests = requests_of(job.requests) if job.requests is not None else None
            scored = scores(trainer, requests) if requests and outcome == "finished" else {}
        return summarize(
            folder,
            job.run.config,
            outcome=outcome,
            readings=trainer.monitor.health().readings,
            ledger=job.ledger,
            seconds=time.perf_counter() - began,
            device=trainer.device.name,
            data=trainer.data.fingerprint,
            commit=_commit(),
            benchmarks=scored,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(trainer: Trainer) -> str:
    """Train to the last step, and not beyond: nothing would read the checkpoint of the end."""
    try:
        for step in trainer.steps():
            if step == len(trainer.schedule):
                break
    except DivergenceError:
        return "diverged"
    return "finished" if trainer.divergence() is None else "diverged"


def _end_with_parent(scratch: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)

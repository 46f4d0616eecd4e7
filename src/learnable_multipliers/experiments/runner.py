"""Trains the runs of experiments that have no record yet, in worker processes.

A record is written when its run ends, so a stopped command resumes where it was, and a run that
several experiments ask for is trained once.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from learnable_multipliers._serialization import to_dict
from learnable_multipliers.experiments import catalogue
from learnable_multipliers.experiments.pool import Workers
from learnable_multipliers.experiments.record import Record, append
from learnable_multipliers.experiments.run import Preset, Run
from learnable_multipliers.experiments.worker import Failure, Job
from learnable_multipliers.pretrain.atomic_folder import lock, make_folder
from learnable_multipliers.pretrain.cores import num_cores
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.trainer.interrupt import Interrupt

GPU_JOBS = 3
"""Runs at a time on one GPU: on an H200 three trained 1.2 times as many in the same time as one
(records of `noise`, seeds 3 to 5)."""
_POLL_SECONDS = 0.2
"""Seconds between looks at signals and the clock."""
_LOCK = ".lock"


FollowUp = Callable[[Sequence[Record], Container[str]], Sequence[Job]]
"""The jobs that follow from records, and from the keys of runs that failed."""
_MIXER_COST = 1.6
"""Time of a layer with a state-space mixer over that of one without, of equal width."""


class Watcher(Protocol):
    """Receives progress events."""

    def added(self, count: int) -> None:
        """There are more jobs, which follow from records."""

    def started(self, job: Job) -> None:
        """A worker begins with a job."""

    def ended(self, job: Job, outcome: Record | Failure, seconds_left: float | None) -> None:
        """A job has a record, or will have none."""


@dataclass
class Result:
    """What a call of `train_missing` has done."""

    records: list[Record] = field(default_factory=list)
    failures: list[tuple[Job, Failure]] = field(default_factory=list)
    num_left: int = 0
    """Jobs that were not started, for want of time or because of a signal."""
    stopped_by: signal.Signals | None = None


def prepared(run: Run, preset: Preset, data: Path | None) -> Run:
    """Return a run with the data and the device of this machine; its key stays the same."""
    config = run.config
    device = "cpu" if preset == "cpu" else "cuda"
    return replace(
        run,
        config=replace(
            config,
            data=replace(config.data, path=data),
            runtime=replace(config.runtime, device=device),
        ),
    )


def missing(
    names: Iterable[str],
    preset: Preset,
    data: Path | None,
    records: Mapping[str, Record],
    *,
    requests: Path | None = None,
    again: bool = False,
    failed: Container[str] = (),
) -> list[Job]:
    """Return the runs of experiments that have no record, each once, in order.

    Args:
        requests: File of benchmark requests for the runs that are scored.
        again: Also those whose records do not know the claims as they are defined now.
        failed: Keys of runs that others do not wait for.
    """
    ledger = catalogue.claim_hashes()
    jobs: dict[str, Job] = {}
    for name in names:
        for run in catalogue.runs_of(name, preset, records, failed):
            record = records.get(run.key)
            if record is not None and not (again and outdated(record, name)):
                continue
            job = Job(
                experiment=name,
                run=prepared(run, preset, data),
                ledger=ledger,
                requests=requests if run.scored else None,
            )
            jobs.setdefault(run.key, job)
    return list(jobs.values())


def outdated(record: Record, name: str) -> list[str]:
    """Return the claims of an experiment that were defined otherwise when a run began."""
    claims = catalogue.load(name).CLAIMS
    return [claim.id for claim in claims if record.ledger.get(claim.id) != claim.hash]


def default_jobs(preset: Preset, names: Iterable[str]) -> int:
    """Return how many runs of these experiments are trained at a time.

    A module may name a number of its own for a GPU, `GPU_JOBS`.
    """
    if preset == "cpu":
        return num_cores()
    return min(getattr(catalogue.load(name), "GPU_JOBS", GPU_JOBS) for name in names)


def default_threads(preset: Preset, num_workers: int) -> int:
    """Return the threads of a worker: one on a CPU, where results depend on their number."""
    return 1 if preset == "cpu" else max(1, num_cores() // num_workers)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of a folder of records, made if it is missing."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: choose another folder (--out)")
    make_folder(out)
    (out / _LOCK).touch()
    try:
        descriptor = lock(out / _LOCK)
    except BlockingIOError as error:
        raise ValueError(
            f"another process is writing records to {out}: wait for it or end it, or choose "
            "another folder (--out)"
        ) from error
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def check_data(jobs: Sequence[Job], keys: Iterable[str], records: Mapping[str, Record]) -> None:
    """Raise a ValueError if the data are damaged, or earlier records are of others.

    Runs are too short to wait for the check that each makes in the background.
    """
    if not jobs:
        return
    config = jobs[0].run.config
    data = TrainingData.open(config.data, config.model.vocab_size, config.seed)
    check = data.check()
    check.start()
    check.wait()
    check.raise_if_failed()
    others = [key for key in keys if key in records and records[key].data != data.fingerprint]
    if others:
        raise ValueError(
            f"{len(others):,} of the runs have records of other data, and records of both cannot "
            "be compared: give the data they were trained on with --data, or choose another "
            "folder (--out)"
        )


def train_missing(
    jobs: Sequence[Job],
    out: Path,
    watcher: Watcher,
    *,
    num_workers: int,
    num_threads: int,
    seconds: float = 0.0,
    known: Sequence[Record] = (),
    follow_up: FollowUp | None = None,
) -> Result:
    """Train jobs in worker processes and write their records to a folder.

    Args:
        num_threads: CPU threads of a worker.
        seconds: Start no job that would not end within them; 0 is no limit.
        known: Earlier records, by which the time of a job is judged until there are new ones.
        follow_up: Asked after each job for those that follow from all records and failures; jobs
            that were there before are not repeated.
    """
    began = time.monotonic()
    result, pending = Result(), list(jobs)
    keys = {job.run.key for job in jobs}
    failed: set[str] = set()
    with (
        tempfile.TemporaryDirectory(prefix="lrm-", ignore_cleanup_errors=True) as scratch,
        Workers(Path(scratch), num_workers, num_threads) as workers,
        Interrupt() as interrupt,
    ):

        def in_time(job: Job) -> bool:
            took = durations(job, result.records, known)
            return not seconds or not took or time.monotonic() - began + max(took) <= seconds

        while interrupt.received is None:
            for worker in workers.idle() if pending else ():
                job = next_job(pending, worker.compiled)
                if job is None or not in_time(job):
                    break
                pending.remove(job)
                worker.submit(job)
                watcher.started(job)
                if not pending:
                    # Without a look at the next worker, which would be started for nothing.
                    break
            if not workers.busy:
                break
            for job, outcome in workers.completed(_POLL_SECONDS):
                if isinstance(outcome, Record):
                    append(out / f"{job.experiment}.jsonl", outcome)
                    result.records.append(outcome)
                else:
                    result.failures.append((job, outcome))
                    failed.add(job.run.key)
                more = follow_up(result.records, failed) if follow_up else ()
                more = [each for each in more if each.run.key not in keys]
                keys |= {each.run.key for each in more}
                pending += more
                watcher.added(len(more))
                left = seconds_left([*pending, *workers.busy], result.records, num_workers, known)
                watcher.ended(job, outcome, left)
        result.num_left = len(pending) + len(workers.busy)
        result.stopped_by = interrupt.received
    return result


def next_job(pending: Sequence[Job], compiled: object) -> Job | None:
    """Return the first job, or one of its seed whose code a worker has compiled already.

    Of an experiment that is stopped some seeds are complete then, rather than some arms.
    """
    if not pending:
        return None
    first = pending[0]
    alike = (
        job
        for job in pending
        if job.compiled == compiled
        and job.experiment == first.experiment
        and job.run.labels["seed"] == first.run.labels["seed"]
    )
    return next(alike, first)


def durations(job: Job, records: Sequence[Record], known: Sequence[Record] = ()) -> list[float]:
    """Return how long a job would take, judged by each record of its model.

    Without any, by records of other models, in proportion to their size.

    Args:
        known: Earlier records, perhaps of another machine, for want of new ones.
    """
    model, tokens = to_dict(job.run.config.model), job.run.config.schedule.tokens
    of_model = (
        [each for each in group if each.config["model"] == model] for group in (records, known)
    )
    alike = next(filter(None, of_model), records or known)
    return [
        record.seconds
        * (tokens / max(1, record.tokens))
        * (_size(model) / _size(record.config["model"]))
        for record in alike
    ]


def _size(model: Mapping[str, Any]) -> float:
    """Return a number that the time for a token is about proportional to."""
    return (
        model["num_layers"] * model["hidden_size"] ** 2 * (_MIXER_COST if model["ssm_size"] else 1)
    )


def seconds_left(
    jobs: Sequence[Job],
    records: Sequence[Record],
    num_workers: int,
    known: Sequence[Record] = (),
) -> float | None:
    """Return the time that jobs will take together; None before there is a record."""
    if not records and not known:
        return None
    return sum(statistics.mean(durations(job, records, known)) for job in jobs) / num_workers

"""Progress of experiments: a live bar on a terminal, a line for each run elsewhere."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from learnable_multipliers._formats import duration
from learnable_multipliers.experiments.record import Record
from learnable_multipliers.experiments.worker import Failure, Job


class Display:
    """Shows each run that ends, and how many are left; a `runner.Watcher`."""

    def __init__(self, num_jobs: int, console: Console):
        self._total, self._ended, self._console = num_jobs, 0, console
        self._running: list[str] = []
        live = console.is_terminal and not console.is_dumb_terminal
        self._progress = Progress(
            TextColumn("{task.fields[ended]}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[running]}", markup=False, style="dim"),
            console=console,
            refresh_per_second=4,
            disable=not live,
        )
        self._task = self._progress.add_task(
            "", total=num_jobs, ended=f"0/{num_jobs}", left="", running=""
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def added(self, count: int) -> None:
        """Count more jobs."""
        self._total += count
        self._progress.update(self._task, total=self._total, ended=f"{self._ended}/{self._total}")

    def started(self, job: Job) -> None:
        """Name a job among those that run."""
        self._running.append(in_words(job))
        self._progress.update(self._task, running=", ".join(self._running))

    def ended(self, job: Job, outcome: Record | Failure, seconds_left: float | None) -> None:
        """Print the outcome of a job."""
        self._running.remove(in_words(job))
        self._ended += 1
        count = f"{self._ended}/{self._total}"
        left = "" if seconds_left is None else f"{duration(seconds_left)} left"
        parts = [count.rjust(2 * len(str(self._total)) + 1), in_words(job), _outcome(outcome)]
        if self._progress.disable:
            parts.append(left)
        line = "  ".join(part for part in parts if part)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._progress.update(
            self._task,
            completed=self._ended,
            ended=count,
            left=left,
            running=", ".join(self._running),
        )


def in_words(job: Job) -> str:
    """Return experiment and labels of a job."""
    return f"{job.experiment}: {job.run.in_words}"


def _outcome(outcome: Record | Failure) -> str:
    if isinstance(outcome, Failure):
        return f"failed: {outcome.text}"
    text = "diverged" if outcome.loss is None else f"loss {outcome.loss:.4f}"
    return f"{text}  {outcome.seconds:.1f} s"

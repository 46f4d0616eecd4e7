"""What a run leaves behind and tells as it goes: its folder, its log, and who looks on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.distributed import World
from learnable_multipliers.pretrain.metrics.log import MetricLog
from learnable_multipliers.pretrain.trainer.run_folder import RunFolder

Observer = Callable[[dict[str, Any]], None]
"""Sees every record of a run as it is written."""


class Logbook:
    """The first rank of a world writes in it; on all others it is silent."""

    def __init__(self, config: TrainConfig, world: World, observer: Observer | None = None):
        self._config, self._world = config, world
        self._observer = observer or (lambda record: None)
        self._told: set[str] = set()
        self._log: MetricLog | None = None
        self._folder = RunFolder(config.out, resume=config.resume) if world.is_first else None
        if self._folder is not None and not self._folder.is_held:
            self.warn(0, f"{config.out} cannot be locked: see that no other process trains in it")

    def open(self, step: int, total: int) -> bool:
        """Open the log, cut back to the step the run is at; tell whether the run has ended."""
        ended = self._world.together(lambda: self._world.is_first and self._open(step, total))
        return bool(self._world.tell([ended])[0])

    def _open(self, step: int, total: int) -> bool:
        log = self._config.log
        self._log = MetricLog(
            self._config.out,
            tensorboard=None if log.tensorboard else False,
            wandb=log.wandb or None,
            trackio=log.trackio or None,
        )
        last = None
        if self._config.resume:
            last = self._log.truncate_after(step, has_more=step < total)
        if step and last is None:
            self.warn(
                step, f"{self._log.path} has nothing from before step {step:,}: was it removed?"
            )
        return last is not None and last.get("kind") == "end"

    def describe(self, name: str, data: Any) -> None:
        """Write a file about the run."""
        if self._folder is not None:
            self._folder.write(name, data)

    def amend(self, name: str, section: str, data: Any) -> None:
        """Put a section of a file about the run right, where it says something else."""
        if self._folder is not None:
            self._folder.amend(name, section, data)

    def record(self, step: int, record: dict[str, Any]) -> None:
        """Write down a record."""
        if self._log is not None:
            self._log.log(step, record)
            self._observer({"step": step, **record})

    def warn(self, step: int, text: str, about: str | None = None) -> None:
        """Tell of a trouble; once, where it is said what it is about."""
        if not self._world.is_first or about in self._told:
            return
        if about is not None:
            self._told.add(about)
        self._observer({"kind": "warning", "step": step, "text": text})

    def flush(self) -> None:
        """Bring the log to disk; before a checkpoint is published, which may not be ahead."""
        if self._log is not None:
            self._log.flush()

    def cut_back(self, step: int) -> None:
        """Forget all records after a step."""
        if self._log is not None:
            self._log.truncate_after(step)

    def set_aside_after(self, step: int) -> None:
        """Set aside the checkpoints after a step, and say so."""
        if self._folder is not None:
            for path in checkpoints.set_aside_after(self._folder.checkpoints, step):
                self.warn(step, f"set aside, to be looked at or removed: {path}")

    def tidy(self, newest: int, keep: int) -> None:
        """Do what a process that was killed at its last save could not."""
        if self._folder is not None:
            checkpoints.tidy(self._folder.checkpoints, newest, keep)

    def close(self) -> None:
        """Let go of the log's files and of the folder."""
        try:
            if self._log is not None:
                self._log.close()
        finally:
            if self._folder is not None:
                self._folder.close()

"""Measure a run and write the records of its metrics."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, NamedTuple

from learnable_multipliers._plan import Plan
from learnable_multipliers.equilibrium._monitor import Monitor
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.shards import VALID
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.metrics.meters import LossReading, describe_weights
from learnable_multipliers.pretrain.metrics.signals import Signals
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.trainer.device import Device
from learnable_multipliers.pretrain.trainer.evaluation import evaluate, sample_text
from learnable_multipliers.pretrain.trainer.run_folder import RunFolder
from learnable_multipliers.pretrain.trainer.symmetries import symmetries_of


class Position(NamedTuple):
    """How far a run is."""

    step: int
    tokens: int
    seconds: float


class Recorder:
    """Measures on all ranks; the first rank writes the records."""

    def __init__(
        self,
        config: TrainConfig,
        device: Device,
        data: TrainingData,
        folder: RunFolder,
        model: HybridLM,
        optimizer: MultiplierOptimizer,
        plan: Plan,
    ):
        self._config, self._device, self._data, self._folder = config, device, data, folder
        self._model, self._optimizer, self._plan = model, optimizer, plan
        if config.log.drift and plan.num_multipliers:
            symmetries = symmetries_of(config.model, plan)
            self.monitor = Monitor(optimizer, symmetries, drift_bound=config.log.drift_bound)
        else:
            self.monitor = Monitor(optimizer)
        self._signals: Signals | None = None
        if config.log.signals_every:
            self._signals = Signals.of_run(model, optimizer, plan, data, config.data, device.device)
        self._since = Position(0, 0, 0.0)

    def restart_clock(self, at: Position) -> None:
        """Measure the next speed from here."""
        self._since = at

    def record(self, kind: str, at: Position, **values: Any) -> None:
        """Write a record."""
        if self._folder.log is not None:
            # A rollback is recorded at the first repeated step: a resume from the checkpoint drops
            # the record and writes it again.
            step = at.step + (kind == "rollback")
            self._folder.log.log(step, {"kind": kind, "tokens": at.tokens, **values})

    def training(
        self, at: Position, losses: LossReading, lr: float, skipped_steps: int, num_ranks: int
    ) -> None:
        """Record losses, gradient norm and speed since the last record."""
        norm = self._optimizer.grad_norm
        speed = (at.tokens - self._since.tokens) / (at.seconds - self._since.seconds)
        self._since = at
        peak = self._device.peak_tflops and self._device.peak_tflops * num_ranks * 1e12
        self.record(
            "train",
            at,
            loss=math.nan if losses.mean is None else losses.mean,
            loss_left_out=losses.left_out,
            lr=lr,
            grad_norm=None if norm is None else norm.item(),
            skipped_steps=skipped_steps,
            tokens_per_second=speed,
            mfu=peak and 6 * self._model.num_parameters * speed / peak,
            seconds=at.seconds,
        )

    def health(self, at: Position, last: bool) -> None:
        """Record the norms of the weights and the alarms of the monitor."""
        health = self.monitor.health()
        described = describe_weights(self._optimizer, self._plan, health.readings)
        self.record("weights", at, **described)
        values: dict[str, Any] = {"alarms": [alarm.text for alarm in health.alarms]}
        if last:
            # One reading per tensor: only in the last record.
            values["readings"] = [asdict(reading) for reading in health.readings]
        self.record("health", at, **health.metrics(), **values)
        for alarm in health.alarms:
            self._folder.warn(at.step, alarm.text, alarm.about)

    def signals(self, at: Position) -> None:
        """Record what the config asks for about gradients and activations."""
        if self._signals is not None:
            self.record("signals", at, **self._signals.measure(self._device.autocast()))

    def evaluation(self, at: Position, last: bool) -> float:
        """Record the losses on held-out text, and at the end on the test sets; return the first."""
        values: dict[str, Any] = {**self.evaluate()}
        if last and self._data.tests:
            values["tests"] = {name: self.evaluate(name) for name in self._data.tests}
        self.record("eval", at, **values)
        return values["loss"]

    def evaluate(self, split: str = VALID) -> dict[str, float]:
        """Return the losses on a split of the data."""
        return evaluate(self._model, self._data, self._config, self._device, split)

    def sample(self, at: Position) -> None:
        """Record a text that the model generates."""
        text = sample_text(self._model, self._data, self._config, self._device)
        if text is None:
            warning = f"step {at.step:,}: no sample: the model's logits are not finite"
            self._folder.warn(at.step, warning)
        else:
            self.record("sample", at, prompt=self._config.log.prompt, text=text)

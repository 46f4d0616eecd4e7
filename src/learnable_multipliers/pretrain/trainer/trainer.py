"""The trainer: runs a config, and writes metrics and checkpoints."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from learnable_multipliers._initialize import initialize_
from learnable_multipliers._serialization import to_dict
from learnable_multipliers.equilibrium._monitor import Monitor
from learnable_multipliers.optim._replicas import ReplicasDifferError
from learnable_multipliers.optim._write_guard import WeightChangedError
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.shards import VALID
from learnable_multipliers.pretrain.data.training_data import TrainingData, cache_folder
from learnable_multipliers.pretrain.distributed import init_world
from learnable_multipliers.pretrain.metrics.log import Observer
from learnable_multipliers.pretrain.metrics.meters import (
    LossMeter,
    LossReading,
    Stopwatch,
    describe_weights,
)
from learnable_multipliers.pretrain.metrics.signals import Signals
from learnable_multipliers.pretrain.model.parallelize import parallelize
from learnable_multipliers.pretrain.trainer import schedule, spikes
from learnable_multipliers.pretrain.trainer.build import (
    build_model,
    check_param_dtype,
    make_plan,
    optimizer_for,
    resolve_config,
)
from learnable_multipliers.pretrain.trainer.compile_cache import set_compile_cache
from learnable_multipliers.pretrain.trainer.device import choose_device, performance_warnings
from learnable_multipliers.pretrain.trainer.evaluation import evaluate, sample_text
from learnable_multipliers.pretrain.trainer.interrupt import Interrupt
from learnable_multipliers.pretrain.trainer.memory import check_fits
from learnable_multipliers.pretrain.trainer.run_folder import RunFolder
from learnable_multipliers.pretrain.trainer.run_state import (
    RunState,
    check_same_settings,
    restore_,
    state_of,
    tensors_of,
)
from learnable_multipliers.pretrain.trainer.symmetries import symmetries_of
from learnable_multipliers.pretrain.trainer.train_step import TrainStep

_WRONG_DATA = 1 << 16
"""Marks wrong data where ranks agree on a number; larger than any signal number."""
_POLL_SECONDS = 0.5
"""Interval for polling the data check."""


class Trainer:
    """One run, step by step."""

    stopped_by: signal.Signals | None = None
    """The signal that stopped the run before its last step."""
    diverged: str | None = None
    """Why the run has diverged, set when it ends; None if it has not."""

    def __init__(self, config: TrainConfig, observer: Observer | None = None):
        self.device = choose_device(config.runtime)
        self._cold_start = set_compile_cache(cache_folder()) if self.device.compiles else None
        self.data = TrainingData.open(config.data, config.model.vocab_size, config.seed)
        self.config = config = resolve_config(config, self.data)
        self.world = init_world(**to_dict(config.parallel), device_type=self.device.device.type)
        self.device = self.device.for_world_size(self.world.size)
        # Validate before creating the run folder.
        self.schedule = schedule.Schedule.of_run(config)
        schedule.check_divisible(self.schedule, self.world.axes.dp_degree)
        check_param_dtype(config, self.device, self.world.size)
        check_fits(config, self.device, self.world.axes)
        self._folder = self.world.run_on_all(lambda: RunFolder(config, self.world, observer))
        self._data_check = self.data.check(reads=self.world.is_first_on_node)
        try:
            with self.world.collective():
                self._set_up(config)
        except BaseException:
            self.close()
            raise

    def _set_up(self, config: TrainConfig) -> None:
        self.model = build_model(config, self.device.device)
        # Before parallelizing, while every rank holds the whole model.
        self.plan = initialize_(self.model, make_plan(self.model, config.optimizer))
        parallel = parallelize(self.model, self.world)
        self.optimizer = optimizer_for(self.model, self.plan, config.optimizer, parallel.dp_group)
        symmetries = None
        if config.log.drift and self.plan.num_multipliers:
            symmetries = symmetries_of(config.model, self.plan)
        self.monitor = Monitor(self.optimizer, symmetries, drift_bound=config.log.drift_bound)
        self._signals: Signals | None = None
        if config.log.signals_every:
            self._signals = Signals.of_run(
                self.model, self.optimizer, self.plan, self.data, config.data, self.device.device
            )
        self.step = self.samples = self.passed_over = self._skipped_before = 0
        self._stopwatch = Stopwatch()
        self._losses = LossMeter(self.device.device)
        self._spikes = spikes.SpikeState()
        self._held_out_loss: float | None = None
        if config.resume:
            self._resume()
        ending: dict[str, Any] | None = self._folder.open_log(self.step, len(self.schedule))
        self._ended = ending is not None
        self.diverged = ending["diverged"] if ending is not None else None
        self._folder.describe(
            self.step,
            self.device.name,
            self.model,
            self.plan,
            self.data.tokenizer(),
            self.data.fingerprint,
            ended=self._ended,
        )
        if not self._ended:
            repeated = schedule.repeated_data_warning(config.schedule, self.data.num_tokens)
            if repeated is not None:
                self._warn(repeated)
            for warning in performance_warnings(config, self.device):
                self._warn(warning.message)
            if self._cold_start is not None:
                self._warn(self._cold_start.message)
        if self.device.compiled:
            self.model.compile_layers_()
        if config.runtime.recompute == "layers":
            self.model.recompute_layers_()
        self._train_step = TrainStep(self.model, self.device, config.z_loss, parallel)
        self._restart_clock()

    # -- training -----------------------------------------------------------------------------

    def train(self, interrupt: Interrupt | None = None) -> str:
        """Train to the end, or until interrupted; return finished, diverged or interrupted."""
        for _ in self.steps(interrupt):
            pass
        if self.stopped_by is not None:
            return "interrupted"
        return "finished" if self.diverged is None else "diverged"

    def steps(self, interrupt: Interrupt | None = None) -> Iterator[int]:
        """Train, yielding the number of steps done after each step; then save and close the run.

        All ranks stop after the same step, whichever rank received a signal or found wrong data.
        """
        first = self.step
        while self.step < len(self.schedule) and self.stopped_by is None:
            with self._stopwatch, self.world.collective():
                self._take_step()
            if self.step == first + 1:
                # After the first step, so it is not delayed.
                self._data_check.start()
            yield self.step
            number = self._agree_on_stop(interrupt.received or 0 if interrupt is not None else 0)
            self.stopped_by = signal.Signals(number) if number else None
        if self.stopped_by is not None:
            self._warn(f"{self.stopped_by.name}: saving step {self.step:,}")
        # Before recording the end of the run.
        self._wait_for_data_check()
        if self.stopped_by is None and not self._ended:
            if self._held_out_loss is None:
                # The run was stopped after its last step, and resumed.
                self._held_out_loss = self._evaluate()["loss"]
            self.diverged, memory = self.divergence(), self.device.peak_memory()
            self._record(
                "end",
                steps=self.step,
                seconds=self.seconds,
                memory=memory,
                diverged=self.diverged,
            )
        if not self._ended:
            with self.world.collective():
                path = self.save()
            if self.diverged is not None and self.world.is_first:
                # It must be neither resumed from nor exported.
                path = checkpoints.set_aside(path, "diverged")
                self._warn(f"diverged model kept for inspection: {path}")
        self.close()
        self.world.destroy()

    def divergence(self) -> str | None:
        """Return why a run that ends here has diverged, else None; the same on all ranks."""
        skipped = self._losses.read().skipped_in_a_row
        guess = math.log(self.config.model.vocab_size)
        return self.world.broadcast(
            spikes.divergence(self._spikes, skipped, self._held_out_loss, guess, self.config.spikes)
        )

    def raise_if_diverged(self) -> None:
        """Raise a DivergenceError if the run has ended and diverged."""
        if self.diverged is not None:
            saved = checkpoints.steps(self._folder.checkpoints)
            raise spikes.DivergenceError(spikes.diverged_message(self.diverged, saved))

    def _agree_on_stop(self, number: int) -> int:
        """Return the maximum of all ranks; raise on all ranks if one of them has wrong data."""
        found = self.world.all_reduce_max(_WRONG_DATA if self._data_check.failed else number)
        if found == _WRONG_DATA:
            self.world.run_on_all(self._data_check.raise_if_failed)
        return found

    def _take_step(self) -> None:
        planned = self.schedule[self.step]
        lr = self.config.optimizer.lr * planned.lr_factor
        multiplier_lr_scale = self.config.optimizer.multiplier_ratio * planned.multiplier_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["multiplier_lr_scale"] = multiplier_lr_scale
        own = self.world.share(planned.sequences)
        micro = self.config.data.micro_batch_sequences or len(own)
        begin = self.samples + self.passed_over
        end = begin + own.stop
        batches = (
            self.data.batch(start, min(micro, end - start), self.device.device)
            for start in range(begin + own.start, end, micro)
        )
        # The loss of the whole batch, the same on all ranks: they skip the same steps.
        gradients = self._train_step.gradients(batches, planned.sequences)
        loss = self.world.all_reduce_dp(gradients)
        self.optimizer.found_inf = ~loss.isfinite()
        try:
            self.optimizer.step()
        except ReplicasDifferError as error:
            raise OSError(f"step {self.step + 1:,}: {error} (--resume)") from error
        except WeightChangedError as error:
            name = str(error).partition(" ")[0]
            raise checkpoints.CheckpointError(
                f"step {self.step + 1:,}: {name} is not what the optimizer's state makes it: the "
                "files of the resumed checkpoint do not belong together, or memory is faulty. "
                "Remove that checkpoint and resume from the previous one"
            ) from error
        self._losses.add(loss, self.optimizer.skipped_last)
        self._train_step.clear()
        self.samples += planned.sequences
        self.step += 1
        self._after_step(lr)

    def close(self) -> None:
        """Close the metrics and release the folder; a run does so itself when it ends."""
        self._data_check.close()
        self._folder.close()

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.samples * self.config.data.sequence_length

    @property
    def seconds(self) -> float:
        """Seconds spent in steps, including those before a resume."""
        return self._stopwatch.seconds

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a loss or gradient was not finite."""
        return self._skipped_before + self.optimizer.num_skipped

    # -- metrics ------------------------------------------------------------------------------

    def _after_step(self, lr: float) -> None:
        log, last = self.config.log, self.step == len(self.schedule)

        def due(every: int) -> bool:
            return bool(every) and self.step % every == 0

        logged = due(log.every) or (last and bool(log.every)) or self.step == 1
        if logged:
            self._record_training(lr, self._observe_losses())
        if (logged or due(self.config.spikes.max_skipped)) and self._rolled_back():
            return
        weights = due(log.weights_every) or last or self.step == 1
        signals = due(log.signals_every) or last or self.step == 1
        evaluation = due(log.evaluate_every) or last
        sample = bool(log.sample_tokens) and (due(log.sample_every) or last)
        # During a possible spike, no checkpoint may replace a good one.
        checkpoint = due(self.config.checkpoint.every) and not last
        checkpoint = checkpoint and not (self._spikes.high or self._losses.read().skipped_in_a_row)
        if weights:
            self._record_health(last)
        if self._signals is not None and signals:
            self._record("signals", **self._signals.measure(self.device.autocast()))
        if evaluation:
            found: dict[str, Any] = {**self._evaluate()}
            self._held_out_loss = found["loss"]
            if last and self.data.tests:
                found["tests"] = {name: self._evaluate(name) for name in self.data.tests}
            self._record("eval", **found)
        if sample:
            text = sample_text(self.model, self.data, self.config, self.device)
            if text is None:
                self._warn(f"step {self.step:,}: no sample: the model's logits are not finite")
            else:
                self._record("sample", prompt=log.prompt, text=text)
        if checkpoint:
            self.save()
        if weights or signals or evaluation or sample or checkpoint:
            self._restart_clock()
        # At the last step, judge immediately.
        if last and (reason := self.divergence()) is not None:
            self._roll_back(reason)

    def _evaluate(self, split: str = VALID) -> dict[str, float]:
        return evaluate(self.model, self.data, self.config, self.device, split)

    def _observe_losses(self) -> LossReading:
        """Return the losses since the last record, reset their meter and update the spike state."""
        losses = self._losses.read()
        self._losses.reset()
        point = spikes.LossPoint(self.step, losses.mean)
        self._spikes = spikes.observe(self._spikes, point, self.config.spikes)
        return losses

    def _record_training(self, lr: float, losses: LossReading) -> None:
        norm = self.optimizer.grad_norm
        self.device.synchronize()
        then, tokens = self._mark
        speed = (self.tokens - tokens) / (self.seconds - then)
        self._restart_clock()
        peak = self.device.peak_tflops and self.device.peak_tflops * self.world.size * 1e12
        self._record(
            "train",
            loss=math.nan if losses.mean is None else losses.mean,
            loss_left_out=losses.left_out,
            lr=lr,
            grad_norm=None if norm is None else norm.item(),
            skipped_steps=self.skipped_steps,
            tokens_per_second=speed,
            mfu=peak and 6 * self.model.num_parameters * speed / peak,
            seconds=self.seconds,
        )

    def _restart_clock(self) -> None:
        """Measure the next speed from here."""
        self._mark = (self.seconds, self.tokens)

    def _record_health(self, last: bool) -> None:
        health = self.monitor.health()
        self._record("weights", **describe_weights(self.optimizer, self.plan, health.readings))
        found: dict[str, Any] = {"alarms": [alarm.text for alarm in health.alarms]}
        if last:
            # One reading per tensor: only in the last record.
            found["readings"] = [asdict(reading) for reading in health.readings]
        self._record("health", **health.metrics(), **found)
        for alarm in health.alarms:
            self._folder.warn(self.step, alarm.text, alarm.about)

    def _record(self, kind: str, **values: Any) -> None:
        if self._folder.log is not None:
            # A rollback is recorded at the first repeated step: a resume from the checkpoint drops
            # the record and writes it again.
            step = self.step + (kind == "rollback")
            self._folder.log.log(step, {"kind": kind, "tokens": self.tokens, **values})

    def _warn(self, text: str) -> None:
        self._folder.warn(self.step, text)

    # -- checkpoints --------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint and return its folder."""
        self._wait_for_data_check()
        # Before publishing a checkpoint of the same step.
        self.world.run_on_all(self._folder.flush)
        state = RunState(
            samples=self.samples,
            passed_over=self.passed_over,
            seconds=self.seconds,
            skipped_steps=self.skipped_steps,
            loss=self._losses.read(),
            spikes=self._spikes,
            config=self.config,
            model=self.model.config,
            data=self.data.fingerprint,
            tokenizer=self.data.manifest.tokenizer_sha256,
            eos_token=self.data.manifest.eos_token,
        )
        checkpoint = checkpoints.Checkpoint(
            self.step, to_dict(state), tensors_of(self.model, self.optimizer)
        )
        return checkpoints.save(
            self._folder.checkpoints, checkpoint, self._num_to_keep(), self.world
        )

    def _wait_for_data_check(self) -> None:
        """Wait until the data of every node are verified; raise if they are wrong.

        Poll collectively, so no rank hits the collective timeout.
        """
        check, began = self._data_check, time.monotonic()
        while self._agree_on_stop(int(not check.has_ended())):
            check.wait(_POLL_SECONDS)
            if time.monotonic() - began > _POLL_SECONDS:
                text = "waiting for the data check, before which no checkpoint is published"
                self._folder.warn(self.step, text, topic="data check")

    def _num_to_keep(self) -> int:
        """Return how many checkpoints to keep; rollbacks need those at multiples of `every`."""
        config = self.config.checkpoint
        if self.diverged is not None:
            # Keep all earlier ones in addition to the diverged one.
            return len(checkpoints.steps(self._folder.checkpoints)) + 1
        if not self.config.spikes.max_rollbacks or self.step == len(self.schedule):
            return config.keep
        saved = {*checkpoints.steps(self._folder.checkpoints), self.step}
        return checkpoints.num_to_keep(sorted(saved), config.every, config.keep)

    def _resume(self) -> None:
        like = tensors_of(self.model, self.optimizer)
        loaded, wrong = checkpoints.load_newest(self._folder.checkpoints, like, self.world)
        state = state_of(loaded)
        check_same_settings(self.config, state.config, loaded.step)
        if state.data != self.data.fingerprint:
            raise ValueError(
                f"the data at {self.data.folder} are not those the run started with: tokens or "
                "tokenizer differ; set --data.path to the original data, or start a new run"
            )
        self._restore(loaded, state)
        self._stopwatch = Stopwatch(state.seconds)
        for trouble in wrong:
            self._warn(f"not used: {trouble}")
        self._folder.go_back_to(self.step)
        if self.world.is_first:
            checkpoints.tidy(self._folder.checkpoints, self.step, self._num_to_keep())

    def _restore(self, loaded: checkpoints.Checkpoint, state: RunState) -> None:
        """Restore all state except elapsed time."""
        restore_(self.model, self.optimizer, loaded)
        taken = islice(self.schedule, loaded.step)
        lrs = (self.config.optimizer.lr * step.lr_factor for step in taken)
        self.monitor.resume(lrs, state.skipped_steps)
        self.step, self.samples = loaded.step, state.samples
        self.passed_over = state.passed_over
        self._skipped_before = state.skipped_steps - self.optimizer.num_skipped
        self._losses = LossMeter(self.device.device, state.loss)
        self._spikes = state.spikes
        self._held_out_loss = None

    # -- loss spikes --------------------------------------------------------------------------

    def _rolled_back(self) -> bool:
        """Handle a loss spike or too many skipped steps; return whether the run rolled back."""
        config, skipped = self.config.spikes, self._losses.read().skipped_in_a_row
        endless = 0 < config.max_skipped <= skipped
        if not endless and not spikes.is_spike(self._spikes, config):
            return False
        reason = spikes.describe_spike(self._spikes, skipped)
        if self._roll_back(reason):
            return True
        saved = checkpoints.steps(self._folder.checkpoints)
        if endless:
            raise spikes.DivergenceError(spikes.skipped_steps_message(self.step, skipped, saved))
        self._warn(f"{reason}; {spikes.spike_ignored_message(config, saved)}")
        self._spikes = spikes.reset_after_spike(self._spikes)
        return False

    def _roll_back(self, reason: str) -> bool:
        """Continue from before the spike with the data after it; return whether it was possible.

        No checkpoint is written: a run that is killed and resumed meets the same spike and rolls
        back again.
        """
        if self._spikes.num_rollbacks >= self.config.spikes.max_rollbacks:
            return False
        spike, next_sample = self._spikes, self.samples + self.passed_over
        folder, every = self._folder.checkpoints, self.config.checkpoint.every
        loaded, wrong = checkpoints.load_newest_of(
            lambda: spikes.rollback_steps(checkpoints.steps(folder), spike, every),
            folder,
            tensors_of(self.model, self.optimizer),
            self.world,
        )
        for trouble in wrong:
            self._warn(f"not used: {trouble}")
        if loaded is None:
            self._warn("there is no checkpoint from before the loss spike: cannot roll back")
            return False
        self._folder.go_back_to(loaded.step)
        self._restore(loaded, state_of(loaded))
        self.passed_over = next_sample - self.samples
        self._spikes = replace(self._spikes, num_rollbacks=spike.num_rollbacks + 1)
        self._record(
            "rollback",
            checkpoint=self.step,
            num_rollbacks=self._spikes.num_rollbacks,
            passed_over=self.passed_over,
            usual_loss=statistics.median(spike.usual) if spike.usual else None,
            high=[[point.step, point.loss] for point in spike.high],
        )
        self._warn(
            f"{reason}: rolled back to the checkpoint of step {self.step}, continuing with the "
            f"data after the spike (rollback {self._spikes.num_rollbacks} of "
            f"{self.config.spikes.max_rollbacks})"
        )
        self._restart_clock()
        return True

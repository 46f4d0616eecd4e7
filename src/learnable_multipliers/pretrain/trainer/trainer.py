"""The trainer: runs a config, and writes metrics and checkpoints."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from learnable_multipliers._initialize import initialize_
from learnable_multipliers._serialization import to_dict
from learnable_multipliers.optim._replicas import ReplicasDifferError
from learnable_multipliers.optim._write_guard import WeightChangedError
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData, cache_folder
from learnable_multipliers.pretrain.distributed import init_world
from learnable_multipliers.pretrain.metrics.log import Observer
from learnable_multipliers.pretrain.metrics.meters import Stopwatch
from learnable_multipliers.pretrain.model.parallelize import parallelize
from learnable_multipliers.pretrain.trainer import schedule
from learnable_multipliers.pretrain.trainer.build import (
    build_model,
    check_param_dtype,
    make_plan,
    optimizer_for,
    resolve_config,
)
from learnable_multipliers.pretrain.trainer.compile_cache import set_compile_cache
from learnable_multipliers.pretrain.trainer.device import choose_device, performance_warnings
from learnable_multipliers.pretrain.trainer.interrupt import Interrupt
from learnable_multipliers.pretrain.trainer.memory import check_fits
from learnable_multipliers.pretrain.trainer.recorder import Position, Recorder
from learnable_multipliers.pretrain.trainer.recovery import Losses, load_before_spike
from learnable_multipliers.pretrain.trainer.run_folder import RunFolder
from learnable_multipliers.pretrain.trainer.run_state import (
    RunState,
    check_same_settings,
    restore_,
    state_of,
    tensors_of,
)
from learnable_multipliers.pretrain.trainer.spikes import DivergenceError, diverged_message
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
        self._recorder = Recorder(
            config, self.device, self.data, self._folder, self.model, self.optimizer, self.plan
        )
        self.monitor = self._recorder.monitor
        self.step = self.samples = self.passed_over = self._skipped_before = 0
        self._stopwatch = Stopwatch()
        self._losses = Losses(config, self.device.device)
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
        self._recorder.restart_clock(self._position())

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
            if self._losses.held_out is None:
                # The run was stopped after its last step, and resumed.
                self._losses.held_out = self._recorder.evaluate()["loss"]
            self.diverged, memory = self.divergence(), self.device.peak_memory()
            self._recorder.record(
                "end",
                self._position(),
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
        return self.world.broadcast(self._losses.divergence())

    def raise_if_diverged(self) -> None:
        """Raise a DivergenceError if the run has ended and diverged."""
        if self.diverged is not None:
            saved = checkpoints.steps(self._folder.checkpoints)
            raise DivergenceError(diverged_message(self.diverged, saved))

    def _agree_on_stop(self, number: int) -> int:
        """Return the maximum of all ranks; raise on all ranks if one of them has wrong data."""
        largest = self.world.all_reduce_max(_WRONG_DATA if self._data_check.failed else number)
        if largest == _WRONG_DATA:
            self.world.run_on_all(self._data_check.raise_if_failed)
        return largest

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
        self._losses.meter.add(loss, self.optimizer.skipped_last)
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

    # -- after a step -------------------------------------------------------------------------

    def _after_step(self, lr: float) -> None:
        """Record, evaluate and save what is due; roll back after a loss spike."""
        log, last = self.config.log, self.step == len(self.schedule)

        def due(every: int) -> bool:
            return bool(every) and self.step % every == 0

        logged = due(log.every) or (last and bool(log.every)) or self.step == 1
        if logged:
            losses = self._losses.observe(self.step)
            # Before reading the clock.
            self.device.synchronize()
            self._recorder.training(
                self._position(), losses, lr, self.skipped_steps, self.world.size
            )
        if (logged or due(self.config.spikes.max_skipped)) and self._rolled_back():
            return
        weights = due(log.weights_every) or last or self.step == 1
        signals = due(log.signals_every) or last or self.step == 1
        evaluation = due(log.evaluate_every) or last
        sample = bool(log.sample_tokens) and (due(log.sample_every) or last)
        checkpoint = due(self.config.checkpoint.every) and not last
        checkpoint = checkpoint and not self._losses.is_suspicious
        at = self._position()
        if weights:
            self._recorder.health(at, last)
        if signals:
            self._recorder.signals(at)
        if evaluation:
            self._losses.held_out = self._recorder.evaluation(at, last)
        if sample:
            self._recorder.sample(at)
        if checkpoint:
            self.save()
        if weights or signals or evaluation or sample or checkpoint:
            self._recorder.restart_clock(self._position())
        # At the last step, judge immediately.
        if last and (reason := self.divergence()) is not None:
            self._roll_back(reason)

    def _position(self) -> Position:
        return Position(self.step, self.tokens, self.seconds)

    def _warn(self, text: str) -> None:
        self._folder.warn(self.step, text)

    def _rolled_back(self) -> bool:
        """Handle a loss spike or too many skipped steps; return whether the run rolled back."""
        reason = self._losses.trouble()
        if reason is None:
            return False
        if self._roll_back(reason):
            return True
        saved = checkpoints.steps(self._folder.checkpoints)
        self._warn(f"{reason}; {self._losses.ignore_spike(self.step, saved)}")
        return False

    def _roll_back(self, reason: str) -> bool:
        """Continue from before the spike with the data after it; return whether it was possible.

        No checkpoint is written: a run that is killed and resumed meets the same spike and rolls
        back again.
        """
        spike, next_sample = self._losses.spikes, self.samples + self.passed_over
        if spike.num_rollbacks >= self.config.spikes.max_rollbacks:
            return False
        loaded, warnings = load_before_spike(
            self._folder.checkpoints,
            spike,
            self.config.checkpoint.every,
            tensors_of(self.model, self.optimizer),
            self.world,
        )
        for warning in warnings:
            self._warn(warning)
        if loaded is None:
            return False
        self._folder.go_back_to(loaded.step)
        self._restore(loaded, state_of(loaded))
        self.passed_over = next_sample - self.samples
        num_rollbacks = spike.num_rollbacks + 1
        self._losses.spikes = replace(self._losses.spikes, num_rollbacks=num_rollbacks)
        self._recorder.record(
            "rollback",
            self._position(),
            checkpoint=self.step,
            num_rollbacks=num_rollbacks,
            passed_over=self.passed_over,
            usual_loss=statistics.median(spike.usual) if spike.usual else None,
            high=[[point.step, point.loss] for point in spike.high],
        )
        self._warn(
            f"{reason}: rolled back to the checkpoint of step {self.step}, continuing with the "
            f"data after the spike (rollback {num_rollbacks} of {self.config.spikes.max_rollbacks})"
        )
        self._recorder.restart_clock(self._position())
        return True

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
            loss=self._losses.meter.read(),
            spikes=self._losses.spikes,
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
        while self._agree_on_stop(int(not check.has_ended)):
            # Shards may have changed since they were verified.
            check.start()
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
        for problem in wrong:
            self._warn(f"not used: {problem}")
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
        self._losses.restore(state.loss, state.spikes)

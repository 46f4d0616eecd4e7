"""The trainer: from a config to a trained model, its metrics and its checkpoints."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from learnable_multipliers._initialize import initialize_
from learnable_multipliers.equilibrium._monitor import Monitor
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.distributed import join, take_own_device
from learnable_multipliers.pretrain.metrics.environment import environment
from learnable_multipliers.pretrain.metrics.loss_meter import LossMeter
from learnable_multipliers.pretrain.metrics.stopwatch import Stopwatch
from learnable_multipliers.pretrain.metrics.weights import describe_weights
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.parallelize import spread_
from learnable_multipliers.pretrain.plain_data import to_dict
from learnable_multipliers.pretrain.trainer import spikes
from learnable_multipliers.pretrain.trainer.device import choose_device
from learnable_multipliers.pretrain.trainer.evaluation import evaluate
from learnable_multipliers.pretrain.trainer.interrupt import Interrupt
from learnable_multipliers.pretrain.trainer.logbook import Logbook, Observer
from learnable_multipliers.pretrain.trainer.optimizer import make_plan, optimizer_for
from learnable_multipliers.pretrain.trainer.run_folder import checkpoint_folder
from learnable_multipliers.pretrain.trainer.run_state import (
    RunState,
    check_same_settings,
    restore_,
    state_of,
    tensors_of,
)
from learnable_multipliers.pretrain.trainer.sampling import generate
from learnable_multipliers.pretrain.trainer.schedule import Step, steps, tokens_after
from learnable_multipliers.pretrain.trainer.slow_paths import slow_paths
from learnable_multipliers.pretrain.trainer.train_step import Passes
from learnable_multipliers.symmetry import Symmetries, find_symmetries


class Trainer:
    """One run, step by step."""

    def __init__(self, config: TrainConfig, observer: Observer | None = None):
        if config.runtime.device in ("auto", "cuda"):
            take_own_device()
        self.device = choose_device(config.runtime)
        self.data = TrainingData.open(config.data, config.model.vocab_size, config.seed)
        self.config = config = resolved(config, self.data)
        config.check()
        self.world = join(**to_dict(config.parallel), device_type=self.device.device.type)
        self.device = self.device.of_rank(self.world.size)
        self._logbook = self.world.together(lambda: Logbook(config, self.world, observer))
        try:
            self._set_up(config)
        except BaseException:
            self.close()
            raise

    def _set_up(self, config: TrainConfig) -> None:
        self.steps: list[Step] = steps(
            config.schedule, config.data.batch_sequences, config.data.sequence_length
        )
        refuse_uneven_batches(self.steps, self.world.num_readers)
        self.model = build(config.model, config.seed, self.device.device)
        # While every rank has all of the model.
        self.plan = initialize_(self.model, make_plan(self.model, config.optimizer))
        spread = spread_(self.model, self.world)
        self.optimizer = optimizer_for(self.model, self.plan, config.optimizer, spread.copies)
        self.monitor = Monitor(
            self.optimizer, self._symmetries(), drift_bound=config.log.drift_bound
        )
        self.step, self.samples, self.passed_over = 0, 0, 0
        self._skipped_before = 0
        self._watch = Stopwatch()
        self._losses = LossMeter(self.device.device)
        self._spikes = spikes.SpikeState()
        if config.resume:
            self._resume()
        self._ended = self._logbook.open(self.step, len(self.steps))
        if not self._ended:
            self._describe()
            for path in slow_paths(config, self.device):
                self._warn(path.in_words)
        if self.device.compiled:
            self.model.compile_layers_()
        self._passes = Passes(self.model, self.device, config.z_loss, spread)
        self._mark = (self.seconds, self.tokens)

    # -- a run --------------------------------------------------------------------------------

    def train(self, interrupt: Interrupt | None = None) -> str:
        """Train to the end, or until interrupted; return which of the two it was."""
        for _ in self.going():
            if self.stopped_by(interrupt) is not None:
                self.save()
                self.close()
                self.world.leave()
                return "interrupted"
        return "finished"

    def going(self) -> Iterator[int]:
        """Train, yielding the number of steps done after each step; then close the run."""
        while self.step < len(self.steps):
            with self._watch, self.world.waiting():
                self._take_step()
            yield self.step
        self._finish()

    def stopped_by(self, interrupt: Interrupt | None) -> str | None:
        """Return the signal that has come to any rank: all of them stop after the same step."""
        own = 0
        if interrupt is not None and interrupt.received is not None:
            own = int(signal.Signals[interrupt.received])
        (number,) = self.world.agree([own])
        return signal.Signals(number).name if number else None

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.samples * self.config.data.sequence_length

    @property
    def tokens_after(self) -> list[int]:
        """Tokens trained on after 0, 1, 2, ... and all steps of the run."""
        return tokens_after(self.steps, self.config.data.sequence_length)

    def _take_step(self) -> None:
        planned = self.steps[self.step]
        lr = self.config.optimizer.lr * planned.lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        own = self.world.share(planned.sequences)
        micro = self.config.data.micro_batch_sequences or len(own)
        begin = self.samples + self.passed_over
        starts = range(begin + own.start, begin + own.stop, micro)
        end = begin + own.stop
        batches = (
            self.data.batch(start, min(micro, end - start), self.device.device) for start in starts
        )
        # The same on all ranks: what one of them cannot use, none may.
        loss = self.world.sum_over_readers(self._passes.gradients(batches, planned.sequences))
        self._passes.spoil(loss)
        self.optimizer.step()
        self._losses.add(loss, self.optimizer.grad_norm)
        self._passes.clear()
        self.samples += planned.sequences
        self.step += 1
        self._write_down(lr)

    # -- what is written down -----------------------------------------------------------------

    def _write_down(self, lr: float) -> None:
        log, last = self.config.log, self.step == len(self.steps)

        def due(every: int) -> bool:
            return bool(every) and self.step % every == 0

        looked = due(log.every) or (last and bool(log.every)) or self.step == 1
        if looked:
            self._record_speed(lr)
        if (looked or due(self.config.spikes.max_skipped)) and self._left_its_course():
            return
        if due(log.weights_every) or last or self.step == 1:
            self._record_health()
            self._restart_clock()
        if due(log.evaluate_every) or last:
            self._record("eval", **self.evaluate())
            self._restart_clock()
        if due(log.sample_every) or last:
            self._record_sample()
            self._restart_clock()
        if due(self.config.checkpoint.every) and not last and not self._in_doubt:
            self.save()
            self._restart_clock()

    def _record_speed(self, lr: float) -> None:
        losses = self._losses.read()
        self._losses.start_anew()
        look = spikes.Look(self.step, losses.mean)
        self._spikes = spikes.looked(self._spikes, look, self.config.spikes)
        norm = self.optimizer.grad_norm
        self.device.synchronize()
        then, tokens = self._mark
        speed = (self.tokens - tokens) / (self.seconds - then)
        self._restart_clock()
        peak = self.device.peak_tflops
        if peak is not None:
            peak *= self.world.size
        self._record(
            "train",
            loss=math.nan if losses.mean is None else losses.mean,
            loss_left_out=losses.left_out,
            lr=lr,
            grad_norm=None if norm is None else norm.item(),
            skipped_steps=self.skipped_steps,
            tokens_per_second=speed,
            mfu=None if peak is None else 6 * self.model.num_parameters * speed / (peak * 1e12),
            seconds=self.seconds,
        )

    @property
    def seconds(self) -> float:
        """Time the run has taken, whatever else went on between its steps."""
        return self._watch.seconds

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient was not finite."""
        return self._skipped_before + self.optimizer.num_skipped

    def _restart_clock(self) -> None:
        """Let the next speed be measured from here."""
        self._mark = (self.seconds, self.tokens)

    def evaluate(self) -> dict[str, float]:
        """Return loss and bits per byte on held-out text."""
        return evaluate(
            self.model,
            self.data,
            self.config.data,
            self.device,
            max_tokens=self.config.log.evaluate_tokens,
        )

    def _record_health(self) -> None:
        health = self.monitor.health()
        weights = describe_weights(self.optimizer, self.plan, health.readings)
        self._record("weights", **weights)
        texts = [alarm.text for alarm in health.alarms]
        self._record("health", **health.metrics(), alarms=texts)
        for alarm in health.alarms:
            # The same trouble is in every record from now on; once is enough to be told.
            self._logbook.warn(self.step, alarm.text, alarm.about)

    def _symmetries(self) -> Symmetries | None:
        """Return along what multipliers could drift."""
        if not self.config.log.drift or not self.plan.num_multipliers:
            return None
        # Where it is computed in float64, by plain PyTorch.
        return find_symmetries(build(self.config.model, self.config.seed), self.plan)

    def _record_sample(self) -> None:
        if not self.config.log.sample_tokens:
            return
        prompt = self.data.encode(self.config.log.prompt) or [self.data.eos]
        tokens = generate(
            self.model,
            torch.tensor(prompt, device=self.device.device),
            self.config.log.sample_tokens,
            context=min(256, self.config.data.sequence_length),
            # Ranks compute each token together: none may stop while another goes on.
            stop=self.data.eos if self.world.size == 1 else None,
            seed=self.config.seed,
        )
        written = tokens[len(prompt) :].tolist()
        if self.data.eos in written:
            written = written[: written.index(self.data.eos)]
        text = self.data.decode(written)
        self._record("sample", prompt=self.config.log.prompt, text=text)

    def _record(self, kind: str, **values: Any) -> None:
        self._record_at(self.step, kind, values)

    def _record_at(self, step: int, kind: str, values: dict[str, Any]) -> None:
        self._logbook.record(step, {"kind": kind, "tokens": self.tokens, **values})

    def _finish(self) -> None:
        if not self._ended:
            memory = self.device.peak_memory()
            self._record("end", steps=self.step, seconds=self.seconds, memory=memory)
            self.save()
        self.close()
        self.world.leave()

    def _warn(self, text: str) -> None:
        self._logbook.warn(self.step, text)

    def close(self) -> None:
        """Let go of the log's files and of the folder; a run that came to its end has done so."""
        self._logbook.close()

    # -- folder and checkpoints ---------------------------------------------------------------

    def _describe(self) -> None:
        """Write down what the run is, and what it is made with from this step on."""
        found = environment(self.device.name)
        if self.config.resume:
            # The first part of the run may have been computed elsewhere and otherwise.
            schedule = to_dict(self.config.schedule)
            found |= {"runtime": to_dict(self.config.runtime), "schedule": schedule}
            self._logbook.amend("config.json", "schedule", schedule)
            self._logbook.describe(f"resumed-{self.step:08d}.json", found)
            return
        self._logbook.describe("config.json", to_dict(self.config))
        found |= {
            "parameters": self.model.num_parameters,
            "multipliers": self.plan.num_multipliers,
        }
        self._logbook.describe("environment.json", found)
        self._logbook.describe("plan.json", self.plan.to_json())
        if self.world.is_first:
            self.data.copy_tokenizer(self.config.out)

    def save(self) -> Path:
        """Write a checkpoint; what is lost if that fails is said in the error, and is nothing."""
        self._logbook.flush()
        state = RunState(
            samples=self.samples,
            passed_over=self.passed_over,
            seconds=self.seconds,
            skipped_steps=self.skipped_steps,
            loss=self._losses.read(),
            spikes=self._spikes,
            config=to_dict(self.config),
            model=to_dict(self.model.config),
            data=self.data.fingerprint,
            eos_token=self.data.manifest.eos_token,
        )
        kept = checkpoints.Checkpoint(
            self.step, to_dict(state), tensors_of(self.model, self.optimizer)
        )
        folder = checkpoint_folder(self.config.out)
        return checkpoints.save(folder, kept, self._num_kept(), self.world)

    def _num_kept(self) -> int:
        """Return how many checkpoints to keep, so that a spike finds the same ones in any case."""
        config = self.config.checkpoint
        if not self.config.spikes.max_rollbacks or self.step == len(self.steps):
            return config.keep
        kept = {*checkpoints.steps(checkpoint_folder(self.config.out)), self.step}
        return checkpoints.num_to_keep(sorted(kept), config.every, config.keep)

    def _resume(self) -> None:
        folder = checkpoint_folder(self.config.out)
        like = tensors_of(self.model, self.optimizer)
        kept, wrong = checkpoints.load_newest(folder, like, self.world)
        state = state_of(kept)
        check_same_settings(self.config, state.config, kept.step)
        if not self.data.has_fingerprint(state.data):
            raise ValueError(
                f"the data at {self.data.folder} are not those the run began with: their tokens "
                "or their tokenizer are others; name those with --data.path, or begin a new run"
            )
        self._take_up(kept, state)
        self._watch = Stopwatch(state.seconds)
        for trouble in wrong:
            self._warn(f"not used: {trouble}")
        self._logbook.set_aside_after(self.step)
        self._logbook.tidy(self.step, self._num_kept())

    def _take_up(self, kept: checkpoints.Checkpoint, state: RunState) -> None:
        """Be where a checkpoint was written, but for the clock."""
        restore_(self.model, self.optimizer, kept)
        lrs = [self.config.optimizer.lr * step.lr_factor for step in self.steps[: kept.step]]
        self.monitor.resume(lrs, state.skipped_steps)
        self.step, self.samples, self.passed_over = kept.step, state.samples, state.passed_over
        self._skipped_before = state.skipped_steps - self.optimizer.num_skipped
        self._losses = LossMeter(self.device.device, state.loss)
        self._spikes = state.spikes

    # -- trouble ------------------------------------------------------------------------------

    @property
    def _in_doubt(self) -> bool:
        """Whether a checkpoint might be a bad one, and take the place of a good one."""
        return bool(self._spikes.high or self._losses.read().skipped_in_a_row)

    def _left_its_course(self) -> bool:
        """Go back from a spike, or from steps that all fail, if allowed; tell whether it was so."""
        config, skipped = self.config.spikes, self._losses.read().skipped_in_a_row
        endless = spikes.is_endless(skipped, config)
        if not endless and not spikes.is_spike(self._spikes, config):
            return False
        if self._spikes.num_rollbacks < config.max_rollbacks and self._roll_back(skipped):
            return True
        if endless:
            raise spikes.DivergenceError(spikes.refusal(self.step, skipped))
        self._warn(f"{spikes.in_words(self._spikes, skipped)}; {spikes.going_on(config)}")
        self._spikes = spikes.accepted(self._spikes)
        return False

    def _roll_back(self, skipped: int) -> bool:
        """Go on from before the trouble, with the data after it; tell whether that was possible.

        No checkpoint is written: a run that is killed from here on and resumed meets the same
        spike, and does the same again.
        """
        spike, next_sample = self._spikes, self.samples + self.passed_over
        folder = checkpoint_folder(self.config.out)
        kept, wrong = checkpoints.load_newest_of(
            lambda: spikes.rollback_steps(
                checkpoints.steps(folder), spike, self.config.checkpoint.every
            ),
            folder,
            tensors_of(self.model, self.optimizer),
            self.world,
        )
        for trouble in wrong:
            self._warn(f"not used: {trouble}")
        if kept is None:
            self._warn("no checkpoint is from before the loss left its course: none to go back to")
            return False
        self._logbook.set_aside_after(kept.step)
        self._take_up(kept, state_of(kept))
        self.passed_over = next_sample - self.samples
        self._spikes = replace(self._spikes, num_rollbacks=spike.num_rollbacks + 1)
        self._logbook.cut_back(self.step)
        # Told of the first step that is taken again, and so forgotten together with it by a
        # resume from the checkpoint itself, which will come here once more.
        record = spikes.record(spike, self._spikes.num_rollbacks, self.step, self.passed_over)
        self._record_at(self.step + 1, "rollback", record)
        self._warn(
            f"{spikes.in_words(spike, skipped)}: back to the checkpoint of step {self.step}, and "
            f"on with the data that come after (rollback {self._spikes.num_rollbacks} of "
            f"{self.config.spikes.max_rollbacks})"
        )
        self._restart_clock()
        return True


def resolved(config: TrainConfig, data: TrainingData) -> TrainConfig:
    """Return a config whose every field has its final value."""
    if config.model.vocab_size == 0:
        model = replace(config.model, vocab_size=data.manifest.vocab_size)
        config = replace(config, model=model)
    return replace(config, name=config.name or config.out.resolve().name)


def refuse_uneven_batches(planned: list[Step], readers: int) -> None:
    """Raise a ValueError if a batch of the run cannot be shared evenly."""
    for step in planned:
        if step.sequences % readers:
            raise ValueError(
                f"a batch of {step.sequences} sequences cannot be shared evenly by {readers} "
                "readers (parallel.data x parallel.shard): choose data.batch_sequences and the "
                "ramp-up of the schedule as multiples of that"
            )

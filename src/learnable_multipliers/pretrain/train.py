"""The trainer: from a config to a trained model, its metrics and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.pretrain import checkpoint as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig, to_dict
from learnable_multipliers.pretrain.device import choose_device
from learnable_multipliers.pretrain.environment import environment
from learnable_multipliers.pretrain.evaluation import evaluate
from learnable_multipliers.pretrain.interrupt import Interrupt
from learnable_multipliers.pretrain.metrics import MetricLog
from learnable_multipliers.pretrain.models.hybrid import build
from learnable_multipliers.pretrain.optimizer import make_optimizer
from learnable_multipliers.pretrain.passes import Passes
from learnable_multipliers.pretrain.sampling import generate
from learnable_multipliers.pretrain.schedule import Step, steps
from learnable_multipliers.pretrain.stopwatch import Stopwatch
from learnable_multipliers.pretrain.training_data import TrainingData
from learnable_multipliers.pretrain.weights import Prediction, describe_weights

Observer = Callable[[dict[str, Any]], None]
"""Sees every record of a run as it is written."""


class Trainer:
    """One run, step by step."""

    def __init__(self, config: TrainConfig, observer: Observer | None = None):
        self.device = choose_device(config.runtime)
        self.data = TrainingData.open(config.data, config.model.vocab_size, config.seed)
        self.config = config = resolved(config, self.data)
        config.check()
        self._observer = observer or (lambda record: None)
        _refuse_another_run(config)
        self.model = build(config.model, config.seed, self.device.device)
        self.optimizer, self.plan = make_optimizer(self.model, config.optimizer)
        self.steps: list[Step] = steps(
            config.schedule, config.data.batch_sequences, config.data.sequence_length
        )
        self.prediction = Prediction(self.optimizer, self.plan)
        self.step, self.samples = 0, 0
        self._watch = Stopwatch()
        self._losses: list[Tensor] = []
        if config.resume:
            self._resume()
        else:
            self._start_folder()
        self.log = MetricLog(
            config.out,
            tensorboard=None if config.log.tensorboard else False,
            wandb=config.log.wandb or None,
            trackio=config.log.trackio or None,
        )
        if config.resume:
            self.log.truncate_after(self.step)
        if self.device.compiled:
            self.model.compile_layers_()
        self._passes = Passes(self.model, self.device, config.z_loss)
        self._mark = (self.seconds, self.tokens)

    # -- a run --------------------------------------------------------------------------------

    def train(self, interrupt: Interrupt | None = None) -> str:
        """Train to the end, or until interrupted; return which of the two it was."""
        for _ in self.going():
            if interrupt is not None and interrupt.received:
                self.save()
                self.close()
                return "interrupted"
        return "finished"

    def going(self) -> Iterator[int]:
        """Train, yielding the number of steps done after each step; then close the run."""
        while self.step < len(self.steps):
            with self._watch:
                self._take_step()
            yield self.step
        self._finish()

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.samples * self.config.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Steps in the whole run."""
        return len(self.steps)

    def _take_step(self) -> None:
        planned = self.steps[self.step]
        lr = self.config.optimizer.lr * planned.lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        micro = self.config.data.micro_batch_sequences or planned.sequences
        starts = range(self.samples, self.samples + planned.sequences, micro)
        end = self.samples + planned.sequences
        batches = (
            self.data.batch(start, min(micro, end - start), self.device.device) for start in starts
        )
        self._losses.append(self._passes.gradients(batches, planned.sequences))
        self.optimizer.step()
        self._passes.clear()
        self.prediction.step(lr)
        self.samples += planned.sequences
        self.step += 1
        self._write_down(lr)

    # -- what is written down -----------------------------------------------------------------

    def _write_down(self, lr: float) -> None:
        log, last = self.config.log, self.step == len(self.steps)

        def due(every: int) -> bool:
            return bool(every) and self.step % every == 0

        if due(log.every) or (last and log.every) or self.step == 1:
            self._record_speed(lr)
        if due(log.weights_every) or last or self.step == 1:
            self._record("weights", **describe_weights(self.optimizer, self.plan, self.prediction))
            self._restart_clock()
        if due(log.evaluate_every) or last:
            self._record("eval", **self.evaluate())
            self._restart_clock()
        if due(log.sample_every) or last:
            self._record_sample()
            self._restart_clock()
        if due(self.config.checkpoint.every) and not last:
            self.save()
            self._restart_clock()

    def _record_speed(self, lr: float) -> None:
        loss = torch.stack(self._losses).mean().item()
        self._losses.clear()
        norm = self.optimizer.grad_norm
        self.device.synchronize()
        then, tokens = self._mark
        speed = (self.tokens - tokens) / (self.seconds - then)
        self._restart_clock()
        peak = self.device.peak_tflops
        self._record(
            "train",
            loss=loss,
            lr=lr,
            grad_norm=None if norm is None else norm.item(),
            skipped_steps=self.optimizer.num_skipped,
            tokens_per_second=speed,
            mfu=None if peak is None else 6 * self.model.num_parameters * speed / (peak * 1e12),
            seconds=self.seconds,
        )

    @property
    def seconds(self) -> float:
        """Time the run has taken, whatever else went on between its steps."""
        return self._watch.seconds

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

    def _record_sample(self) -> None:
        if not self.config.log.sample_tokens:
            return
        prompt = self.data.encode(self.config.log.prompt) or [self.data.eos]
        tokens = generate(
            self.model,
            torch.tensor(prompt, device=self.device.device),
            self.config.log.sample_tokens,
            context=min(256, self.config.data.sequence_length),
            stop=self.data.eos,
            seed=self.config.seed,
        )
        text = self.data.decode(tokens[len(prompt) :].tolist())
        self._record("sample", prompt=self.config.log.prompt, text=text)

    def _record(self, kind: str, **values: Any) -> None:
        record = {"kind": kind, "tokens": self.tokens, **values}
        self.log.log(self.step, record)
        self._observer({"step": self.step, **record})

    def _finish(self) -> None:
        self._record("end", steps=self.step, seconds=self.seconds, memory=self.device.peak_memory())
        self.save()
        self.close()

    def close(self) -> None:
        """Let go of the log's files; a run that came to its end has done so."""
        self.log.close()

    # -- folder and checkpoints ---------------------------------------------------------------

    def _start_folder(self) -> None:
        out = self.config.out
        _write_json(out / "config.json", to_dict(self.config))
        described = environment(self.device.name) | {
            "parameters": self.model.num_parameters,
            "multipliers": self.plan.num_multipliers,
        }
        _write_json(out / "environment.json", described)
        (out / "plan.json").write_text(self.plan.to_json() + "\n", encoding="utf8")
        self.data.copy_tokenizer(out)

    def save(self) -> Path:
        """Write a checkpoint; what is lost if that fails is said in the error, and is nothing."""
        self.log.flush()
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        state = {
            f"{name}/{key}": value
            for name, parameter in _by_name(self.optimizer)
            for key, value in self.optimizer.state[parameter].items()
        }
        kept = checkpoints.Checkpoint(
            step=self.step,
            state={
                "samples": self.samples,
                "seconds": self.seconds,
                "skipped_steps": self.optimizer.num_skipped,
                "losses": [loss.item() for loss in self._losses],
                "prediction": self.prediction.state(),
                "config": to_dict(self.config),
                "model": to_dict(self.model.config),
                "data": self.data.fingerprint,
                "eos_token": self.data.manifest.eos_token,
            },
            tensors={"model": weights, "optimizer": state},
        )
        return checkpoints.save(self.config.out / "checkpoints", kept, self.config.checkpoint.keep)

    def _resume(self) -> None:
        kept, wrong = checkpoints.load_newest(self.config.out / "checkpoints")
        for trouble in wrong:
            self._observer({"kind": "warning", "step": kept.step, "text": f"not used: {trouble}"})
        _refuse_other_settings(self.config, kept.state["config"])
        if kept.state["data"] != self.data.fingerprint:
            raise ValueError(
                f"the data at {self.data.folder} are not those the run began with: their "
                "manifest has another checksum"
            )
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(kept.tensors["model"][name])
        states: dict[str, dict[str, Tensor]] = {}
        for key, value in kept.tensors["optimizer"].items():
            name, _, entry = key.rpartition("/")
            states.setdefault(name, {})[entry] = value
        known = self.optimizer.state_dict()
        self.optimizer.load_state_dict(
            {
                "param_groups": known["param_groups"],
                "state": {
                    index: states[name]
                    for index, (name, _) in enumerate(_by_name(self.optimizer))
                    if name in states
                },
            }
        )
        self.step, self.samples = kept.step, kept.state["samples"]
        self._watch = Stopwatch(kept.state["seconds"])
        self.prediction.load(kept.state["prediction"])
        self._losses = [
            torch.tensor(loss, device=self.device.device) for loss in kept.state["losses"]
        ]


def resolved(config: TrainConfig, data: TrainingData) -> TrainConfig:
    """Return a config whose every field has its final value."""
    if config.model.vocab_size == 0:
        model = replace(config.model, vocab_size=data.manifest.vocab_size)
        config = replace(config, model=model)
    return replace(config, name=config.name or config.out.name)


def _by_name(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (name, parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]


def _refuse_another_run(config: TrainConfig) -> None:
    """Keep a new run from mixing with the one that is in the folder."""
    if not config.resume and (config.out / "metrics.jsonl").exists():
        raise ValueError(
            f"{config.out} holds a run already: go on with it (--resume), or choose another folder "
            "(--out)"
        )


# What may differ between a run and its continuation: where, how fast and how chatty.
_MAY_CHANGE = {"out", "name", "resume", "dry_run", "log", "checkpoint", "runtime"}


def _refuse_other_settings(config: TrainConfig, kept: dict[str, Any]) -> None:
    mine = json.loads(json.dumps(to_dict(config)))
    changed = [
        f"{section}.{key}: {before} -> {mine[section][key]}" if key else f"{section}: {before}"
        for section in mine
        if section not in _MAY_CHANGE
        for key, before in _differences(kept.get(section), mine[section])
        if (section, key) != ("data", "path")
    ]
    if changed:
        raise ValueError(
            "a run goes on with the settings it began with; these differ: " + "; ".join(changed)
        )


def _differences(before: Any, now: Any) -> list[tuple[str, Any]]:
    if isinstance(now, dict) and isinstance(before, dict):
        return [(key, before.get(key)) for key in now if before.get(key) != now[key]]
    return [] if before == now else [("", f"{before} -> {now}")]


def _write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf8")

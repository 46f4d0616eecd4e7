"""A few steps of a run that is never begun: does it learn, save, load, and how fast."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from learnable_multipliers._formats import count, duration
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.preflight.check_result import Finding
from learnable_multipliers.pretrain.preflight.machine_checks import nearest_folder
from learnable_multipliers.pretrain.preflight.memory import micro_batch
from learnable_multipliers.pretrain.trainer.device import Device
from learnable_multipliers.pretrain.trainer.optimizer import make_optimizer
from learnable_multipliers.pretrain.trainer.run_state import restore_, tensors_of
from learnable_multipliers.pretrain.trainer.schedule import steps
from learnable_multipliers.pretrain.trainer.train_step import TrainStep

_NEAR = 1.0
"""Nats between the first loss and that of guessing."""
_TIMED, _SECONDS = 5, 10.0
"""Steps that are timed, and for how long at most."""
_FAULT = "report it, with this list: it is a fault of this package or of torch"


class Trial:
    """Model and optimizer as a run would make them, and one micro-batch to try them on.

    Of a run on several ranks it is what one of them does, the model whole and nothing exchanged.
    """

    def __init__(self, config: TrainConfig, device: Device, data: TrainingData, dp_degree: int = 1):
        self.config, self.device, self.dp_degree = config, device, dp_degree
        self.model = build(config.model, config.seed, device.device)
        self.optimizer, self.plan = make_optimizer(self.model, config.optimizer)
        if device.compiled:
            self.model.compile_layers_()
        self._train_step = TrainStep(self.model, device, config.z_loss)
        self.sequences = micro_batch(config, dp_degree)
        self._tokens = data.batch(0, self.sequences, device.device)

    def gradients(self) -> float:
        """Leave the gradients of the micro-batch and return its loss."""
        loss = self._train_step.gradients([self._tokens], self.sequences)
        self.optimizer.found_inf = ~loss.isfinite()
        return loss.item()

    def step(self, lr: float) -> None:
        """Take an optimizer step with the gradients there are."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._train_step.clear()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of effective and raw weights and multipliers, on the host."""
        found = {name: p.detach() for name, p in self.model.named_parameters()}
        found |= {f"{n} (raw)": raw for n, raw in self.optimizer.raw_weights().items()}
        for name, parts in self.optimizer.multipliers().items():
            found |= {f"{name} ({part})": value for part, value in parts.items()}
        return {name: tensor.to("cpu", copy=True) for name, tensor in found.items()}


def check_zero_step(trial: Trial) -> Finding:
    """Take a step with no learning rate: it must change no bit; the loss is that of guessing."""
    about = "a step without rate"
    before = trial.weights()
    loss = trial.gradients()
    trial.step(0.0)
    changed = differing(before, trial.weights())
    guessing = math.log(trial.config.model.vocab_size)
    text = f"loss {loss:.3f}, guessing {guessing:.3f}"
    if not math.isfinite(loss):
        advice = "try --runtime.dtype float32, and the model's mup_* factors nearer to 1"
        return Finding(about, "failed", text, advice)
    if changed:
        told = f"{len(changed)} of {len(before)} tensors changed, {changed[0]} among them"
        return Finding(about, "failed", told, _FAULT)
    if abs(loss - guessing) > _NEAR:
        advice = "a new model should guess: look at model.init_std and the mup_* factors"
        return Finding(about, "warning", text, advice)
    return Finding(about, "ok", f"{text}; no bit changed")


def check_save_and_load(trial: Trial) -> Finding:
    """Save a checkpoint where the run would, load it into a new model, and compare all of it."""
    about = "save and load"
    config, expected = trial.config, tensors_of(trial.model, trial.optimizer)
    with tempfile.TemporaryDirectory(
        prefix=".lrm-doctor-", dir=nearest_folder(config.out)
    ) as place:
        began = time.perf_counter()
        path = checkpoints.save(Path(place), checkpoints.Checkpoint(1, {}, expected), keep=2)
        written = sum(file.stat().st_size for file in path.iterdir())
        kept = checkpoints.load(path)
        seconds = time.perf_counter() - began
        # On the host: a device may have no room for two.
        model = build(config.model, config.seed + 1)
        optimizer, _ = make_optimizer(model, config.optimizer)
        # State is made when it is first asked for, and bound to the model again after loading.
        optimizer.raw_weights()
        restore_(model, optimizer, kept)
        optimizer.raw_weights()
        found = tensors_of(model, optimizer)
    changed = [name for file in expected for name in differing(expected[file], found[file])]
    if changed:
        told = f"not every tensor came back: {len(changed)} differ, {changed[0]} among them"
        return Finding(about, "failed", told, f"see to the disk of {config.out}, or {_FAULT}")
    return Finding(about, "ok", f"{count(written)}B in {duration(seconds)}; every bit came back")


def check_speed(trial: Trial) -> Finding:
    """Time passes and optimizer steps, and say how long the run will take."""
    config, lr = trial.config, trial.config.optimizer.lr
    passes: list[float] = []
    updates: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(passes) < _TIMED and (len(passes) < 2 or time.perf_counter() < until):
        passes.append(_timed(trial, lambda: trial.gradients()))
        updates.append(_timed(trial, lambda: trial.step(lr)))
    # The first ones warm up.
    one_pass, update = min(passes[1:]), min(updates[1:])
    share = config.data.batch_sequences / trial.dp_degree
    per_step = math.ceil(share / trial.sequences) * one_pass + update
    planned = steps(config.schedule, config.data.batch_sequences, config.data.sequence_length)
    tokens = config.data.batch_sequences * config.data.sequence_length
    speed = tokens / per_step
    whole = sum(step.sequences for step in planned) * config.data.sequence_length / speed
    left_out = "evaluation" if trial.dp_degree == 1 else "evaluation and exchange between ranks"
    return Finding(
        "speed",
        "ok",
        f"{per_step:.3g} s a step of {count(tokens)} tokens, {count(speed)} tokens/s; the "
        f"whole run about {duration(whole)}, {left_out} left out",
    )


def differing(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in any bit, NaN equal to itself."""
    return [
        name
        for name in sorted(expected.keys() | found.keys())
        if name not in expected or name not in found or _bits(expected[name]) != _bits(found[name])
    ]


def _bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    host = tensor.detach().to("cpu").contiguous()
    return tensor.dtype, tensor.shape, host.reshape(-1).view(torch.uint8).numpy().tobytes()


def _timed(trial: Trial, what: Callable[[], object]) -> float:
    trial.device.synchronize()
    began = time.perf_counter()
    what()
    trial.device.synchronize()
    return time.perf_counter() - began

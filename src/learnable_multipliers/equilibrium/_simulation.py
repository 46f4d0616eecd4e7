"""Brownian motion of a weight: an optimizer's own update rule on N(0,1) gradients (sec. 3).

The paper's Adam Brownian Motion, for four optimizers. It draws samples and applies the update
rules, so it shares no assumption with the closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Unpack, get_args

import torch
from torch import Tensor

from learnable_multipliers.equilibrium._random_walk import (
    BrownianOptimizer,
    OptimizerSettings,
    check_momentum,
    optimizer_settings,
    shrink_per_step,
)
from learnable_multipliers.optim._batches import AdjustLr, lr_factor
from learnable_multipliers.optim._orthogonalization import Coefficients, orthogonalize

Update = Callable[[Tensor], Tensor]
"""Maps a gradient to the update of a step, and keeps the moments."""

_EPS = 1e-12
"""Far below any second moment of N(0,1) gradients, even of rows that rarely get one."""


@dataclass(frozen=True)
class Trajectory:
    """The rms of a weight along a run on noise."""

    lrs: tuple[float, ...]
    """Learning rate of each step."""
    rms: tuple[float, ...]
    """RMS after each step."""
    weight: Tensor
    """The weight after the last step."""

    @property
    def row_rms(self) -> Tensor:
        """RMS of each row after the last step."""
        return self.weight.square().mean(-1).sqrt()

    def late_rms(self, steps: int) -> float:
        """Return the rms over the last steps together: less noisy than one step's."""
        if not 0 < steps <= len(self.rms):
            raise ValueError(f"the run has {len(self.rms)} steps, asked for the last {steps}")
        return math.sqrt(sum(rms**2 for rms in self.rms[-steps:]) / steps)


@torch.no_grad()
def simulate_brownian(
    optimizer: BrownianOptimizer,
    lrs: Iterable[float],
    weight_decay: float,
    shape: tuple[int, ...] = (64, 64),
    *,
    start_rms: float = 0.0,
    frequency: float | Tensor = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Unpack[OptimizerSettings],
) -> Trajectory:
    """Run an optimizer on N(0,1) gradients: w <- (1 - lr wd) w - lr u, a step per learning rate.

    The result has `lrs` and `rms` of each step, the last `weight` and its `row_rms`, and
    `late_rms(steps)`, the rms over the last steps together.

    Args:
        lrs: The rates of the run in order: any schedule, as a list or a generator.
        shape: Of the weight; its sampling error is 1/sqrt(2 numbers). Muon needs two sides, and
            takes leading ones as a stack.
        betas: AdamW's (0.9, 0.95 by default), Lion's (0.9, 0.99).
        momentum: Muon's (0.95), SGD's (0.9). `nesterov`: Muon's (True), SGD's (False).
        adjust_lr: Muon's, as in `lrm.Muon`; so are `coefficients`.
        start_rms: RMS of the normal distribution that the weight starts from.
        frequency: Probability that a row has a gradient in a step, one for all or a tensor for
            rows one by one; in other steps its gradient is zero, as that of a rare token is.
    """
    given = optimizer_settings(optimizer, settings)
    _check(optimizer, given, shape)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=dtype).mul_(start_rms)
    chance = _chance(frequency, shape, dtype)
    update = _RULES[optimizer](weight, **given)
    grad = torch.empty_like(weight)
    taken, squares = [], []
    for lr in lrs:
        keep = 1 - shrink_per_step(lr, weight_decay)
        grad.normal_(generator=generator)
        if chance is not None:
            grad.mul_(torch.bernoulli(chance, generator=generator))
        weight.mul_(keep).sub_(update(grad), alpha=lr)
        taken.append(float(lr))
        squares.append(weight.square().mean())
    rms = torch.stack(squares).sqrt().tolist() if squares else []
    return Trajectory(tuple(taken), tuple(rms), weight)


def _adamw(weight: Tensor, betas: tuple[float, float] = (0.9, 0.95)) -> Update:
    beta1, beta2 = betas
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    forgotten1, forgotten2 = 1.0, 1.0

    def update(grad: Tensor) -> Tensor:
        nonlocal forgotten1, forgotten2
        forgotten1, forgotten2 = forgotten1 * beta1, forgotten2 * beta2
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = math.sqrt(1 - forgotten2) / (1 - forgotten1)
        return first / (second.sqrt().add_(_EPS)).div_(scale)

    return update


def _lion(weight: Tensor, betas: tuple[float, float] = (0.9, 0.99)) -> Update:
    average = torch.zeros_like(weight)

    def update(grad: Tensor) -> Tensor:
        step = grad.lerp(average, betas[0]).sign_()
        average.lerp_(grad, 1 - betas[1])
        return step

    return update


def _sgdm(weight: Tensor, momentum: float = 0.9, nesterov: bool = False) -> Update:
    buffer = torch.zeros_like(weight)

    def update(grad: Tensor) -> Tensor:
        buffer.mul_(momentum).add_(grad)
        return grad.add(buffer, alpha=momentum) if nesterov else buffer

    return update


def _muon(
    weight: Tensor,
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust_lr: AdjustLr = "match_rms_adamw",
    coefficients: Coefficients = "quintic",
) -> Update:
    buffer = torch.zeros_like(weight)
    factor = lr_factor(adjust_lr, *weight.shape[-2:])

    def update(grad: Tensor) -> Tensor:
        buffer.lerp_(grad, 1 - momentum)
        ahead = grad.lerp(buffer, momentum) if nesterov else buffer
        stack = ahead.reshape(-1, *weight.shape[-2:])
        return orthogonalize(stack, coefficients).view(weight.shape).mul_(factor)

    return update


_RULES: dict[str, Callable[..., Update]] = {
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "sgdm": _sgdm,
}


def _chance(frequency: float | Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Return each row's probability of a gradient, (..., rows, 1); None if it is 1 for all."""
    chance = torch.as_tensor(frequency, dtype=dtype)
    if not bool(((chance >= 0) & (chance <= 1)).all()):
        raise ValueError("frequency is the probability that a row gets a gradient: 0 to 1")
    if chance.ndim and chance.shape != shape[:-1]:
        raise ValueError(
            f"frequency has shape {tuple(chance.shape)}, the weight's rows {shape[:-1]}: give one "
            "number for all rows, or one for each"
        )
    return None if bool((chance == 1).all()) else chance.expand(shape[:-1]).unsqueeze(-1)


def _check(optimizer: str, settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    if len(shape) < (2 if optimizer == "muon" else 1):
        raise ValueError(f"{optimizer} cannot train a weight of shape {shape}")
    for name in ("momentum", "betas"):
        values = settings.get(name, ())
        for value in values if isinstance(values, tuple) else (values,):
            check_momentum(name, value)
    for name, known in (("coefficients", Coefficients), ("adjust_lr", AdjustLr)):
        if name in settings and settings[name] not in get_args(known):
            raise ValueError(f"unknown {name}; choose from {', '.join(get_args(known))}")

"""The scale that noise and weight decay give a weight matrix, whatever the data want (eq. 1).

Each is the fixed point of the optimizer's walk (`walk.py`) at a constant learning rate. Ratios of
simulations to these forms are printed by `benchmarks/brownian.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from learnable_multipliers.equilibrium._random_walk import (
    Walk,
    adamw_walk,
    lion_walk,
    muon_walk,
    sgdm_walk,
    shrink_per_step,
)

if TYPE_CHECKING:
    from learnable_multipliers.optim._batches import AdjustLr
    from learnable_multipliers.optim._newton_schulz import Coefficients

SETTLED = 4.0
"""2 * weight_decay * sum(lr) from which on a start is forgotten: e^-4 of its square is left."""


def equilibrium_rms(lr: float, weight_decay: float, beta1: float = 0.9) -> float:
    """Return the rms that AdamW's noise and decay give a matrix; sqrt(lr / (2 wd)) when slow.

    lr sqrt((1-b)/(1+b)) sqrt((1 + a b) / ((1 - a^2)(1 - a b))) with a = 1 - lr * weight_decay.
    """
    return walk_equilibrium(lr, weight_decay, adamw_walk(beta1))


def equilibrium_rms_muon(
    lr: float,
    weight_decay: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    adjust_lr: AdjustLr = "match_rms_adamw",
    shape: tuple[int, int] | None = None,
    coefficients: Coefficients | None = None,
) -> float:
    """Return the rms that Muon's noise and decay give a matrix.

    When slow, 0.2 sqrt((1+mu)/(1-mu)) sqrt(lr / (2 wd)); with Nesterov 8% less at mu = 0.95. That
    is an upper estimate: with Nesterov and mu = 0.95, Muon was measured at 0.72-0.77 of it for
    square matrices, 0.78 for 1:3, 0.82 for 1:4 and 0.85 for 1:8 with the "quintic" coefficients,
    whose singular values are 0.86-0.90 in rms; at 0.88-0.89, 0.98, 1.00 and 0.99 with
    "polar-express". With `shape` and `coefficients` this correction is in the result.
    """
    walk = muon_walk(
        momentum, nesterov, adjust_lr=adjust_lr, shape=shape, coefficients=coefficients
    )
    return walk_equilibrium(lr, weight_decay, walk)


def equilibrium_rms_lion(
    lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.99)
) -> float:
    """Return the rms that Lion's noise and decay give a matrix.

    When slow, sqrt(lr d / (2 wd)) with d = 1 + (4/pi) sum_k arcsin(r b2^k); taking arcsin(x) for x
    gives about sqrt(lr / (pi wd)) / sqrt((1-b1)^2 + b1^2 (1-b2)/(1+b2)), 2-4% off.
    """
    return walk_equilibrium(lr, weight_decay, lion_walk(betas))


def equilibrium_rms_sgdm(
    lr: float, weight_decay: float, momentum: float = 0.9, nesterov: bool = False
) -> float:
    """Return the rms that SGD on N(0,1) gradients gets with decoupled decay.

    When slow, sqrt(lr / (2 wd)) / (1 - momentum). It is proportional to the rms of the gradients.
    `torch.optim.SGD` adds the decay to the gradient instead: sqrt(lr / (2 wd (1 - momentum))).
    """
    return walk_equilibrium(lr, weight_decay, sgdm_walk(momentum, nesterov))


def relaxation_steps(lr: float, weight_decay: float) -> float:
    """Return the steps in which rms^2 comes nearer its equilibrium by a factor e: 1/(2 lr wd)."""
    shrink = shrink_per_step(lr, weight_decay)
    return 1 / (2 * shrink) if shrink else math.inf


def walk_equilibrium(lr: float, weight_decay: float, walk: Walk) -> float:
    """Return the rms at which a walk's noise and decay balance: lr sqrt(d / (1 - a^2))."""
    shrink = shrink_per_step(lr, weight_decay)
    if lr == 0:
        return 0.0
    if shrink == 0:
        return math.inf
    # 1 - a^2, without the cancellation.
    return lr * math.sqrt(walk.diffusion(shrink) / (shrink * (2 - shrink)))

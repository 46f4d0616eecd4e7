"""The scale that noise and weight decay give a weight matrix, whatever the data want (eq. 1).

With noise for gradients, w <- a w - lr u (a = 1 - lr * weight_decay) is a random walk with a pull
to zero, and its rms follows from how the updates u of the optimizer hang together in time. Here
are the closed forms; nothing here looks at a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from learnable_multipliers.optim.muon import lr_factor

if TYPE_CHECKING:
    from learnable_multipliers.optim.muon import AdjustLr


@dataclass(frozen=True)
class Walk:
    """How an optimizer's updates on noise are spread and correlated, at a learning rate of 1.

    E[u_t u_t] = rms^2 and E[u_t u_{t+k}] = rms^2 * overlap * momentum^k for k >= 1.
    """

    rms: float
    """RMS of one update."""
    momentum: float
    """What the correlation of two updates is multiplied by for each step between them."""
    overlap: float = 1.0
    """1 for plain momentum; less with Nesterov, whose newest gradient counts for more."""
    bias_corrected: bool = True
    """Early updates are divided by 1 - momentum^t (AdamW), or else have the full rms (Muon)."""

    def scale(self, steps: int) -> float:
        """Return what the momentum is multiplied by at a step, counted from 1; 1 later on."""
        forgotten = self.momentum**steps
        return 1 / (1 - forgotten if self.bias_corrected else math.sqrt(1 - forgotten**2))

    def diffusion(self, shrink: float) -> float:
        """Return d of the balance (1 - a^2) rms^2 = lr^2 d, for shrink = lr * wd = 1 - a.

        d = E[u_t (u_t + 2 sum_k a^k u_{t-k})] = rms^2 (1 + 2 overlap a mu / (1 - a mu)).
        """
        persistence = (1 - shrink) * self.momentum
        return self.rms**2 * (1 + 2 * self.overlap * persistence / (1 - persistence))


class BrownianState(NamedTuple):
    """What is expected of a weight after a walk on noise: what a checkpoint has to keep."""

    rms: float
    """RMS of the weight."""
    heading: float = 0.0
    """-E[w m] with the next momentum: how much of the way so far the next update goes on with."""
    steps: int = 0
    """Steps taken."""


def adamw_walk(beta1: float = 0.9) -> Walk:
    """Return AdamW's walk, with a second moment that is steady at 1: u is the first moment.

    A small beta2 makes the second moment follow the newest gradients a little: at betas
    (0.9, 0.95) the rms at equilibrium is 0.989 of this one's to first order in 1 - beta2, and
    was measured at 0.984-0.991; at beta2 = 0.999 it is 1.000 and 0.999-1.000.
    """
    _check_momentum("beta1", beta1)
    return Walk(rms=math.sqrt((1 - beta1) / (1 + beta1)), momentum=beta1)


def muon_walk(
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    adjust_lr: AdjustLr = "match_rms_adamw",
    shape: tuple[int, int] | None = None,
) -> Walk:
    """Return the walk of this library's Muon, as if orthogonalizing only rescaled an update.

    A semi-orthogonal (out, in) matrix has an rms of 1/sqrt(max(out, in)), so an update has 0.2
    with `adjust_lr="match_rms_adamw"` and 1/sqrt(in) with "original", which needs the `shape`.
    Orthogonalizing also makes updates forget each other faster, most so for square matrices, and
    the first ten Nesterov steps are less alike than the later ones: 6% in rms, measured.
    """
    _check_momentum("momentum", momentum)
    if adjust_lr == "original" and shape is None:
        raise ValueError('adjust_lr="original" scales an update by the shape: give (out, in)')
    num_out, num_in = shape or (1, 1)
    rms = lr_factor(adjust_lr, num_out, num_in) / math.sqrt(max(num_out, num_in))
    # What is orthogonalized is sum_k c_k g_{t-k} with c_0 = 1 + mu, c_k = mu^(k+1).
    tail = momentum**3 / (1 - momentum**2)
    ahead = momentum * (1 + momentum + tail) / ((1 + momentum) ** 2 + momentum * tail)
    overlap = ahead if nesterov else 1.0
    return Walk(rms=rms, momentum=momentum, overlap=overlap, bias_corrected=False)


def equilibrium_rms(lr: float, weight_decay: float, beta1: float = 0.9) -> float:
    """Return the rms that AdamW's noise and decay give a matrix; sqrt(lr / (2 wd)) when slow.

    lr sqrt((1-b)/(1+b)) sqrt((1 + a b) / ((1 - a^2)(1 - a b))) with a = 1 - lr * weight_decay.
    """
    return _equilibrium(lr, weight_decay, adamw_walk(beta1))


def equilibrium_rms_muon(
    lr: float,
    weight_decay: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    adjust_lr: AdjustLr = "match_rms_adamw",
    shape: tuple[int, int] | None = None,
) -> float:
    """Return the rms that Muon's noise and decay would give a matrix: an upper estimate.

    When slow, 0.2 sqrt((1+mu)/(1-mu)) sqrt(lr / (2 wd)); with Nesterov 8% less at mu = 0.95. On
    N(0,1) gradients with Nesterov and mu = 0.95, Muon was measured at 0.72-0.77 of the estimate
    for square matrices, 0.78 for 1:3, 0.82 for 1:4 and 0.85 for 1:8 with the "quintic"
    coefficients, whose singular values are 0.86-0.90 in rms; at 0.88-0.89, 0.98, 1.00 and 0.99
    with "polar-express". Square matrices forget an update faster than their momentum does.
    """
    walk = muon_walk(momentum, nesterov, adjust_lr=adjust_lr, shape=shape)
    return _equilibrium(lr, weight_decay, walk)


def relaxation_steps(lr: float, weight_decay: float) -> float:
    """Return the steps in which rms^2 comes nearer its equilibrium by a factor e: 1/(2 lr wd)."""
    _shrink(lr, weight_decay)
    return 1 / (2 * lr * weight_decay) if lr * weight_decay else math.inf


def brownian_step(
    state: BrownianState, lr: float, weight_decay: float, walk: Walk | None = None
) -> BrownianState:
    """Return where one step on noise leads in expectation, at any learning rate.

    With u = s m, s the scale of the step's update and m its momentum:
    rms^2 <- a^2 rms^2 + 2 a lr s heading + (lr s)^2 E[m^2];
    heading <- mu (a heading + lr s overlap E[m^2]).
    A constant rate leads to the closed form exactly. The walk is AdamW's unless given.
    """
    keep = 1 - _shrink(lr, weight_decay)
    walk = walk or adamw_walk()
    steps = state.steps + 1
    square = walk.rms**2 * (1 - walk.momentum ** (2 * steps))
    move = lr * walk.scale(steps)
    rms2 = keep**2 * state.rms**2 + 2 * keep * move * state.heading + move**2 * square
    heading = walk.momentum * (keep * state.heading + move * walk.overlap * square)
    return BrownianState(math.sqrt(rms2), heading, steps)


def brownian_rms(
    lrs: Iterable[float], weight_decay: float, start_rms: float = 0.0, walk: Walk | None = None
) -> list[float]:
    """Return the expected rms after each step of a run on noise, under its learning rates."""
    walk = walk or adamw_walk()
    trajectory: list[float] = []
    state = BrownianState(start_rms)
    for lr in lrs:
        state = brownian_step(state, lr, weight_decay, walk)
        trajectory.append(state.rms)
    return trajectory


def _equilibrium(lr: float, weight_decay: float, walk: Walk) -> float:
    shrink = _shrink(lr, weight_decay)
    if lr == 0:
        return 0.0
    if shrink == 0:
        return math.inf
    # 1 - a^2, without the cancellation.
    return lr * math.sqrt(walk.diffusion(shrink) / (shrink * (2 - shrink)))


def _shrink(lr: float, weight_decay: float) -> float:
    if not (lr >= 0 and weight_decay >= 0 and lr * weight_decay < 2):
        raise ValueError(
            "there is an equilibrium for lr >= 0, weight_decay >= 0 and lr * weight_decay < 2, "
            f"got lr={lr}, weight_decay={weight_decay}"
        )
    return lr * weight_decay


def _check_momentum(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")

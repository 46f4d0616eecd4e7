"""The expected walk of a weight on pure noise, step by step, under any learning rates.

With noise for gradients, w <- a w - lr u (a = 1 - lr * weight_decay) is a random walk with a pull
to zero, and its rms follows from how the updates u of the optimizer hang together in time. A
`Walk` says that in four numbers; `brownian_step` follows it exactly, without drawing a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from learnable_multipliers.equilibrium._orthogonal_noise import overlap_after, rms_after
from learnable_multipliers.optim._batches import lr_factor

if TYPE_CHECKING:
    from learnable_multipliers.optim._batches import AdjustLr
    from learnable_multipliers.optim._newton_schulz import Coefficients

Onset = Literal["corrected", "full", "growing"]


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
    onset: Onset = "corrected"
    """First updates: divided by 1 - momentum^t (AdamW), of the full rms (Muon, Lion), or small
    while the momentum fills up (SGD)."""

    def scale(self, steps: int) -> float:
        """Return what the momentum is multiplied by at a step, counted from 1; 1 later on."""
        forgotten = self.momentum**steps
        if self.onset == "growing":
            return 1.0
        return 1 / (1 - forgotten if self.onset == "corrected" else math.sqrt(1 - forgotten**2))

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
    check_momentum("beta1", beta1)
    return Walk(rms=math.sqrt((1 - beta1) / (1 + beta1)), momentum=beta1)


def sgdm_walk(momentum: float = 0.9, nesterov: bool = False) -> Walk:
    """Return the walk of SGD on N(0,1) gradients, u = sum_k mu^k g_{t-k}, with decoupled decay.

    Gradients of another rms scale the walk with them, unlike all others here.
    """
    check_momentum("momentum", momentum)
    power = _nesterov_power(momentum) if nesterov else 1 / (1 - momentum**2)
    overlap = _nesterov_overlap(momentum) if nesterov else 1.0
    return Walk(rms=math.sqrt(power), momentum=momentum, overlap=overlap, onset="growing")


def lion_walk(betas: tuple[float, float] = (0.9, 0.99)) -> Walk:
    """Return Lion's walk: u = sign(c), c_t = b1 m_{t-1} + (1 - b1) g_t, m an average with b2.

    c is Gaussian with correlations r b2^k, so signs have (2/pi) arcsin(r b2^k). The walk takes
    r' b2^k with the same sum instead, which gives the same spread over more than 1/(1 - b2) steps.
    """
    beta1, beta2 = betas
    check_momentum("beta1", beta1)
    if not 0 < beta2 < 1:
        raise ValueError(f"Lion's beta2 must lie between 0 and 1, got {beta2}")
    past = beta1**2 * (1 - beta2) / (1 + beta2)
    power = (1 - beta1) ** 2 + past
    overlap = (beta1 * (1 - beta1) * (1 - beta2) / beta2 + past) / power
    signs = _sum_over_lags(beta2, lambda k: 2 / math.pi * math.asin(overlap * beta2**k))
    return Walk(rms=1.0, momentum=beta2, overlap=signs * (1 - beta2) / beta2, onset="full")


def muon_walk(
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    adjust_lr: AdjustLr = "match_rms_adamw",
    shape: tuple[int, int] | None = None,
    coefficients: Coefficients | None = None,
) -> Walk:
    """Return the walk of this library's Muon on an (out, in) matrix.

    A semi-orthogonal matrix has an rms of 1/sqrt(max(out, in)), so an update has 0.2 with
    `adjust_lr="match_rms_adamw"` and 1/sqrt(in) with "original", which needs the `shape`.
    Without `coefficients` the walk is Wen's: as if orthogonalizing only rescaled an update. It
    also makes updates forget each other faster, most so for square matrices; with `coefficients`
    (and a shape) both the rms and the overlap are those of orthogonalized noise
    (`orthogonal_noise.py`). The first ten Nesterov steps are less alike than the later ones: 6% in
    rms, measured.
    """
    check_momentum("momentum", momentum)
    if shape is None and (adjust_lr == "original" or coefficients is not None):
        raise ValueError(
            'adjust_lr="original" and coefficients go by the shape of a matrix: give '
            "shape=(out, in)"
        )
    num_out, num_in = shape or (1, 1)
    rms = lr_factor(adjust_lr, num_out, num_in) / math.sqrt(max(num_out, num_in))
    overlap = _nesterov_overlap(momentum) if nesterov else 1.0
    if coefficients is not None and momentum > 0:
        alike = _sum_over_lags(
            momentum,
            lambda k: overlap_after(overlap * momentum**k, num_out, num_in, coefficients),
        )
        overlap = alike * (1 - momentum) / momentum
    if coefficients is not None:
        rms *= rms_after(num_out, num_in, coefficients)
    return Walk(rms=rms, momentum=momentum, overlap=overlap, onset="full")


def mixed_walk(walks: Sequence[Walk], sizes: Sequence[int]) -> Walk:
    """Return the walk of a matrix whose blocks, of these sizes, walk each by itself.

    Mean squares and correlations of the parts add up in proportion to their sizes.
    """
    first = walks[0]
    if any((walk.momentum, walk.onset) != (first.momentum, first.onset) for walk in walks):
        raise ValueError("only walks of one optimizer and momentum can be mixed")
    shares = [size / sum(sizes) for size in sizes]
    power = sum(share * walk.rms**2 for share, walk in zip(shares, walks, strict=True))
    alike = sum(
        share * walk.rms**2 * walk.overlap for share, walk in zip(shares, walks, strict=True)
    )
    return Walk(math.sqrt(power), first.momentum, alike / power, first.onset)


def brownian_step(
    state: BrownianState, lr: float, weight_decay: float, walk: Walk | None = None
) -> BrownianState:
    """Return where one step on noise leads in expectation, at any learning rate.

    With u = s m, s the scale of the step's update and m its momentum:
    rms^2 <- a^2 rms^2 + 2 a lr s heading + (lr s)^2 E[m^2];
    heading <- mu (a heading + lr s overlap E[m^2]).
    A constant rate leads to the closed form exactly. The walk is AdamW's unless given.
    """
    keep = 1 - shrink_per_step(lr, weight_decay)
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


def shrink_per_step(lr: float, weight_decay: float) -> float:
    """Return lr * weight_decay, the share of a weight that a step takes away."""
    if not (lr >= 0 and weight_decay >= 0 and lr * weight_decay < 2):
        raise ValueError(
            "there is an equilibrium for lr >= 0, weight_decay >= 0 and lr * weight_decay < 2, "
            f"got lr={lr}, weight_decay={weight_decay}"
        )
    return lr * weight_decay


def check_momentum(name: str, value: float) -> None:
    """Refuse a momentum that never forgets."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")


# Nesterov's update is sum_k c_k g_{t-k} with c_0 = 1 + mu, c_k = mu^(k+1).


def _nesterov_power(momentum: float) -> float:
    return (1 + momentum) ** 2 + momentum**4 / (1 - momentum**2)


def _nesterov_overlap(momentum: float) -> float:
    tail = momentum**3 / (1 - momentum**2)
    return momentum * (1 + momentum + tail) / _nesterov_power(momentum)


def _sum_over_lags(momentum: float, correlation: Callable[[int], float]) -> float:
    """Return the sum of correlations over all lags that are not forgotten to 1e-6."""
    lags = math.ceil(math.log(1e-6) / math.log(momentum))
    return sum(correlation(lag) for lag in range(1, lags + 1))

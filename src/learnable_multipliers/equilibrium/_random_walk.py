"""The random walk of a weight on pure noise: its expected rms, and the equilibrium (eq. 1).

With noise for gradients, w <- a w - lr u (a = 1 - lr * weight_decay) is a random walk with a pull
to zero, and its rms follows from the autocorrelation of the optimizer's updates u. A `RandomWalk`
describes that by four numbers; `brownian_step` follows the rms exactly under any learning rates,
without drawing a sample, and `equilibrium_rms` is its fixed point at a constant learning rate.
`benchmarks/brownian.py` prints the ratios of simulations to these forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from learnable_multipliers.optim._batches import AdjustLr, lr_factor
from learnable_multipliers.optim._orthogonalization import COEFFICIENTS, MARGIN, Coefficients

BrownianOptimizer = Literal["adamw", "muon", "lion", "sgdm"]
Onset = Literal["corrected", "full", "growing"]

SETTLED = 4.0
"""2 * weight_decay * sum(lr) from which on a start is forgotten: e^-4 of its square is left."""


class OptimizerSettings(TypedDict, total=False):
    """Settings of the optimizers' walks. Each optimizer takes some of them; None is its default."""

    betas: tuple[float, float] | None
    momentum: float | None
    nesterov: bool | None
    adjust_lr: AdjustLr | None
    coefficients: Coefficients | None


_SETTINGS = {
    "adamw": {"betas"},
    "lion": {"betas"},
    "muon": {"momentum", "nesterov", "adjust_lr", "coefficients"},
    "sgdm": {"momentum", "nesterov"},
}


@dataclass(frozen=True)
class RandomWalk:
    """RMS and autocorrelation of an optimizer's updates on noise, at a learning rate of 1.

    E[u_t u_t] = rms^2 and E[u_t u_{t+k}] = rms^2 * overlap * momentum^k for k >= 1.
    """

    rms: float
    """RMS of one update."""
    momentum: float
    """Factor on the correlation of two updates for each step between them."""
    overlap: float = 1.0
    """1 for plain momentum; less with Nesterov, which gives the newest gradient more weight."""
    onset: Onset = "corrected"
    """First updates: divided by 1 - momentum^t (AdamW), of the full rms (Muon, Lion), or small
    while the momentum fills up (SGD)."""

    def scale(self, steps: int) -> float:
        """Return the factor on the momentum at a step, counted from 1; it tends to 1."""
        forgotten = self.momentum**steps
        if self.onset == "growing":
            return 1.0
        return 1 / (1 - forgotten if self.onset == "corrected" else math.sqrt(1 - forgotten**2))

    def equilibrium(self, lr: float, weight_decay: float) -> float:
        """Return the rms at which noise and decay balance: (1 - a^2) rms^2 = lr^2 d.

        d = E[u_t (u_t + 2 sum_k a^k u_{t-k})] = rms^2 (1 + 2 overlap a mu / (1 - a mu)).
        """
        shrink = shrink_per_step(lr, weight_decay)
        if lr == 0:
            return 0.0
        if shrink == 0:
            return math.inf
        persistence = (1 - shrink) * self.momentum
        diffusion = self.rms**2 * (1 + 2 * self.overlap * persistence / (1 - persistence))
        # 1 - a^2, without the cancellation.
        return lr * math.sqrt(diffusion / (shrink * (2 - shrink)))


class BrownianState(NamedTuple):
    """Expected state of a weight after some steps on noise, from which the walk continues."""

    rms: float
    """RMS of the weight."""
    heading: float = 0.0
    """-E[w m]: covariance with the next momentum, negated."""
    steps: int = 0
    """Steps taken."""


def adamw_walk(beta1: float = 0.9) -> RandomWalk:
    """Return AdamW's walk, with a second moment that is steady at 1: u is the first moment.

    A small beta2 makes the second moment follow the newest gradients a little: at betas
    (0.9, 0.95) the rms at equilibrium is 0.989 of this one's to first order in 1 - beta2, and
    was measured at 0.984-0.991; at beta2 = 0.999 it is 1.000 and 0.999-1.000.
    """
    check_momentum("beta1", beta1)
    return RandomWalk(rms=math.sqrt((1 - beta1) / (1 + beta1)), momentum=beta1)


def sgdm_walk(momentum: float = 0.9, nesterov: bool = False) -> RandomWalk:
    """Return the walk of SGD on N(0,1) gradients, u = sum_k mu^k g_{t-k}, with decoupled decay.

    Unlike the other walks, this one is proportional to the rms of the gradients.
    """
    check_momentum("momentum", momentum)
    power, overlap = _nesterov(momentum) if nesterov else (1 / (1 - momentum**2), 1.0)
    return RandomWalk(rms=math.sqrt(power), momentum=momentum, overlap=overlap, onset="growing")


def lion_walk(betas: tuple[float, float] = (0.9, 0.99)) -> RandomWalk:
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
    return RandomWalk(rms=1.0, momentum=beta2, overlap=signs * (1 - beta2) / beta2, onset="full")


def muon_walk(
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    adjust_lr: AdjustLr = "match_rms_adamw",
    shape: tuple[int, int] | None = None,
    coefficients: Coefficients | None = None,
) -> RandomWalk:
    """Return the walk of this library's Muon on an (out, in) matrix.

    A semi-orthogonal matrix has an rms of 1/sqrt(max(out, in)), so an update has 0.2 with
    `adjust_lr="match_rms_adamw"` and 1/sqrt(in) with "original", which needs the `shape`.
    Without `coefficients` the walk is Wen's: as if orthogonalizing only rescaled an update. It
    also makes updates forget each other faster, most so for square matrices; with `coefficients`
    (and a shape) both the rms and the overlap are those of orthogonalized noise
    (`orthogonalized_noise`). The first ten Nesterov steps are less alike than the later ones: 6% in
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
    overlap = _nesterov(momentum)[1] if nesterov else 1.0
    if coefficients is not None:
        noise = orthogonalized_noise(num_out, num_in, coefficients)
        rms *= noise.rms
        if momentum > 0:
            alike = _sum_over_lags(momentum, lambda k: noise.overlap_after(overlap * momentum**k))
            overlap = alike * (1 - momentum) / momentum
    return RandomWalk(rms=rms, momentum=momentum, overlap=overlap, onset="full")


def mixed_walk(walks: Sequence[RandomWalk], sizes: Sequence[int]) -> RandomWalk:
    """Return the walk of a matrix whose blocks, of these sizes, are updated independently.

    Mean squares and correlations of the parts add up in proportion to their sizes.
    """
    first = walks[0]
    if any((walk.momentum, walk.onset) != (first.momentum, first.onset) for walk in walks):
        raise ValueError("only random walks of one optimizer and momentum can be mixed")
    total = sum(sizes)
    powers = [size / total * walk.rms**2 for size, walk in zip(sizes, walks, strict=True)]
    alike = sum(power * walk.overlap for power, walk in zip(powers, walks, strict=True))
    rms, overlap = math.sqrt(sum(powers)), alike / sum(powers)
    return RandomWalk(rms, first.momentum, overlap, first.onset)


def random_walk(
    optimizer: BrownianOptimizer,
    *,
    shape: tuple[int, int] | None = None,
    **settings: Unpack[OptimizerSettings],
) -> RandomWalk:
    """Return an optimizer's random walk, given its settings as in `equilibrium_rms`."""
    given = optimizer_settings(optimizer, settings)
    if optimizer == "adamw":
        return adamw_walk(given["betas"][0]) if given else adamw_walk()
    if optimizer == "muon":
        return muon_walk(shape=shape, **given)
    return lion_walk(**given) if optimizer == "lion" else sgdm_walk(**given)


def optimizer_settings(optimizer: BrownianOptimizer, settings: OptimizerSettings) -> dict[str, Any]:
    """Return the settings that are not None; raise on those an optimizer does not have."""
    if optimizer not in get_args(BrownianOptimizer):
        names = ", ".join(get_args(BrownianOptimizer))
        raise ValueError(f"unknown optimizer {optimizer!r}; choose from {names}")
    given = {name: value for name, value in settings.items() if value is not None}
    foreign = sorted(given.keys() - _SETTINGS[optimizer])
    if foreign:
        takes = ", ".join(sorted(_SETTINGS[optimizer]))
        raise ValueError(f"{optimizer} has no {foreign[0]}; it takes {takes}")
    return given


def equilibrium_rms(
    lr: float,
    weight_decay: float,
    *,
    optimizer: BrownianOptimizer = "adamw",
    shape: tuple[int, int] | None = None,
    **settings: Unpack[OptimizerSettings],
) -> float:
    """Return the rms that noise and weight decay give a matrix, whatever the data (eq. 1).

    With a = 1 - lr * weight_decay, at a constant learning rate, and "slow" for small lr * wd:

    - adamw: lr sqrt((1-b)/(1+b)) sqrt((1 + a b) / ((1 - a^2)(1 - a b))) with b = beta1; slow,
      sqrt(lr / (2 wd)).
    - lion: slow, sqrt(lr d / (2 wd)) with d = 1 + (4/pi) sum_k arcsin(r b2^k); taking arcsin(x) for
      x gives about sqrt(lr / (pi wd)) / sqrt((1-b1)^2 + b1^2 (1-b2)/(1+b2)), 2-4% off.
    - sgdm on N(0,1) gradients with decoupled decay: slow, sqrt(lr / (2 wd)) / (1 - momentum). It is
      proportional to the rms of the gradients. `torch.optim.SGD` adds the decay to the gradient
      instead: sqrt(lr / (2 wd (1 - momentum))).
    - muon: slow, 0.2 sqrt((1+mu)/(1-mu)) sqrt(lr / (2 wd)); with Nesterov 8% less at mu = 0.95.
      It is an upper estimate: with Nesterov and mu = 0.95, Muon was measured at 0.72-0.77 of it for
      square matrices, 0.78 for 1:3, 0.82 for 1:4 and 0.85 for 1:8 with the "quintic" coefficients,
      whose singular values are 0.86-0.90 in rms; at 0.88-0.89, 0.98, 1.00 and 0.99 with
      "polar-express". With `shape` and `coefficients` this correction is in the result.

    Args:
        betas: AdamW's (0.9, 0.95 by default; beta2 has no part in the form), Lion's (0.9, 0.99).
        momentum: Muon's (0.95), SGD's (0.9). `nesterov`: Muon's (True), SGD's (False).
        adjust_lr: Muon's, as in `lrm.Muon`; so are `coefficients`.
        shape: Of the matrix, (out, in), for Muon with `coefficients` or `adjust_lr="original"`.
    """
    by_shape = settings.get("coefficients") or settings.get("adjust_lr") == "original"
    if shape is not None and not (optimizer == "muon" and by_shape):
        raise ValueError(
            "shape has no effect here: only Muon's walk depends on it, with `coefficients` or "
            'adjust_lr="original"'
        )
    return random_walk(optimizer, shape=shape, **settings).equilibrium(lr, weight_decay)


def relaxation_steps(lr: float, weight_decay: float) -> float:
    """Return the steps in which rms^2 approaches its equilibrium by a factor e: 1/(2 lr wd)."""
    shrink = shrink_per_step(lr, weight_decay)
    return 1 / (2 * shrink) if shrink else math.inf


def brownian_step(
    state: BrownianState, lr: float, weight_decay: float, walk: RandomWalk | None = None
) -> BrownianState:
    """Return the expected state after one more step on noise, at any learning rate.

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
    lrs: Iterable[float],
    weight_decay: float,
    start_rms: float = 0.0,
    walk: RandomWalk | None = None,
) -> list[float]:
    """Return the expected rms after each step of a run on noise, under its learning rates."""
    trajectory: list[float] = []
    state = BrownianState(start_rms)
    for lr in lrs:
        state = brownian_step(state, lr, weight_decay, walk)
        trajectory.append(state.rms)
    return trajectory


def shrink_per_step(lr: float, weight_decay: float) -> float:
    """Return lr * weight_decay, the share by which a step shrinks a weight."""
    if not (lr >= 0 and weight_decay >= 0 and lr * weight_decay < 2):
        raise ValueError(
            "there is an equilibrium for lr >= 0, weight_decay >= 0 and lr * weight_decay < 2, "
            f"got lr={lr}, weight_decay={weight_decay}"
        )
    return lr * weight_decay


def check_momentum(name: str, value: float) -> None:
    """Raise unless a momentum lies in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")


def _nesterov(momentum: float) -> tuple[float, float]:
    """Return mean square and overlap of sum_k c_k g_{t-k}: c_0 = 1 + mu, c_k = mu^(k+1)."""
    power = (1 + momentum) ** 2 + momentum**4 / (1 - momentum**2)
    tail = momentum**3 / (1 - momentum**2)
    return power, momentum * (1 + momentum + tail) / power


_MOST_LAGS = 1_000_000


def _sum_over_lags(momentum: float, correlation: Callable[[int], float]) -> float:
    """Return the sum of correlations over all lags that are not forgotten to 1e-6."""
    lags = math.ceil(math.log(1e-6) / math.log(momentum))
    if lags > _MOST_LAGS:
        raise ValueError(
            f"a momentum of {momentum} averages over {lags:,} steps, and {_MOST_LAGS:,} are the "
            "most: choose one that is farther from 1"
        )
    return sum(correlation(lag) for lag in range(1, lags + 1))


# Noise after Newton-Schulz. Muon orthogonalizes momenta that share most of their gradients. Two
# N(0,1) matrices of correlation r have, orthogonalized, a correlation below r, the more so the
# nearer the matrix is to a square, whose smallest singular values belong to noise alone. No closed
# form is known. Singular values of noise over the Frobenius norm go by the aspect ratio and
# 1/sqrt(short side), so a small matrix of the same aspect, scaled to the large one's singular
# values, gives both numbers.

_SHORT_SIDE, _LONGEST_ASPECT = 48, 8
"""Of the drawn matrices. Beyond this aspect, orthogonalizing does little more than rescale."""
_NUMBERS = 1 << 16
"""Numbers to draw in total: errors stay below half a percent."""
# Correlations at which pairs are drawn, denser near 1, where squares lose most.
_GRID = tuple(1 - (1 - i / 16) ** 2 for i in range(17))


class OrthogonalizedNoise(NamedTuple):
    """RMS and correlation of orthogonalized noise."""

    rms: float
    """Relative to that of a semi-orthogonal matrix."""
    ratios: tuple[float, ...]
    """Correlation after over correlation before, along the grid."""

    def overlap_after(self, correlation: float) -> float:
        """Return the correlation that two noises of a given one have once orthogonalized."""
        place = 16 * (1 - (1 - correlation) ** 0.5)
        below = min(int(place), 15)
        # The ratio of the two correlations is smooth: interpolate linearly.
        low, high = self.ratios[below : below + 2]
        return (low + (place - below) * (high - low)) * correlation


@lru_cache(maxsize=256)
@torch.no_grad()
def orthogonalized_noise(
    num_out: int, num_in: int, coefficients: Coefficients
) -> OrthogonalizedNoise:
    """Measure orthogonalized noise on a small matrix of the same aspect."""
    meant, long = sorted((max(num_out, 1), max(num_in, 1)))
    short = min(meant, _SHORT_SIDE)
    long = round(short * min(long / meant, _LONGEST_ASPECT))
    count = max(2, _NUMBERS // (short * long))
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, count, short, long, generator=generator)
    smaller = (short / meant) ** 0.5
    first = _orthogonalized(one, smaller, coefficients)
    square = first.square().mean()
    ratios = []
    for correlation in _GRID[1:-1]:
        mixed = correlation * one + (1 - correlation**2) ** 0.5 * other
        after = (first * _orthogonalized(mixed, smaller, coefficients)).mean() / square
        ratios.append(after.item() / correlation)
    # At zero correlation the ratio is a slope: use that of the nearest point.
    return OrthogonalizedNoise((square * long).sqrt().item(), (ratios[0], *ratios, 1.0))


def _orthogonalized(batch: Tensor, smaller: float, coefficients: Coefficients) -> Tensor:
    """Newton-Schulz from singular values smaller than the batch's own over its norm."""
    norm = torch.linalg.matrix_norm(batch, keepdim=True) * MARGIN[coefficients]
    x = batch * (smaller / norm)
    for a, b, c in COEFFICIENTS[coefficients]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x

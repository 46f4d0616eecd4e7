"""The noise indicator, and the criterion by which a tensor counts as trapped or free.

A tensor is **trapped** when its rms is the one that noise and decay alone would have given it, its
start has decayed away, and its gradients are mostly noise. It is **free** when its rms is another
one, or its gradients are mostly signal. All else is **open**: there is no prediction, or it is too
early for one. The paper calls matrices trapped because their norms coincide with Brownian motion,
and multipliers free because theirs do not (sec. 3); it leaves the indicator of noise open (sec. 6).
The bounds are ours.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from learnable_multipliers.equilibrium._random_walk import SETTLED

Verdict = Literal["trapped", "free", "open"]

WITHIN = 0.2
"""|log(measured / predicted)| up to which an rms counts as that of noise. The walk errs by 0.03 for
AdamW and 0.05 for Muon; the rest is what single matrices of small runs scatter by."""
SIGNAL = 2.0
"""Indicator from which on the momentum holds more signal than noise."""
_SIGMAS = 3
"""How many times its sampling error a number must pass its bound by, so that small tensors count
as free on evidence alone."""


def noise_ratio(beta1: float, beta2: float, steps: int) -> float:
    """Return E[m^2] / E[v] on independent gradients after some steps, moments started at zero.

    E[m^2] = s^2 (1-b1)/(1+b1) (1 - b1^(2t)) and E[v] = s^2 (1 - b2^t) for gradients of rms s.
    """
    if steps < 1:
        raise ValueError(f"moments say nothing before the first step, got steps={steps}")
    return (1 - beta1) / (1 + beta1) * (1 - beta1 ** (2 * steps)) / (1 - beta2**steps)


@torch.no_grad()
def noise_indicator(
    first: Tensor, second: Tensor, beta1: float, beta2: float, steps: int
) -> Tensor:
    """Return mean(m^2) / mean(v) over that of pure noise: 1 for noise, more with a signal.

    A gradient that never changes gives (1+b1)/(1-b1), 19 at b1 = 0.9; gradients that take back
    the last step's give less than 1. On n independent numbers of noise it errs by sqrt(2/n).
    `second` may be one average for all numbers, beta2 = 0 if it needs no correction. Where no
    gradient has come yet the result is NaN.
    """
    ratio = first.double().square().mean() / second.double().mean()
    return ratio / noise_ratio(beta1, beta2, steps)


def log_ratio(measured: float, predicted: float | None) -> float | None:
    """Return log(measured / predicted); None where there is no prediction, or no logarithm."""
    if not predicted or not measured or math.isinf(predicted):
        return None
    return math.log(measured / predicted)


def indicator_of(
    first: Tensor | None, second: Tensor | None, beta1: float, beta2: float, steps: int
) -> float | None:
    """Return the noise indicator of a tensor; None without moments or gradients so far."""
    if first is None or second is None or steps == 0:
        return None
    found = noise_indicator(first, second, beta1, beta2, steps).item()
    return None if math.isnan(found) else found


def verdict_of(
    ratio: float | None,
    error: float | None,
    settling: float | None,
    indicator: float | None,
    size: int,
) -> Verdict:
    """Return the verdict on a tensor of `size` numbers.

    Args:
        ratio: log(measured / predicted), and `error`, its standard deviation on noise.
        settling: 2 wd sum(lr) so far.
        indicator: Its standard deviation on noise is sqrt(2 / size).
    """
    if indicator is not None and indicator > SIGNAL + _SIGMAS * math.sqrt(2 / max(size, 1)):
        return "free"
    if ratio is None or error is None or settling is None:
        return "open"
    if abs(ratio) > WITHIN + _SIGMAS * error:
        return "free"
    return "trapped" if settling >= SETTLED else "open"

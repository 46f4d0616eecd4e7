"""How far gradients are from pure noise, from the moments that an optimizer keeps anyway."""

from __future__ import annotations

import torch
from torch import Tensor


def noise_ratio(beta1: float, beta2: float, steps: int) -> float:
    """Return E[m^2] / E[v] on independent gradients after some steps, moments started at zero.

    E[m^2] = s^2 (1-b1)/(1+b1) (1 - b1^(2t)) and E[v] = s^2 (1 - b2^t) for gradients of rms s.
    """
    if steps < 1:
        raise ValueError(f"moments say nothing before the first step, got steps={steps}")
    return (1 - beta1) / (1 + beta1) * (1 - beta1 ** (2 * steps)) / (1 - beta2**steps)


@torch.no_grad()
def noise_indicator(
    first: Tensor, second: Tensor, beta1: float, beta2: float, steps: int, dim: int | None = None
) -> Tensor:
    """Return mean(m^2) / mean(v) over that of pure noise: 1 for noise, more with a signal.

    A gradient that never changes gives (1+b1)/(1-b1), 19 at b1 = 0.9; gradients that take back
    the last step's give less than 1. On n independent numbers of noise it errs by sqrt(2/n).
    `second` may be one average for all numbers, beta2 = 0 if it needs no correction. With `dim` the
    means are along that axis. Where no gradient has come yet the result is not a number.
    """
    of_first, of_second = first.double().square(), second.double()
    if dim is None:
        ratio = of_first.mean() / of_second.mean()
    else:
        ratio = of_first.mean(dim) / of_second.mean(dim)
    return ratio / noise_ratio(beta1, beta2, steps)

"""What row and column multipliers would have to learn from, on a matrix that carries none.

A row multiplier's gradient is the sum of W G over the row (eq. 4), a column's that over the column.
AdamW's moments of G give its average exactly, up to the drift of W, but its noise only as far as
the numbers of a row are independent. Real gradients share noise along rows, so these indicators are
mostly too high: `benchmarks/row_indicators.py` compares them with step by step averages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learnable_multipliers.equilibrium._prediction import Trained
from learnable_multipliers.equilibrium._readings import noise_ratio

_FORGOTTEN = 1e-6
"""Share of a step in the momentum from which on it no longer counts."""


@dataclass(frozen=True, kw_only=True)
class Gains:
    """Noise indicators of the multiplier gradients that a matrix would have.

    1 for noise that is independent from number to number; more for noise that a row shares.
    """

    row_indicator: float
    row_error: float
    """Standard deviation on noise."""
    col_indicator: float
    col_error: float


def momentum_overlap(lrs: Sequence[float], weight_decay: float, beta1: float, steps: int) -> float:
    """Return c = -E[w m] / s of an AdamW weight in training on noise of rms s, after `steps`.

    The weight has just moved against the gradients that are in its momentum:
    c <- (1 - lr wd) b1 c + lr E[m^2] / (1 - b1^t) with E[m^2] = (1-b1)/(1+b1) (1 - b1^(2t)),
    lr / (1 + b1) later on.

    Args:
        lrs: Rates of the last steps; those before the momentum's memory change nothing.
    """
    overlap = 0.0
    for step, lr in enumerate(lrs, start=steps - len(lrs) + 1):
        moved = lr * (1 - beta1) / (1 + beta1) * (1 + beta1**step)
        overlap = (1 - lr * weight_decay) * beta1 * overlap + moved
    return overlap


def memory(beta1: float) -> int:
    """Return how many steps a momentum remembers."""
    return 1 if beta1 == 0 else math.ceil(math.log(_FORGOTTEN) / math.log(beta1))


@torch.no_grad()
def axis_indicator(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    dim: int,
    betas: tuple[float, float],
    steps: int,
    overlap: float = 0.0,
) -> tuple[float, float]:
    """Return the noise indicator of the sums of W G along `dim`, and its error on noise.

    With independent gradients of rms s_ij and a weight that hardly changes over the momentum's
    memory, r_i = sum_j W_ij m_ij has the variance (1-b1)/(1+b1) (1 - b1^(2t)) sum_j W_ij^2 s_ij^2,
    and v_ij = (1 - b2^t) s_ij^2 on average. The weight holds its last steps, though, which gives
    W_ij m_ij the mean -c s_ij (`momentum_overlap`), and n of them outgrow the noise of a sum. So

        indicator = sum_i (sum_j W_ij m_ij + c s_ij)^2 / sum_ij W_ij^2 v_ij / `noise_ratio`

    with s_ij = sqrt(v_ij / (1 - b2^t)): 1 on noise, with an error of sqrt(2 sum_i q_i^2)/sum_i q_i
    for q_i = sum_j W_ij^2 v_ij, sqrt(2/n) for n equal ones. It is more than 1 with a signal along
    W, and also where the noise itself is shared along a row: moments cannot tell the two apart.
    """
    weight, first, second = weight.double(), first.double(), second.double()
    size = (second / (1 - betas[1] ** steps)).sqrt()
    sums = (weight * first + overlap * size).sum(dim)
    noise = (weight.square() * second).sum(dim)
    total = noise.sum()
    found = sums.square().sum() / total / noise_ratio(*betas, steps)
    return found.item(), (2 * noise.square().sum()).sqrt().div(total).item()


def read_gains(tensor: Trained, lrs: Sequence[float] | None, lr: float) -> Gains | None:
    """Return what multipliers of a matrix would be worth; None without both of its moments.

    Args:
        lrs: The base rate of every step; without it that of all was `lr`.
    """
    matrix, first, second = tensor.matrix, tensor.first, tensor.second
    if matrix is None or tensor.walk is None or first is None or second is None:
        return None
    if tensor.steps == 0 or not bool((tensor.value * second).any()):
        return None
    remembered = min(memory(tensor.betas[0]), tensor.steps)
    last = [lr] * remembered if lrs is None else list(lrs[-remembered:])
    rates = [rate * tensor.walk.lr_scale for rate in last]
    overlap = momentum_overlap(rates, tensor.walk.weight_decay, tensor.betas[0], tensor.steps)
    moments = tensor.value, first, second
    out, into = matrix.dims
    row, row_error = axis_indicator(*moments, into, tensor.betas, tensor.steps, overlap)
    col, col_error = axis_indicator(*moments, out, tensor.betas, tensor.steps, overlap)
    return Gains(row_indicator=row, row_error=row_error, col_indicator=col, col_error=col_error)

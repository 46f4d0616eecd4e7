"""Measure one tensor against noise and decay: rms, noise indicator, verdict.

A tensor is **trapped** if its rms is what noise and decay alone would give it, its start has
decayed away, and its gradients are mostly noise. It is **free** if its rms differs from that, or if
its gradients are mostly signal. Otherwise it is **open**: there is no prediction, or it is too
early for one. The paper calls matrices trapped because their norms coincide with Brownian motion,
and multipliers free because theirs do not (sec. 3); it leaves the indicator of noise open (sec. 6).
The bounds are our choice.

Embeddings are read row by row, as a row gets gradients only when its token occurs (app. B). AdamW
moves a rare row by a fixed amount at each occurrence, and between two of them only decay acts: the
rarer the token, the smaller the rms of its row on pure noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal

import torch
from torch import Tensor

from learnable_multipliers.equilibrium._prediction import Expectation, TensorPart, TrainedTensor
from learnable_multipliers.equilibrium._random_walk import SETTLED
from learnable_multipliers.equilibrium._simulation import simulate_brownian

Verdict = Literal["trapped", "free", "open"]

WITHIN = 0.2
"""Largest |log(measured / predicted)| of an rms that counts as that of noise. The error of the walk
is 0.03 for AdamW and 0.05 for Muon; the rest is the scatter of single matrices in small runs."""
SIGNAL = 2.0
"""Indicator above which the momentum holds more signal than noise."""
_SIGMAS = 3
"""Sampling errors by which a number must exceed its bound, so that small tensors count as free only
on evidence."""
_GRID, _ROWS, _NUMBERS = 12, 512, 4
"""Simulated frequencies, rows per frequency, and numbers per row. The numbers of a row have their
gradients in the same steps, so it takes many rows: 2% error in rms, 5% if gradients are few."""


@dataclass(frozen=True, kw_only=True)
class TensorReading:
    """Measurements of one tensor, and the verdict on it."""

    name: str
    """Of the parameter."""
    part: TensorPart
    """`weight` (the raw weight where there are multipliers), `row`, `col` or `scalar`."""
    kind: Literal["matrix", "multiplier", "vector"]
    role: str
    size: int
    """Numbers in it."""
    steps: int
    measured: float
    """RMS now."""
    predicted: float | None
    """RMS that noise alone would give it."""
    log_ratio: float | None
    """log(measured / predicted)."""
    error: float | None
    """Standard deviation of the log ratio on noise."""
    settling: float | None
    """2 wd sum(lr) so far; at 4 and above the start is forgotten."""
    indicator: float | None
    """Noise indicator: 1 for pure noise."""
    verdict: Verdict
    note: str = ""
    """The reason if a value is missing."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Rows of about the same frequency, together."""

    low: float
    high: float
    """Share of the steps in which a row has a gradient, low < share <= high."""
    num_rows: int
    measured: float
    """RMS over the rows."""
    predicted: float | None
    log_ratio: float | None
    """log(measured / predicted)."""
    indicator: float | None
    """Noise indicator of all rows together: that of a rare row depends on its last occurrence."""
    verdict: Verdict


@dataclass(frozen=True)
class TokenRows:
    """An embedding row by row."""

    rms: Tensor
    """Of each row, (rows,)."""
    predicted: Tensor | None
    """RMS that noise alone would give each row, (rows,)."""
    bands: tuple[Band, ...]
    """Rows by frequency, a band per decade; a single band if frequencies are unknown."""


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

    A constant gradient gives (1+b1)/(1-b1), 19 at b1 = 0.9; gradients that undo the previous ones
    give less than 1. On n independent numbers of noise its error is sqrt(2/n). `second` may be one
    average for all numbers, with beta2 = 0 if it needs no bias correction. Without any gradient so
    far the result is NaN.
    """
    ratio = first.double().square().mean() / second.double().mean()
    return ratio / noise_ratio(beta1, beta2, steps)


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


def rms(values: Tensor) -> float:
    """Return the root of the mean square; 0 without any numbers."""
    return values.double().square().mean().sqrt().item() if values.numel() else 0.0


def read_tensor(
    tensor: TrainedTensor,
    expected: Expectation | None,
    note: str,
    starts: Mapping[tuple[str, str], float],
) -> TensorReading:
    """Measure a tensor and compare it with its expectation, given the rms of all at the start."""
    matrix, size = tensor.matrix, tensor.value.numel()
    measured, indicator = rms(tensor.value), _indicator(tensor)
    predicted = error = None
    settling = None if expected is None else expected.settling
    if expected is not None and not note:
        start_rms = starts.get(tensor.key, tensor.start_rms)
        if start_rms is None and expected.settling >= SETTLED:
            start_rms = 0.0
        if start_rms is None:
            note = "its start is not forgotten: give start, a diagnosis from before the first step"
        else:
            predicted, error = expected.rms(start_rms), expected.log_error(start_rms, size)
    roles = dict.fromkeys(block.role for block in matrix.blocks) if matrix else [tensor.kind]
    ratio = _log_ratio(measured, predicted)
    return TensorReading(
        name=tensor.name,
        part=tensor.part,
        kind=tensor.kind,
        role="/".join(roles),
        size=size,
        steps=tensor.steps,
        measured=measured,
        predicted=predicted,
        log_ratio=ratio,
        error=error,
        settling=settling,
        indicator=indicator,
        verdict=verdict_of(ratio, error, settling, indicator, size),
        note=note,
    )


def row_frequency(counts: Tensor, tokens_per_step: int) -> Tensor:
    """Return the share of steps in which each token occurs, from its count in the data.

    With c of all the n tokens: 1 - (1 - c/n)^tokens_per_step.
    """
    shares = counts.double() / counts.sum()
    return -torch.expm1(tokens_per_step * torch.log1p(-shares))


def read_rows(
    tensor: TrainedTensor,
    lrs: Sequence[float] | None,
    start_rms: Tensor | None,
    frequency: Tensor | None,
) -> TokenRows:
    """Read an embedding; rows are predicted if rates, start and frequencies are known."""
    row_rms = tensor.value.double().square().mean(-1).sqrt().cpu()
    known = frequency is not None
    frequency = frequency.double().cpu() if known else torch.ones_like(row_rms)
    if frequency.shape != row_rms.shape:
        raise ValueError(
            f"frequency has shape {tuple(frequency.shape)}, but {tensor.name} has {len(row_rms)} "
            "rows"
        )
    predicted = settling = None
    if known and lrs is not None and start_rms is not None and tensor.walk is not None:
        rates = [lr * tensor.walk.lr_scale for lr in lrs]
        weight_decay = tensor.walk.weight_decay
        kept = math.prod(abs(1 - rate * weight_decay) for rate in rates)
        spread = row_spread(rates, weight_decay, tensor.betas, frequency)
        predicted = torch.hypot(spread, kept * start_rms)
        settling = Expectation(0.0, kept).settling
    edges = [(0.0, 1.0)]
    if known:
        lowest = frequency[frequency > 0].min().item() if bool((frequency > 0).any()) else 1.0
        decades = range(math.ceil(math.log10(lowest)) - 1, 0)
        edges = [(-1.0, 0.0), *((10.0**d, 10.0 ** (d + 1)) for d in decades)]
    bands = []
    for low, high in edges:
        rows = (frequency > low) & (frequency <= high)
        num_rows = int(rows.sum())
        if num_rows == 0:
            continue
        size = num_rows * tensor.value.shape[-1]
        measured = rms(row_rms[rows])
        expected = None if predicted is None else rms(predicted[rows])
        ratio = _log_ratio(measured, expected)
        indicator = _indicator(tensor, rows.to(tensor.value.device))
        band = Band(
            low=max(low, 0.0),
            high=high,
            num_rows=num_rows,
            measured=measured,
            predicted=expected,
            log_ratio=ratio,
            indicator=indicator,
            verdict=verdict_of(ratio, 1 / math.sqrt(2 * size), settling, indicator, size),
        )
        bands.append(band)
    return TokenRows(row_rms, predicted, tuple(bands))


def row_spread(
    lrs: Sequence[float], weight_decay: float, betas: tuple[float, float], frequency: Tensor
) -> Tensor:
    """Return the rms on noise of rows that started at zero, by the share of steps they move in.

    Simulated on a grid of frequencies.
    """
    occurring = frequency[frequency > 0]
    if not len(occurring) or not lrs:
        return torch.zeros_like(frequency)
    lowest = math.log(occurring.min().item())
    grid = torch.linspace(lowest, 0.0, _GRID, dtype=torch.float64).exp().clamp(max=1.0)
    shape, chance = (_GRID, _ROWS, _NUMBERS), grid[:, None].expand(_GRID, _ROWS)
    run = simulate_brownian("adamw", lrs, weight_decay, shape, betas=betas, frequency=chance)
    squares = run.row_rms.double().square().mean(-1)
    if lowest == 0.0:
        return squares.mean().sqrt().expand_as(frequency).clone()
    # Squares are smooth in the logarithm of the frequency: interpolate linearly.
    place = (frequency.clamp(min=math.exp(lowest)).log() - lowest) / -lowest * (_GRID - 1)
    below = place.long().clamp(max=_GRID - 2)
    square = torch.lerp(squares[below], squares[below + 1], place - below)
    return torch.where(frequency > 0, square, 0.0).sqrt()


def _log_ratio(measured: float, predicted: float | None) -> float | None:
    """Return log(measured / predicted); None without a prediction, or without a logarithm."""
    if not predicted or not measured or math.isinf(predicted):
        return None
    return math.log(measured / predicted)


def _indicator(tensor: TrainedTensor, rows: Tensor | EllipsisType = ...) -> float | None:
    """Return the noise indicator of a tensor; None without moments or gradients."""
    if tensor.first is None or tensor.second is None or tensor.steps == 0:
        return None
    first, second = tensor.first[rows], tensor.second[rows]
    indicator = noise_indicator(first, second, *tensor.betas, tensor.steps).item()
    return None if math.isnan(indicator) else indicator

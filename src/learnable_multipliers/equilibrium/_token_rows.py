"""The rows of an embedding, each with gradients as rare as its token (app. B).

AdamW moves a rare row by a fixed amount each time its token comes, and between two occurrences
decay works alone: the rarer the token, the smaller the rms of its row on pure noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.equilibrium._prediction import Expectation, Trained
from learnable_multipliers.equilibrium._simulation import simulate_brownian
from learnable_multipliers.equilibrium._verdict import (
    Verdict,
    indicator_of,
    log_ratio,
    verdict_of,
)

_GRID, _NUMBERS = 12, 1024
"""Frequencies that are simulated, and numbers drawn for each: 2% in rms."""


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
    indicator: float | None
    """From the sums over all rows: a rare row alone shows how long ago its token came."""
    verdict: Verdict

    @property
    def log_ratio(self) -> float | None:
        """log(measured / predicted)."""
        return log_ratio(self.measured, self.predicted)


@dataclass(frozen=True)
class TokenRows:
    """An embedding row by row."""

    rms: Tensor
    """Of each row, (rows,)."""
    predicted: Tensor | None
    """RMS that noise would have given each row, (rows,)."""
    bands: tuple[Band, ...]
    """Rows by frequency, a band per decade; all rows in one where frequencies are not known."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the bands, not every row."""
        return {"bands": [{**asdict(band), "log_ratio": band.log_ratio} for band in self.bands]}


def row_frequency(counts: Tensor, tokens_per_step: int) -> Tensor:
    """Return the share of steps in which each token occurs, from its count in the data.

    With c of all the n tokens: 1 - (1 - c/n)^tokens_per_step.
    """
    shares = counts.double() / counts.sum()
    return -torch.expm1(tokens_per_step * torch.log1p(-shares))


def read_rows(
    tensor: Trained,
    lrs: Sequence[float] | None,
    start_rms: Tensor | None,
    frequency: Tensor | None,
) -> TokenRows:
    """Read an embedding; rows are predicted where rates, start and frequencies are known."""
    rms = tensor.value.double().square().mean(-1).sqrt().cpu()
    if frequency is None:
        everything = torch.ones(len(rms), dtype=torch.bool)
        return TokenRows(rms, None, (_band(tensor, rms, None, everything, (0.0, 1.0), None),))
    frequency = frequency.double().cpu()
    if frequency.shape != rms.shape:
        raise ValueError(
            f"frequency has shape {tuple(frequency.shape)}, but {tensor.name} has {len(rms)} rows"
        )
    predicted = settling = None
    if lrs is not None and start_rms is not None and tensor.rule == "adamw":
        rates = [lr * tensor.lr_scale for lr in lrs]
        betas = (tensor.beta1, tensor.beta2)
        spread = _spread(rates, tensor.weight_decay, betas, frequency)
        kept = math.prod(abs(1 - rate * tensor.weight_decay) for rate in rates)
        predicted = torch.hypot(spread, kept * start_rms)
        settling = Expectation(0.0, kept).settling
    bands = []
    lowest = frequency[frequency > 0].min().item() if bool((frequency > 0).any()) else 1.0
    decades = range(math.floor(math.log10(lowest) + 1e-9), 0)
    edges = [(-1.0, 0.0), *((10.0**d, 10.0 ** (d + 1)) for d in decades)]
    for low, high in edges:
        rows = (frequency > low) & (frequency <= high)
        if bool(rows.any()):
            limits = (max(low, 0.0), high)
            bands.append(_band(tensor, rms, predicted, rows, limits, settling))
    return TokenRows(rms, predicted, tuple(bands))


def _band(
    tensor: Trained,
    rms: Tensor,
    predicted: Tensor | None,
    rows: Tensor,
    limits: tuple[float, float],
    settling: float | None,
) -> Band:
    here = rows.to(tensor.value.device)
    first, second = (None if m is None else m[here] for m in (tensor.first, tensor.second))
    indicator = indicator_of(first, second, tensor.beta1, tensor.beta2, tensor.steps)
    size = int(rows.sum()) * tensor.value.shape[-1]
    measured = _root_mean_square(rms[rows])
    expected = None if predicted is None else _root_mean_square(predicted[rows])
    error = 1 / math.sqrt(2 * size)
    return Band(
        low=limits[0],
        high=limits[1],
        num_rows=int(rows.sum()),
        measured=measured,
        predicted=expected,
        indicator=indicator,
        verdict=verdict_of(log_ratio(measured, expected), error, settling, indicator, size),
    )


def _spread(
    lrs: Sequence[float], weight_decay: float, betas: tuple[float, float], frequency: Tensor
) -> Tensor:
    """Return the rms of rows that started at zero, simulated on a grid of frequencies."""
    occurring = frequency[frequency > 0]
    if not len(occurring) or not lrs:
        return torch.zeros_like(frequency)
    lowest = math.log(occurring.min().item())
    grid = torch.linspace(lowest, 0.0, _GRID, dtype=torch.float64).exp().clamp(max=1.0)
    run = simulate_brownian(
        "adamw", lrs, weight_decay, (_GRID, _NUMBERS), betas=betas, frequency=grid
    )
    squares = run.row_rms.double().square()
    if lowest == 0.0:
        return squares.mean().sqrt().expand_as(frequency).clone()
    # Squares are smooth in the logarithm of the frequency; between two of the grid, a line.
    place = (frequency.clamp(min=math.exp(lowest)).log() - lowest) / -lowest * (_GRID - 1)
    below = place.long().clamp(max=_GRID - 2)
    square = torch.lerp(squares[below], squares[below + 1], place - below)
    return torch.where(frequency > 0, square, 0.0).sqrt()


def _root_mean_square(values: Tensor) -> float:
    return values.square().mean().sqrt().item()

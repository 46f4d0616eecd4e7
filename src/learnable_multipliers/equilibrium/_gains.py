"""Noise of the gradients that row and column multipliers would have, in a run without any.

At multipliers of 1 these gradients are sums of W_ij G_ij over a row or a column (eq. 4), so they
follow from the weight and its gradient. Averaged over the steps of a run as AdamW would average
them, they show how much of them is signal. The moments of the weight do not show that: noise that a
row shares would count as signal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from learnable_multipliers._multiplier import Matrix, raw_dtype
from learnable_multipliers._names import named_parameters
from learnable_multipliers._planner import plan
from learnable_multipliers.equilibrium._readings import noise_indicator
from learnable_multipliers.optim._sharding import full

BETAS = (0.9, 0.95)
"""Betas of the averages: the defaults of multipliers."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How noisy the gradients of one matrix's row or column multipliers would be."""

    name: str
    """Of the parameter."""
    part: Literal["row", "col"]
    size: int
    """How many multipliers there would be."""
    steps: int
    indicator: float
    """Noise indicator: 1 for pure noise."""


@dataclass
class _Averages:
    """Moments of the gradients of one matrix's row or column multipliers."""

    first: Tensor
    second: Tensor
    steps: int = 0

    def add(self, grad: Tensor) -> None:
        self.steps += 1
        self.first.lerp_(grad, 1 - BETAS[0])
        self.second.lerp_(grad.square(), 1 - BETAS[1])


class Gains:
    """Averages the gradients that the multipliers of the "full" placement would have."""

    def __init__(self, model: nn.Module, trained: Iterable[Tensor]):
        planned, mine = plan(model, "full"), {id(parameter) for parameter in trained}
        self._weights: dict[str, tuple[Tensor, Matrix]] = {}
        self._averages: dict[tuple[str, Literal["row", "col"]], _Averages] = {}
        for name, parameter in named_parameters(model):
            matrix = planned[name].matrix
            if matrix is not None and matrix.carries and id(parameter) in mine:
                self._weights[name] = parameter, matrix

    @torch.no_grad()
    def follow(self) -> None:
        """Add the gradients of the step that is about to be taken."""
        for name, (weight, matrix) in self._weights.items():
            if weight.grad is None:
                continue
            for part, grad in gain_gradients(matrix, weight.detach(), weight.grad).items():
                averages = self._averages.get((name, part))
                if averages is None:
                    averages = _Averages(torch.zeros_like(grad), torch.zeros_like(grad))
                    self._averages[name, part] = averages
                averages.add(grad)

    def read(self) -> tuple[Gain, ...]:
        """Return the indicators so far; a matrix whose gradients were all zero has none."""
        gains = []
        for (name, part), averages in self._averages.items():
            value = noise_indicator(averages.first, averages.second, *BETAS, averages.steps)
            indicator, size = value.item(), averages.first.numel()
            if indicator == indicator:
                gains.append(
                    Gain(name=name, part=part, size=size, steps=averages.steps, indicator=indicator)
                )
        return tuple(gains)


def gain_gradients(
    matrix: Matrix, weight: Tensor, grad: Tensor
) -> dict[Literal["row", "col"], Tensor]:
    """Return the gradients of multipliers at 1: sums of W_ij G_ij over each row and column.

    Only for the multipliers that the matrix carries: a head, for instance, has no rows.
    """
    out_dim, in_dim = matrix.dims
    dtype = raw_dtype(weight)
    product = weight.to(dtype) * grad.to(dtype)
    sums: dict[Literal["row", "col"], Tensor] = {}
    if matrix.row:
        sums["row"] = full(product.sum(in_dim))
    if matrix.col:
        sums["col"] = full(product.sum(out_dim))
    return sums

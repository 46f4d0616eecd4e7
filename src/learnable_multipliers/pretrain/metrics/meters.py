"""What the training loop measures: mean loss, elapsed time, and statistics of the weights."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from learnable_multipliers._plan import Plan
from learnable_multipliers.equilibrium import TensorReading
from learnable_multipliers.optim import multipliers
from learnable_multipliers.optim._base import MultiplierOptimizer

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class LossReading:
    """Losses since the last reset."""

    total: float = 0.0
    """Sum of the finite losses."""
    steps: int = 0
    left_out: int = 0
    """Steps whose loss was not finite."""
    skipped_in_a_row: int = 0
    """Consecutive skipped steps up to now; a reset does not change it."""

    @property
    def mean(self) -> float | None:
        """Mean of the finite losses; None without any."""
        counted = self.steps - self.left_out
        return self.total / counted if counted else None


class LossMeter:
    """Adds up losses on the device; only `read` synchronizes with it."""

    def __init__(self, device: torch.device, start: LossReading | None = None):
        start = start or LossReading()
        self._total = torch.tensor(start.total, dtype=torch.float32, device=device)
        self._steps = start.steps
        counts = (start.left_out, start.skipped_in_a_row)
        self._left_out, self._skipped = torch.tensor(counts, device=device).unbind()

    def add(self, loss: Tensor, skipped: Tensor | None) -> None:
        """Add a step; a non-finite loss is counted and excluded from the mean.

        `skipped` is what the optimizer says of the step, the same on all ranks.
        """
        finite = loss.isfinite()
        self._total = self._total + loss.where(finite, 0.0)
        self._left_out = self._left_out + ~finite
        self._steps += 1
        if skipped is not None:
            self._skipped = (self._skipped + 1) * skipped

    def read(self) -> LossReading:
        """Return the losses since the last reset."""
        left_out, skipped = torch.stack((self._left_out, self._skipped)).tolist()
        return LossReading(self._total.item(), self._steps, left_out, skipped)

    def reset(self) -> None:
        """Start a new mean; the count of consecutive skipped steps continues."""
        self._total = torch.zeros_like(self._total)
        self._left_out = torch.zeros_like(self._left_out)
        self._steps = 0


class Stopwatch:
    """Counts the seconds spent inside its context."""

    def __init__(self, seconds: float = 0.0):
        self._before = seconds
        self._since: float | None = None

    def __enter__(self) -> Self:
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._before = self.seconds
        self._since = None

    @property
    def seconds(self) -> float:
        """Seconds so far, including those of an open context."""
        if self._since is None:
            return self._before
        return self._before + time.perf_counter() - self._since


@torch.no_grad()
def describe_weights(
    optimizer: MultiplierOptimizer, plan: Plan, readings: Iterable[TensorReading]
) -> dict[str, Any]:
    """Return rms, predicted rms, roles and quantiles of the multipliers, by parameter name."""
    matrices = {entry.name: entry.matrix for entry in plan.entries if entry.matrix is not None}
    raw = [r for r in readings if r.part == "weight" and r.name in matrices]
    return {
        "raw_rms": {reading.name: reading.measured for reading in raw},
        "predicted_rms": {r.name: r.predicted for r in raw if r.predicted is not None},
        "multipliers": {
            name: {kind: _quantiles(value) for kind, value in values.items()}
            for name, values in multipliers(optimizer).items()
        },
        "roles": {
            name: "/".join(dict.fromkeys(block.role for block in matrix.blocks))
            for name, matrix in matrices.items()
        },
    }


def _quantiles(values: Tensor) -> list[float]:
    at = torch.tensor(QUANTILES, dtype=torch.float32, device=values.device)
    return torch.quantile(values.float().flatten(), at).tolist()

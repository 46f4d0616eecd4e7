"""The mean loss between two looks, added up where it is computed: reading it is what waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossReading:
    """Steps since the last look, and the last steps in a row that could not be taken."""

    total: float
    """Sum of the finite losses."""
    steps: int
    left_out: int
    """Steps whose loss was not finite."""
    skipped_in_a_row: int
    """Up to now, those before the last look included."""

    @property
    def mean(self) -> float | None:
        """Mean of the finite losses; None without any."""
        counted = self.steps - self.left_out
        return self.total / counted if counted else None


NOTHING = LossReading(0.0, 0, 0, 0)


class LossMeter:
    """Takes the loss of each step; nothing in it waits for the device before `read`."""

    def __init__(self, device: torch.device, start: LossReading = NOTHING):
        self._total = torch.tensor(start.total, dtype=torch.float32, device=device)
        self._steps = start.steps
        counts = (start.left_out, start.skipped_in_a_row)
        self._left_out, self._skipped = torch.tensor(counts, device=device).unbind()

    def add(self, loss: Tensor, grad_norm: Tensor | None) -> None:
        """Count a step: a loss that is not finite is left out, and no statistic sees it."""
        finite = loss.isfinite()
        self._total = self._total + loss.where(finite, 0.0)
        self._left_out = self._left_out + ~finite
        self._steps += 1
        if grad_norm is not None:
            # The optimizer takes no step with such a norm.
            self._skipped = (self._skipped + 1) * ~grad_norm.isfinite()

    def read(self) -> LossReading:
        """Return what has been added up."""
        left_out, skipped = torch.stack((self._left_out, self._skipped)).tolist()
        return LossReading(self._total.item(), self._steps, left_out, skipped)

    def start_anew(self) -> None:
        """Let the next reading begin here; steps skipped in a row go on."""
        self._total = torch.zeros_like(self._total)
        self._left_out = torch.zeros_like(self._left_out)
        self._steps = 0

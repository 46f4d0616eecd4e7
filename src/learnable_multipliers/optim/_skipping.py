"""Count skipped steps; warn when 20 in a row are skipped."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from learnable_multipliers.kernels._backend import is_capturing

_IN_A_ROW = 20
"""Skipped steps in a row that cause a warning, and steps between two checks for them."""


class SkippedSteps:
    """Counts on the device. The host reads the counts, and waits, only every twenty steps."""

    def __init__(self, device: torch.device):
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self.last = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the last step was skipped."""
        self._in_a_row = torch.zeros_like(self.total)
        self._calls = 0
        self._has_warned = False

    def count_(self, finite: Tensor) -> None:
        """Count a step; warn once for each series of skipped steps."""
        self.last = ~finite
        self.total += self.last
        self._in_a_row += 1
        self._in_a_row *= self.last
        self._calls += 1
        if self._calls % _IN_A_ROW or is_capturing():
            return
        number = int(self._in_a_row)
        if number >= _IN_A_ROW and not self._has_warned:
            warnings.warn(
                f"the last {number} optimizer steps were skipped: gradients were not "
                "finite, and nothing is trained. Look at the loss, or restart from a checkpoint",
                stacklevel=6,
            )
        self._has_warned = number >= _IN_A_ROW

"""Counts the steps that were skipped, and warns where they do not end."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from learnable_multipliers.kernels._backend import is_capturing

_IN_A_ROW = 20
"""Skipped steps, one after the other, that a user is warned of."""


class SkippedSteps:
    """Counts on the device; the host looks every twenty steps, and a GPU waits for it then only."""

    def __init__(self, device: torch.device):
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self.last = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the last step was skipped."""
        self._in_a_row = torch.zeros_like(self.total)
        self._calls = 0
        self._has_warned = False

    def count_(self, finite: Tensor) -> None:
        """Count a step; warn of many in a row, once for each time that they begin."""
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

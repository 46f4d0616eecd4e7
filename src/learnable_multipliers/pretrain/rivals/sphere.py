"""The direction of magnitude-direction decoupling (arXiv 2606.25971): weights of fixed norm.

    W = row W^ col,   W^ <- R N(W^ - lr U(row col G)),   row and col by Adam without decay

Row and column are learnable multipliers, so the whole method is this optimizer with the placement
full and a multiplier decay of 0; by itself it is the paper's fixed sphere without magnitudes. The
sphere is that of the whole matrix (the public code's mode "flat"), with the norm that the matrix
starts with in place of sqrt(max(rows, columns)): its mode that preserves the start, and a factor on
the learning rate. Embedding and head train with AdamW, as in the public code unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from learnable_multipliers.pretrain.rivals.hyperball import Hyperball, to_norm


class Sphere(Hyperball):
    """AdamW or Muon on a sphere: as on a ball, with updates of any norm."""

    def apply_(
        self, weights: Sequence[Tensor], updates: Sequence[Tensor], group: dict[str, Any]
    ) -> None:
        """Take a step without decay, and return to the sphere."""
        if group["role"] != "hidden":
            super().apply_(weights, updates, group)
            return
        for weight, update in zip(weights, updates, strict=True):
            radius = self.radius(weight)
            weight.sub_(update, alpha=group["lr"])
            weight.copy_(to_norm(weight, radius))

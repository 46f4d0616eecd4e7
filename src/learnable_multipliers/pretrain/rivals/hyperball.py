"""Hyperball (arXiv 2606.16899): weights and updates of fixed Frobenius norm, no decay.

    W <- R N(W - lr R N(U)),   R = |W at the start|,   N(X) = X / |X|

The learning rate is the angle of a step. Hidden matrices are held on the ball; the paper says all
matrices, and does not say what it does with embedding and head, which train with AdamW here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.pretrain.rivals.rival import Rival

_TINY = 1e-15
"""Norm below which a matrix has no direction; it becomes 0, as in the public code."""


class Hyperball(Rival):
    """AdamW or Muon on a ball."""

    def apply_(
        self, weights: Sequence[Tensor], updates: Sequence[Tensor], group: dict[str, Any]
    ) -> None:
        """Move hidden matrices along their ball."""
        if group["role"] != "hidden":
            super().apply_(weights, updates, group)
            return
        for weight, update in zip(weights, updates, strict=True):
            radius = self.radius(weight)
            weight.sub_(self.scaled(update, radius), alpha=group["lr"])
            weight.copy_(to_norm(weight, radius))

    def scaled(self, update: Tensor, radius: Tensor) -> Tensor:
        """Return an update as long as the weight."""
        return to_norm(update, radius)

    def radius(self, weight: Tensor) -> Tensor:
        """Return the norm that a matrix had before its first step."""
        state = self.state[weight]
        if "radius" not in state:
            state["radius"] = torch.linalg.vector_norm(weight)
        return state["radius"]


def to_norm(matrix: Tensor, radius: Tensor) -> Tensor:
    """Return a matrix scaled to a Frobenius norm."""
    norm = torch.linalg.vector_norm(matrix)
    return matrix * torch.where(norm < _TINY, 0, radius / norm.clamp_min(_TINY))

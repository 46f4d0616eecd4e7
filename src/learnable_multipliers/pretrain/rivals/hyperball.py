"""Hyperball (arXiv 2606.16899): weights and updates of fixed Frobenius norm, no decay.

    W <- R N(W - lr R N(U)),   R = |W at the start|,   N(X) = X / |X|

The learning rate is the angle of a step. Hidden matrices are held on the ball; the paper says all
matrices, and does not say what it does with embedding and head, which train with AdamW here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.pretrain.rivals.rival import Rival, write_

_TINY = 1e-15
"""Norm below which a matrix has no direction; it becomes 0, as in the public code."""


class Hyperball(Rival):
    """AdamW or Muon on a ball."""

    def apply_(self, weights: list[Tensor], updates: Tensor, group: dict[str, Any]) -> None:
        """Move hidden matrices along their ball."""
        if group["role"] != "hidden":
            super().apply_(weights, updates, group)
            return
        radii = torch.stack([self.radius(weight) for weight in weights])[:, None, None]
        moved = torch.stack(weights).sub_(self.scaled(updates, radii), alpha=group["lr"])
        write_(weights, to_norm(moved, radii))

    def scaled(self, updates: Tensor, radii: Tensor) -> Tensor:
        """Return updates as long as their weights."""
        return to_norm(updates, radii)

    def radius(self, weight: Tensor) -> Tensor:
        """Return the norm that a matrix had before its first step."""
        state = self.state[weight]
        if "radius" not in state:
            state["radius"] = torch.linalg.vector_norm(weight)
        return state["radius"]


def to_norm(matrices: Tensor, radii: Tensor) -> Tensor:
    """Return a batch of matrices, each scaled to a Frobenius norm."""
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return matrices * ((norms >= _TINY) * radii / norms.clamp_min(_TINY))

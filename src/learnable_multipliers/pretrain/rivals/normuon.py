"""NorMuon (arXiv 2510.05491): rows of the orthogonalized momentum at equal size over time.

    V <- EMA of the mean square of each row of O,   U = O / sqrt(V), scaled to the norm of O

Muon's O = U V^T has rows of unlike sizes; dividing by their history evens them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.optim._batches import lr_factor
from learnable_multipliers.pretrain.rivals.rival import Rival, orthogonalized

_BETA = 0.95
_EPS = 1e-8
"""Both of the public code."""


class NorMuon(Rival):
    """Muon with rows of equal size."""

    def muon_updates(self, weights: Sequence[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the orthogonalized momentum of each gradient with even rows, in AdamW's size."""
        momenta = [self.nesterov_momentum(weight, group["momentum"]) for weight in weights]
        updates = []
        for weight, update in zip(weights, orthogonalized(momenta), strict=True):
            state = self.state[weight]
            square = state.setdefault("row_square", torch.zeros_like(weight[:, :1]))
            updates.append(even_rows_(update, square) * lr_factor("match_rms_adamw", *update.shape))
        return updates


def even_rows_(update: Tensor, square: Tensor) -> Tensor:
    """Divide rows by the root of their averaged mean square, kept in place; the norm stays."""
    square.lerp_(update.square().mean(1, keepdim=True), 1 - _BETA)
    even = update / (square.sqrt() + _EPS)
    norms = torch.linalg.vector_norm(update), torch.linalg.vector_norm(even).clamp_min(_EPS)
    return even * (norms[0] / norms[1])

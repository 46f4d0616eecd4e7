"""NorMuon (arXiv 2510.05491): rows of the orthogonalized momentum at equal size over time.

    V <- EMA of the mean square of each row of O,   U = O / sqrt(V), scaled to the norm of O

Muon's O = U V^T has rows of unlike sizes; dividing by their history evens them out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.optim._batches import lr_factor
from learnable_multipliers.pretrain.rivals.rival import Rival, each, orthogonalized, write_

_BETA = 0.95
_EPS = 1e-8
"""Both of the public code."""


class NorMuon(Rival):
    """Muon with rows of equal size."""

    def muon_updates(self, weights: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Return the orthogonalized momentum of each gradient with even rows, in AdamW's size."""
        updates = orthogonalized(self.nesterov_momenta(weights, group["momentum"]))
        states = [self.state[weight] for weight in weights]
        for state, update in zip(states, updates, strict=True):
            if "row_square" not in state:
                state["row_square"] = torch.zeros_like(update[:, :1])
        squares = each(states, "row_square")
        even, square = even_rows(updates, torch.stack(squares))
        write_(squares, square)
        return even * lr_factor("match_rms_adamw", *updates.shape[1:])


def even_rows(update: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows by the root of their averaged mean square; return that square, too.

    The norm of each matrix of the batch stays.
    """
    square = square.lerp(update.square().mean(2, keepdim=True), 1 - _BETA)
    even = update / (square.sqrt() + _EPS)
    norms = [torch.linalg.vector_norm(rows, dim=(1, 2), keepdim=True) for rows in (update, even)]
    return even * (norms[0] / norms[1].clamp_min(_EPS)), square

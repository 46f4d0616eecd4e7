"""Cautious weight decay (arXiv 2510.12402): decay only what the update shrinks anyway.

    W <- W - lr (U + wd 1[U W >= 0] W)

The paper has it for any optimizer and all weights that decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.pretrain.rivals.rival import Rival


class Cautious(Rival):
    """AdamW or Muon with cautious decay."""

    def apply_(
        self, weights: Sequence[Tensor], updates: Sequence[Tensor], group: dict[str, Any]
    ) -> None:
        """Decay the numbers of a weight whose sign is that of their update."""
        for weight, update in zip(weights, updates, strict=True):
            decayed = torch.where(update * weight >= 0, weight, 0)
            weight.sub_(update + group["weight_decay"] * decayed, alpha=group["lr"])

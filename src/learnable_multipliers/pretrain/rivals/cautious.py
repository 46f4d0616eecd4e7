"""Cautious weight decay (arXiv 2510.12402): decay only what the update shrinks anyway.

    W <- W - lr (U + wd 1[U W >= 0] W)

The paper has it for any optimizer and all weights that decay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.pretrain.rivals.rival import Rival, write_


class Cautious(Rival):
    """AdamW or Muon with cautious decay."""

    def apply_(self, weights: list[Tensor], updates: Tensor, group: dict[str, Any]) -> None:
        """Decay the numbers of a weight whose sign is that of their update."""
        batch = torch.stack(weights)
        decayed = (updates * batch >= 0) * batch
        write_(weights, batch.sub_(updates + group["weight_decay"] * decayed, alpha=group["lr"]))

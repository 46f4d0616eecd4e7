"""AdamC (arXiv 2506.02285): decay falls with the square of the learning rate.

    W <- W - lr U - (lr^2 / peak lr) wd W

on layers that a norm follows, so that the ratio of gradient to weight norm does not rise while the
rate falls. In our models that is every matrix but the head. Which layers count is a flag in the
public code, so this choice is ours.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from learnable_multipliers.pretrain.rivals.rival import Rival


class AdamC(Rival):
    """AdamW with corrected decay."""

    def apply_(self, weights: list[Tensor], updates: Tensor, group: dict[str, Any]) -> None:
        """Decay by the rate relative to its peak, except in the head."""
        decay = group["weight_decay"]
        if group["role"] != "head":
            # All groups have one rate, before the factor of what is not a hidden matrix.
            decay = decay * self.param_groups[0]["lr"] / self.peak_lr
        super().apply_(weights, updates, {**group, "weight_decay": decay})

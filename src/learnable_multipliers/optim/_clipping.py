"""The clip rule: by what factor gradients are scaled."""

from __future__ import annotations

import torch
from torch import Tensor

_NORM_FLOOR = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor:
    """Return what all gradients are multiplied by so that their norm is at most `max_norm`."""
    if max_norm is None:
        return torch.ones_like(norm)
    return (max_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)

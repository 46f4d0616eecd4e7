"""The clip rule: which norm is clipped, and by what factor gradients are scaled."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

_NORM_FLOOR = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor:
    """Return what all gradients are multiplied by so that their norm is at most `max_norm`."""
    if max_norm is None:
        return torch.ones_like(norm)
    return (max_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)


def clip_grad_norm_(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm.

    The norm is that of the raw weights' gradients and of every parameter without multipliers.
    Multipliers are left out of it (paper sec. 4.3), but scaled with the rest.
    `torch.nn.utils.clip_grad_norm_` would take the effective weights' gradients instead.
    """
    # Not above: that module imports this one.
    from learnable_multipliers.optim._base import unwrap

    return unwrap(optimizer).clip_grad_norm_(max_norm)

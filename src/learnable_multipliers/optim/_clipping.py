"""Clipping for training loops that do it themselves."""

from __future__ import annotations

from torch import Tensor

from learnable_multipliers.optim._base import MultiplierOptimizer


def clip_grad_norm_(optimizer: MultiplierOptimizer, max_norm: float) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm.

    The norm is that of the raw weights' gradients and of every parameter without multipliers.
    Multipliers are left out of it (paper sec. 4.3), but scaled with the rest.
    `torch.nn.utils.clip_grad_norm_` would take the effective weights' gradients instead.
    """
    return optimizer.clip_grad_norm_(max_norm)

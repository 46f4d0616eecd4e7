"""The learning rate of multipliers around a wrapped optimizer, where no scale is given."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

MULTIPLIER_LR = 1e-3
"""AdamW's usual rate, which multipliers reach around optimizers whose rate is in other units."""
MAX_MULTIPLIER_LR = 1e-2
"""Learning rate of multipliers above which a scale that was not given causes a warning."""
_UPDATE_SIZE_IS_LR = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Lion"}


def default_multiplier_lr_scale(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return the default scale of a group's learning rate for its multipliers."""
    if update_size_is_lr(optimizer):
        return 1.0
    lr = intended_lr(group, 0.0)
    if lr == 0:
        raise ValueError(
            f"{type(optimizer).__name__} has a learning rate of 0, from which none follows for "
            "the multipliers: give multiplier_lr_scale"
        )
    return MULTIPLIER_LR / lr


def update_size_is_lr(optimizer: Optimizer) -> bool:
    """Return whether updates are about as large as the learning rate, whatever the gradients."""
    return any(base.__name__ in _UPDATE_SIZE_IS_LR for base in type(optimizer).__mro__)


def intended_lr(group: dict[str, Any], first: float) -> float:
    """Return the rate that a group is meant to reach, as noted by schedulers if there are any."""
    noted = float(group.get("max_lr") or group.get("initial_lr") or 0.0)
    # Without a scheduler: warmup by hand starts below the constructor's rate.
    return noted or max(first, float(group["lr"]))

"""The learning rate of multipliers around a wrapped optimizer, where no scale is given."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from learnable_multipliers.optim._wrapped_settings import GroupPair

_MULTIPLIER_LR = 1e-3
"""AdamW's usual rate, which multipliers reach around optimizers whose rate is in other units."""
_MAX_MULTIPLIER_LR = 1e-2
"""Learning rate of multipliers above which a scale that was not given causes a warning."""
_UPDATE_SIZE_IS_LR = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Lion"}


class DerivedScales:
    """The scale of each group's rate for its multipliers, derived from the rate of the group."""

    def __init__(self, groups: Sequence[dict[str, Any]]):
        # The constructor's rate of each group, and the scale derived from it.
        self._derived = [(float(group["lr"]), group["multiplier_lr_scale"]) for group in groups]
        self._has_warned = False

    def update(self, pairs: Sequence[GroupPair]) -> None:
        """Derive the scales again from the rates at the first step.

        Schedulers are made after the optimizer, and may set rates of their own.
        """
        for index, (first, scale) in enumerate(self._derived):
            ours, theirs = pairs[index]
            # Unless it was set by hand, or loaded.
            if ours["multiplier_lr_scale"] == scale:
                lr = _intended_lr({**theirs, **ours}, first)
                ours["multiplier_lr_scale"] = _MULTIPLIER_LR / lr
                self._derived[index] = (first, ours["multiplier_lr_scale"])

    def warn_if_high(self, groups: Sequence[dict[str, Any]], optimizer: Optimizer) -> None:
        """Warn once if multipliers train much faster than their scale was chosen for."""
        if self._has_warned:
            return
        rates = [float(g["lr"]) * g["multiplier_lr_scale"] for g in groups]
        if max(rates) > _MAX_MULTIPLIER_LR:
            self._has_warned = True
            warnings.warn(
                f"multipliers train at a learning rate of {max(rates):.2g} now, as that of "
                f"{type(optimizer).__name__} has grown since the first step: give "
                "multiplier_lr_scale, their rate over that of the optimizer",
                stacklevel=4,
            )


def default_multiplier_lr_scale(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return the default scale of a group's learning rate for its multipliers."""
    if update_size_is_lr(optimizer):
        return 1.0
    lr = _intended_lr(group, 0.0)
    if lr == 0:
        raise ValueError(
            f"{type(optimizer).__name__} has a learning rate of 0, from which none follows for "
            "the multipliers: give multiplier_lr_scale"
        )
    return _MULTIPLIER_LR / lr


def update_size_is_lr(optimizer: Optimizer) -> bool:
    """Return whether updates are about as large as the learning rate, whatever the gradients."""
    return any(base.__name__ in _UPDATE_SIZE_IS_LR for base in type(optimizer).__mro__)


def _intended_lr(group: dict[str, Any], first: float) -> float:
    """Return the rate that a group is meant to reach, as noted by schedulers if there are any."""
    noted = float(group.get("max_lr") or group.get("initial_lr") or 0.0)
    # Without a scheduler: warmup by hand starts below the constructor's rate.
    return noted or max(first, float(group["lr"]))

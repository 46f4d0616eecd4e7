"""A run from a checkpoint of another trainer: a plain torch optimizer with its state.

It is not for training; `lrm.diagnose` reads it as it would in the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """An optimizer, its model, and the history in the checkpoint."""

    name: str
    optimizer: Optimizer
    model: nn.Module
    step: int
    lrs: list[float] | None
    """Learning rate of each step; None if unknown."""
    notes: tuple[str, ...]
    """Assumptions, in words."""


def rebuild_optimizer(
    folder: Path,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[nn.Parameter, dict[str, Any]],
) -> tuple[Optimizer, list[str]]:
    """Return the optimizer that wrote groups and states, and the assumptions about it.

    Args:
        groups: Settings as saved, with the parameters themselves in `params`.
    """
    if any("multiplier_lr_scale" in group for group in groups):
        raise ValueError(
            f"{folder} was trained with multipliers: load it as you resume it, and give its "
            "optimizer to lrm.diagnose(optimizer)"
        )
    entries = {key for state in states.values() for key in state}
    notes = []
    if {"exp_avg", "exp_avg_sq", "step"} <= entries and all("betas" in group for group in groups):
        if any("decoupled_weight_decay" not in group for group in groups):
            notes.append(
                "the optimizer is AdamW, whose state an older PyTorch did not mark as such"
            )
        decoupled = all(group.get("decoupled_weight_decay", True) for group in groups)
        optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    elif "momentum_buffer" in entries and all("ns_coefficients" in group for group in groups):
        optimizer_class = torch.optim.Muon
    else:
        shown = ", ".join(sorted(entries)) or "nothing"
        raise ValueError(
            f"{folder} has the state of an optimizer that cannot be read (it keeps {shown}): "
            "needed are those of torch.optim.AdamW, Adam or Muon"
        )
    optimizer = optimizer_class([dict(group) for group in groups])
    # Not by load_state_dict, which would cast the moments to the dtype of the weights.
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    return optimizer, notes

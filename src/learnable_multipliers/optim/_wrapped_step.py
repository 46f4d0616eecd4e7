"""Step a wrapped optimizer, and check that it trains the raw weights in its groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from learnable_multipliers.kernels._parameter import ParameterState

_STEPPING: set[int] = set()
"""Ids of wrapped optimizers whose step was called by their wrapper."""


def check_caller(optimizer: Optimizer, *_: Any) -> None:
    """Raise if a wrapped optimizer is stepped by itself: it would train no multipliers."""
    if id(optimizer) not in _STEPPING:
        raise RuntimeError(
            f"step() was called on the {type(optimizer).__name__} inside lrm.LearnableMultipliers, "
            "which would leave out the multipliers: call step() and zero_grad() on "
            "lrm.LearnableMultipliers"
        )


def step_inner(optimizer: Optimizer) -> None:
    """Step a wrapped optimizer."""
    _STEPPING.add(id(optimizer))
    try:
        optimizer.step()
    finally:
        _STEPPING.discard(id(optimizer))


def step_and_check(
    optimizer: Optimizer, owned: Sequence[ParameterState], *, compare_values: bool
) -> None:
    """Step a wrapped optimizer; raise if it trained the model's weights, not the raw ones.

    Only the values show writes through `.data`.
    """
    versions = [state.parameter._version for state in owned]
    before = _sums(owned) if compare_values else None
    step_inner(optimizer)
    written = [s for s, old in zip(owned, versions, strict=True) if s.parameter._version != old]
    if before is not None:
        differ = (_sums(owned) != before).tolist()
        written += [state for state, differs in zip(owned, differ, strict=True) if differs]
    if written:
        raise RuntimeError(
            f"{type(optimizer).__name__} wrote to {written[0].name} of the model and not to "
            "the raw weight that stands for it in its parameter groups: it keeps a list of "
            "parameters of its own. Wrap an optimizer that reads param_groups at every step"
        )


def _sums(states: Sequence[ParameterState]) -> Tensor:
    """Return a sum over each weight, to see whether it changes."""
    # NaN would differ from itself.
    sums = [state.weight.sum(dtype=torch.float64).nan_to_num() for state in states]
    return torch.stack(sums) if sums else torch.zeros(0)

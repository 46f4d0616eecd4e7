"""Recompute raw weights after something else wrote to the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from learnable_multipliers.kernels._parameter import ParameterState, write_effective_, write_raw_
from learnable_multipliers.optim._binding import Binding
from learnable_multipliers.optim._sharding import all_agree
from learnable_multipliers.optim._write_guard import matches_raw

_SMALLEST_FACTOR = 1e-2
"""Raw weights are not divided by smaller factors, which one step may multiply several times."""


def find_changed(binding: Binding) -> list[ParameterState]:
    """Return the parameters that differ from the product of their raw weights and multipliers."""
    binding.write_factors_()
    same = [matches_raw(state) for state in binding.states]
    # A shard may be unchanged while shards on other ranks are not.
    same = all_agree(binding.process_group, same, binding.device)
    return [s for s, kept in zip(binding.states, same, strict=True) if not kept]


def resync_raw_(binding: Binding, states: Iterable[ParameterState], has_stepped: bool) -> None:
    """Compute raw weights from the model's; where a multiplier is near zero, restart it at 1."""
    # Ranks share columns, so all restart a matrix if one of them has a row near zero. Before the
    # first step multipliers are initial values, which may be as small as the user asked for.
    least = _SMALLEST_FACTOR if has_stepped else torch.finfo(torch.float32).tiny
    flags = [_is_divisible(state, least) for state in states]
    divisible = all_agree(binding.process_group, flags, binding.device)
    for state, can_divide in zip(states, divisible, strict=True):
        if state.matrix is not None and not can_divide:
            for name in state.matrix.value_shapes():
                state.multipliers[name].fill_(0.0 if state.matrix.scale == "log" else 1.0)
    binding.write_factors_()
    for state in states:
        if state.owns_raw:
            write_raw_(state)
            write_effective_(state)
    binding.guard.remember(states)


def _is_divisible(state: ParameterState, least: float) -> bool:
    """Return whether all factors of a parameter are at least `least` in absolute value."""
    return state.factors is None or all(
        bool((factor.abs() >= least).all()) for factor in state.factors
    )

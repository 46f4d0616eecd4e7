"""Keep replicated optimizers in step: agree on skipping a step, and check now and then that
replicas are equal.

Gradients are averaged before a step, so all replicas see the same numbers unless something goes
wrong on one rank (faulty memory, a hook, a write to its gradient). If that rank alone skips a step,
the replicas differ from then on. One all-reduce of four numbers per step prevents that. In the
first step, after the second and every `CHECK_EVERY` steps, two of them are a checksum of the
weights, which finds replicas that differ for any other reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learnable_multipliers._multiplier import MULTIPLIERS
from learnable_multipliers.kernels._backend import is_capturing
from learnable_multipliers.kernels._parameter import ParameterState

CHECK_EVERY = 100
"""Steps from one check that replicas are equal to the next; the first is in the first step."""
_EARLY_CHECK = 2
"""Steps before one more check, which finds gradients that are not averaged; the rate may start at
0, so that the first step changes nothing."""
_ROUNDING = 1e-4
"""Replicas on different kinds of device may differ by this much of their rms through rounding."""


class ReplicasDifferError(RuntimeError):
    """Replicas of the same parameters are not equal."""


class Replicas:
    """The ranks that hold replicas of all parameters of an optimizer."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._num_steps = 0
        self._checked_at = 0
        self._has_warned = False

    def agree(
        self, finite: Tensor, go: Tensor, states: Iterable[ParameterState]
    ) -> tuple[Tensor, Tensor]:
        """Return whether gradients are finite on all ranks, and whether all ranks take the step.

        Raises:
            ReplicasDifferError: The replicas are not equal; checked in the first step, after the
                second and every `CHECK_EVERY` steps.
        """
        is_due = self._num_steps % CHECK_EVERY == 0 or self._num_steps == _EARLY_CHECK
        # The host reads the result of a check, and must not wait during a capture.
        checks = is_due and not is_capturing()
        own = _checksum(states) if checks else torch.zeros_like(finite, dtype=torch.int64)
        votes = torch.stack([(~finite).long(), (~go).long(), own, ~own])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        if checks:
            largest, smallest = votes[2:].tolist()
            if largest != ~smallest:
                self._report(states)
            self._checked_at = self._num_steps
        self._num_steps += 1
        return votes[0] == 0, votes[1] == 0

    def _report(self, states: Iterable[ParameterState]) -> None:
        name, distance = max(self._distances(states), key=lambda pair: pair[1])
        text = f"the replicas of {name} differ between ranks, by {distance:.1e} of its rms"
        if distance < _ROUNDING:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{text}: ranks on devices or releases that round differently do this, or, at "
                    "a small learning rate, gradients that were not averaged over the ranks or a "
                    "rank that missed a step",
                    stacklevel=7,
                )
            return
        cause = (
            "either gradients were not averaged over the ranks (wrap the model in "
            "DistributedDataParallel, or all_reduce gradients before the step), or in the last "
            f"{self._num_steps - self._checked_at} steps a rank was changed alone (a step that "
            "only some take, a write to its weights, faulty memory). It is unknown which replica "
            "is right: restart from a checkpoint"
            if self._num_steps
            else "they did not start from the same weights, or process_group has other ranks than "
            "those with replicas. Give all ranks the weights of one"
        )
        raise ReplicasDifferError(f"{text}: {cause}")

    def _distances(self, states: Iterable[ParameterState]) -> Iterator[tuple[str, float]]:
        """Yield the distance between the replicas of each tensor, over their rms; collective."""
        for name, value in _compared(states):
            value = value.nan_to_num()
            ends = torch.stack((value, -value))
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._group)
            rms = ends.square().mean().sqrt()
            apart = ends.sum(0).square().mean().sqrt()
            yield name, float(apart / rms) if float(rms) else 0.0


def replicas_among(group: Any) -> Replicas | None:
    """Return the replicas on the ranks of a process group; None without one, or with one rank."""
    if group is None or dist.get_world_size(group) < 2:
        return None
    return Replicas(group)


def _compared(states: Iterable[ParameterState]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each raw weight and multiplier."""
    for state in states:
        kept = {
            "": state.raw,
            **{f" ({n})": state.multipliers[n] for n in MULTIPLIERS if n in state.multipliers},
        }
        for suffix, value in kept.items():
            if value.numel():
                yield state.name + suffix, value.detach()


def _checksum(states: Iterable[ParameterState]) -> Tensor:
    """Return a checksum: an integer sum, exact in any order, so that equal replicas agree."""
    sums = []
    for _, value in _compared(states):
        integers = {8: torch.int64, 4: torch.int32}[value.element_size()]
        sums.append(value.view(integers).sum(dtype=torch.int64))
    total = torch.stack(sums)
    # Odd factors, so that swapped weights give another sum.
    return (total * torch.arange(1, 2 * len(sums), 2, device=total.device)).sum()

"""Detect writes to the optimizer's parameters by anything else.

The next step writes each parameter from its raw weight, so such a change would be lost silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.kernels._backend import is_capturing
from learnable_multipliers.kernels._parameter import ParameterSet, ParameterState, effective_weight
from learnable_multipliers.optim._packed_multipliers import PackedMultipliers
from learnable_multipliers.optim._sharding import local


class WeightChangedError(RuntimeError):
    """A weight is not what the optimizer wrote: something else has written to it."""


class WriteGuard:
    """Checks the storage, the version and a sample of the values of each parameter."""

    def __init__(self, states: ParameterSet, packed: Iterable[PackedMultipliers], kernels: Any):
        self._states = states
        self._packed = list(packed)
        self._kernels = kernels
        # Flags of the last step on their way to the host, and the event after the copy.
        self._pending: tuple[Tensor, Any] | None = None
        self._pinned: Tensor | None = None
        self.remember(states)

    def remember(self, states: Iterable[ParameterState]) -> None:
        """Record version and address of parameters after the optimizer's own write."""
        for state in states:
            state.written_version = state.parameter._version
            state.written_pointer = local(state.parameter).data_ptr()

    def moved(self) -> list[ParameterState]:
        """Return the parameters whose storage has changed since the last step."""
        return [state for state in self._states if _has_moved(state)]

    def written(self) -> list[ParameterState]:
        """Return the parameters whose version counter has changed since the last step."""
        return [
            state
            for state in self._states
            if state.parameter._version != state.written_version and state.owns_raw
        ]

    def check(self) -> Tensor:
        """Return a flag per parameter written from outside; raise now where the host already knows.

        Kernels that do not wait for the host skip the step instead; `raise_pending` raises later.
        """
        suspects = self.written()
        self.check_weights(suspects)
        self.remember(suspects)
        # Only the values show writes through `.data`.
        touched = self._kernels.touched_from_outside(self._states)
        if self._kernels.decides_on_host:
            self._raise_for(touched)
        elif touched.numel():
            self._pending = self._copy_to_host(touched)
        return touched

    def raise_pending(self) -> None:
        """Raise for outside writes that the device found in the last step, and skipped it for."""
        if self._pending is None or is_capturing():
            return
        flags, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        self._raise_for(flags)

    def check_weights(self, states: Iterable[ParameterState]) -> None:
        """Compare every value of some parameters with their raw weights and multipliers.

        Weights that are swapped and swapped back (an average for evaluation) compare equal.
        """
        owned = [state for state in states if state.owns_raw]
        if owned:
            for packed in self._packed:
                packed.write_factors_(following=True)
        for state in owned:
            if not matches_raw(state):
                raise _written_outside(state)

    def _raise_for(self, flags: Tensor) -> None:
        if bool(flags.any()):
            raise _written_outside(self._states.states[int(flags.nonzero()[0])])

    def _copy_to_host(self, flags: Tensor) -> tuple[Tensor, Any]:
        """Copy flags to the host without waiting; the event follows the copy."""
        if flags.device.type != "cuda":
            return flags, None
        if is_capturing():
            # Replays of a captured step do not run this code.
            return torch.zeros(0, dtype=torch.bool), None
        if self._pinned is None or self._pinned.shape != flags.shape:
            self._pinned = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        self._pinned.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return self._pinned, event


def matches_raw(state: ParameterState) -> bool:
    """Return whether a weight is the product of its raw weight and multipliers."""
    if not state.owns_raw:
        return True
    weight = local(state.parameter.detach())
    return torch.equal(effective_weight(state).to(weight.dtype), weight)


def _has_moved(state: ParameterState) -> bool:
    parameter = local(state.parameter) if state.sharded else state.parameter
    return (
        parameter.data_ptr() != state.written_pointer or state.parameter.dtype != state.weight.dtype
    )


def wrong_shape(name: str, shape: tuple[int, ...], planned: tuple[int, ...]) -> ValueError:
    """Return the error for a parameter whose shape is not that of the plan."""
    if len(shape) == 1:
        advice = "flattened parameters (FSDP1, ZeRO) cannot carry multipliers, use FSDP2"
    else:
        advice = "resize the model first (resize_token_embeddings), then make plan and optimizer"
    return ValueError(f"{name} has shape {shape}, but its plan is for {planned}; {advice}")


def _written_outside(state: ParameterState) -> Exception:
    shape = tuple(state.parameter.shape)
    if state.matrix is not None and shape != state.matrix.shape:
        return wrong_shape(state.name, shape, state.matrix.shape)
    return WeightChangedError(
        f"{state.name} was changed since the last step by something other than this optimizer, "
        "which would overwrite it. If the change is meant (weights loaded, averaged, edited), call "
        "opt.sync_from_model_() after it; if not, restore the weights before stepping."
    )

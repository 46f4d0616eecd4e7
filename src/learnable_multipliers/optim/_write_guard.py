"""Notices when something other than the optimizer writes to a parameter it owns.

The next step writes such a parameter from its raw weight, so a change made in between would be
lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.kernels._reference import effective_of
from learnable_multipliers.optim._packed_multipliers import MultiplierBank
from learnable_multipliers.optim._sharding import local
from learnable_multipliers.optim._slots import Slot


class Watch:
    """Looks at a tensor's storage, its version, and a sample of its numbers."""

    def __init__(self, slots: list[Slot], banks: Iterable[MultiplierBank], kernels: Any):
        self._slots = slots
        self._banks = list(banks)
        self._kernels = kernels
        # What the device found in the last step, on its way to the host.
        self._found: tuple[Tensor, Any] | None = None
        self._arrived: Tensor | None = None
        self.remember(slots)

    def remember(self, slots: list[Slot]) -> None:
        """Take parameters as they are now for what the optimizer wrote."""
        for slot in slots:
            slot.version, slot.pointer = slot.parameter._version, local(slot.parameter).data_ptr()

    def storage_moved(self) -> bool:
        """Tell whether any parameter lies elsewhere than at the last step, with its numbers."""
        moved = [slot for slot in self._slots if slot.lies_elsewhere()]
        for slot in moved:
            slot.work.weight = local(slot.parameter.detach())
        self.refuse_other_numbers(moved)
        return bool(moved)

    def look(self, works: list[Any]) -> Tensor:
        """Tell which parameters hold other numbers than were written; raise where it shows.

        Kernels that do not wait for the host leave the step out, and `raise_late` tells.
        """
        suspects = [s for s in self._slots if s.owns_raw and s.parameter._version != s.version]
        self.refuse_other_numbers(suspects)
        self.remember(suspects)
        # Writes through `.data` leave no trace but their numbers.
        touched = self._kernels.touched_from_outside(works)
        if self._kernels.decides_on_host:
            self._raise_for(touched)
        elif touched.numel():
            self._found = self._on_its_way(touched)
        return touched

    def raise_late(self) -> None:
        """Raise what the device found in the last step, which it left out for that reason."""
        if self._found is None or _is_capturing():
            return
        flags, event = self._found
        self._found = None
        if event is not None:
            event.synchronize()
        self._raise_for(flags)

    def refuse_other_numbers(self, slots: list[Slot]) -> None:
        """Compare all of some parameters with their raw weights and multipliers.

        A swap and back (an average for evaluation) leaves the same numbers, and is fine.
        """
        owned = [slot for slot in slots if slot.owns_raw]
        if owned:
            for bank in self._banks:
                bank.write_factors_(following=True)
        for slot in owned:
            expected = effective_of(slot.work).to(slot.work.weight.dtype)
            if not torch.equal(expected, slot.work.weight):
                raise _written_outside(slot)

    def _raise_for(self, flags: Tensor) -> None:
        if bool(flags.any()):
            raise _written_outside(self._slots[int(flags.nonzero()[0])])

    def _on_its_way(self, flags: Tensor) -> tuple[Tensor, Any]:
        """Send flags to the host without waiting; the event tells when they have arrived."""
        if flags.device.type != "cuda":
            return flags, None
        if _is_capturing():
            # Replays of a captured step do not come back here.
            return torch.zeros(0, dtype=torch.bool), None
        if self._arrived is None or self._arrived.shape != flags.shape:
            self._arrived = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        self._arrived.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return self._arrived, event


def _written_outside(slot: Slot) -> RuntimeError:
    return RuntimeError(
        f"{slot.name} was changed since the last step by something other than this optimizer, "
        "which would overwrite it. If the change is meant (weights loaded, averaged, edited), call "
        "opt.sync_from_model_() after it; if not, restore the weights before stepping."
    )


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

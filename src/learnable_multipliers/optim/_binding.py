"""What an optimizer works on: its parameters, bound to their state, in the form kernels take.

Made from parameter groups and state, and made anew when these change. The tensors are the state's
own: what a step writes here is what a checkpoint saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Matrix, raw_dtype
from learnable_multipliers.kernels import choose_kernels
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._reference import write_effective
from learnable_multipliers.kernels._transfer import sent
from learnable_multipliers.kernels._work import Rates, Work
from learnable_multipliers.optim._packed_multipliers import MultiplierBank
from learnable_multipliers.optim._packed_sums import PackedSums
from learnable_multipliers.optim._process_group import team_of
from learnable_multipliers.optim._sharding import (
    Share,
    as_sharded,
    is_sharded,
    local,
    local_gradient,
)
from learnable_multipliers.optim._slots import Slot, factors_of, start_raw
from learnable_multipliers.optim._write_guard import Watch

MOST_SUBSETS = 16
"""Sets of parameters with gradients whose tables are kept; more of them start over."""
MEAN_SQUARE = "mean_sq"
"""Name in the state of an average of mean(g^2); a state of earlier releases lacks it, and it starts
anew."""

State = dict[Any, dict[str, Any]]


@dataclass(frozen=True)
class Member:
    """One parameter of an optimizer, and what is kept for it."""

    parameter: Any
    name: str
    group: dict[str, Any]
    matrix: Matrix | None
    share: Share
    moments: tuple[str, ...]
    """Names of the moments kept beside its raw weight."""
    keeps_mean_square: bool
    """Whether an average of mean(g^2), one number, stands in for a second moment."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its raw weight."""
        return raw_dtype(self.parameter)


class Binding:
    """Slots, one for each parameter, and what they share: banks, counts of steps, sums, kernels."""

    def __init__(
        self,
        members: list[Member],
        state: State,
        backend: Backend,
        process_groups: dict[tuple[int, ...], Any],
    ):
        self.device = _device_of(members)
        dtypes = {member.dtype for member in members}
        self.kernels = choose_kernels(backend, self.device, dtypes)
        self.steps = torch.zeros(len(members), dtype=torch.float32, device=self.device)
        widest = torch.float64 if torch.float64 in dtypes else torch.float32
        self.mean_squares = torch.zeros(len(members), dtype=widest, device=self.device)
        self.team = team_of((member.parameter for member in members), process_groups)
        needs_squares = self.team is not None or any(m.keeps_mean_square for m in members)
        self.squares = torch.zeros_like(self.mean_squares) if needs_squares else None
        self._make_banks(members)
        new = {member.parameter for member in members if "raw" not in state[member.parameter]}
        self.slots = [self._slot(index, member, state) for index, member in enumerate(members)]
        self.owned = [slot for slot in self.slots if slot.owns_raw]
        self.write_factors_()
        for slot in self.owned:
            if slot.parameter in new:
                start_raw(slot.work)
                blocks = slot.matrix.blocks if slot.matrix is not None else ()
                if any(block.init != 1.0 for block in blocks):
                    # Dividing by an initial value and multiplying again may miss the last bit.
                    write_effective(slot.work)
        self._subsets: dict[tuple[int, ...], list[Slot]] = {}
        self._works: dict[int, tuple[list[Slot], list[Work]]] = {}
        self._classify(members)
        self.watch = Watch(self.slots, self.banks.values(), self.kernels)

    def is_of(self, param_groups: list[dict[str, Any]], state: State) -> bool:
        """Tell whether these are the parameters and the state it was made from."""
        parameters = [p for group in param_groups for p in group["params"]]
        return len(parameters) == len(self.slots) and all(
            p is slot.parameter and state[p].get("step") is slot.step
            for p, slot in zip(parameters, self.slots, strict=True)
        )

    # -- of a step ----------------------------------------------------------------------------

    def with_gradients(self) -> list[Slot]:
        """Return the slots that have a gradient now, and hand it to their work."""
        active = []
        for slot in self.slots:
            grad = slot.parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise ValueError(f"{slot.name}: sparse gradients are not supported")
            slot.work.grad = local_gradient(slot.parameter, grad) if slot.sharded else grad
            active.append(slot)
        if len(active) == len(self.slots):
            return self.slots
        # One list for one set of parameters, so that kernels find their tables again.
        key = tuple(slot.work.index for slot in active)
        if key not in self._subsets and len(self._subsets) >= MOST_SUBSETS:
            self._subsets.clear()
            self._works.clear()
        return self._subsets.setdefault(key, active)

    def let_go_of_gradients(self) -> None:
        """Keep no gradient alive beyond the step that used it."""
        for slot in self.slots:
            slot.work.grad = slot.work.weight

    def works(self, slots: list[Slot]) -> list[Work]:
        """Return the slots' works, the same list for the same slots."""
        known = self._works.get(id(slots))
        if known is None or known[0] is not slots:
            known = self._works[id(slots)] = (slots, [slot.work for slot in slots])
        return known[1]

    def gradients(self, active: list[Slot]) -> tuple[dict[torch.dtype, Tensor], Tensor, Tensor]:
        """Return the multipliers' gradients by bank, the norm of all others, and if all is finite.

        Where parameters are spread over ranks these are the same numbers on each of them.
        """
        if len(active) < len(self.slots):
            # Matrices without a gradient this time must not bring sums of the last one.
            for bank in self.banks.values():
                bank.out_sums.zero_()
                bank.in_sums.zero_()
            if self.squares is not None:
                self.squares.zero_()
        square = self.kernels.reduce(self.works(active), self.squares)
        grads = {dtype: bank.gradients() for dtype, bank in self.banks.items()}
        if self._sums is not None:
            assert self.squares is not None
            finite = self._sums.take_(grads, self.squares)
            norm = self.squares.sum().sqrt()
            return grads, norm, finite & norm.isfinite()
        norm = square.sqrt()
        finite = norm.isfinite()
        for grad in grads.values():
            finite = finite & grad.isfinite().all()
        return grads, norm, finite

    def moved(self, active: list[Slot]) -> Tensor:
        """Return 1 for each parameter that has a gradient, 0 for the others."""
        if len(active) == len(self.slots):
            return torch.ones_like(self.steps)
        moved = torch.zeros(len(self.slots))
        moved[[slot.work.index for slot in active]] = 1.0
        return sent(moved, self.device)

    def rates(self, rows: list[tuple[float, ...]]) -> Rates:
        """Return the hyper-parameters, a row for each of the `classes`, where kernels find them."""
        if rows != self._last_rows:
            # Only what a scheduler has changed travels to the device.
            self._last_rows = rows
            self._table = sent(torch.tensor(rows, dtype=torch.float64), self.device)
        return Rates(table=self._table, class_of=self._class_of, steps=self.steps)

    def write_factors_(self) -> None:
        """Let the factors of this step and of the next be those of the multipliers as they are."""
        for bank in self.banks.values():
            bank.write_factors_()
            bank.write_factors_(following=True)

    # -- being made ---------------------------------------------------------------------------

    def _make_banks(self, members: list[Member]) -> None:
        carrying: dict[torch.dtype, list[int]] = {}
        for index, member in enumerate(members):
            if member.matrix is not None and member.matrix.carries:
                carrying.setdefault(member.dtype, []).append(index)
        self.banks = {
            dtype: MultiplierBank(
                [matrix for i in indices if (matrix := members[i].matrix) is not None],
                [members[i].share.extent for i in indices],
                dtype,
                self.device,
            )
            for dtype, indices in carrying.items()
        }
        # The slot that each multiplier belongs to.
        self.owners = {
            dtype: torch.tensor(indices, device=self.device)[self.banks[dtype].owner]
            for dtype, indices in carrying.items()
        }
        self.bank_of: dict[int, tuple[MultiplierBank, int]] = {
            slot: (self.banks[dtype], place)
            for dtype, indices in carrying.items()
            for place, slot in enumerate(indices)
        }
        self._sums = None
        if self.team is not None:
            self._sums = PackedSums(
                self.team,
                [(member.matrix, member.share) for member in members],
                {dtype: (self.banks[dtype], indices) for dtype, indices in carrying.items()},
                self.mean_squares.dtype,
                self.device,
            )

    def _slot(self, index: int, member: Member, state: State) -> Slot:
        """Bind one parameter to its state, creating what is missing."""
        parameter, matrix = member.parameter, member.matrix
        weight = local(parameter.detach())
        kept: dict[str, Tensor] = {"step": self.steps[index]}
        if member.keeps_mean_square:
            kept[MEAN_SQUARE] = self.mean_squares[index]
        factors = None
        bank, place = self.bank_of.get(index, (None, 0))
        if bank is not None:
            kept |= bank.state_views(place)
            factors = factors_of(bank, place, bool(matrix and matrix.transposed))
        owns_raw = bank is not None or weight.dtype != member.dtype
        for key in (*(("raw",) if owns_raw else ()), *member.moments):
            kept[key] = torch.zeros_like(
                weight, dtype=member.dtype, memory_format=torch.contiguous_format
            )
        known = state[parameter]
        for key, value in kept.items():
            if key in known:
                value.copy_(local(known[key]).to(value.device))
        work = Work(
            index=index,
            weight=weight,
            raw=kept["raw"] if owns_raw else weight,
            grad=weight,
            moments=tuple(kept[name] for name in member.moments),
            factors=factors,
        )
        state[parameter] = {**known, **as_sharded(kept, parameter, matrix)}
        return Slot(
            parameter=parameter,
            name=member.name,
            group=member.group,
            matrix=matrix,
            share=member.share,
            work=work,
            step=state[parameter]["step"],
            sharded=is_sharded(parameter),
            owns_raw=owns_raw,
        )

    def _classify(self, members: Iterable[Member]) -> None:
        """Find parameters that share all hyper-parameters: few, whatever the model's size."""
        classes: dict[tuple[Any, ...], int] = {}
        self.classes: list[tuple[dict[str, Any], Matrix | None]] = []
        class_of = []
        for member in members:
            key = (id(member.group), member.moments)
            if key not in classes:
                classes[key] = len(classes)
                self.classes.append((member.group, member.matrix))
            class_of.append(classes[key])
        self._class_of = torch.tensor(class_of, device=self.device)
        self._last_rows: list[tuple[float, ...]] = []


def _device_of(members: list[Member]) -> torch.device:
    devices = {local(member.parameter).device for member in members}
    if len(devices) > 1:
        raise ValueError(f"parameters lie on several devices: {sorted(map(str, devices))}")
    return devices.pop()

"""All multipliers of an optimizer in a few flat tensors.

Several hundred matrices carry thousands of small vectors. Kept end to end, their factors,
gradients and AdamW update are a handful of operations for the whole model; the optimizer's state
holds views of these tensors, matrix by matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Matrix, initial_values

NAMES: tuple[Literal["row", "col", "scalar"], ...] = ("row", "col", "scalar")
MOMENTS = ("", "_exp_avg", "_exp_avg_sq")
"""Suffixes of a multiplier's value and its two AdamW moments in the optimizer's state."""


@dataclass(frozen=True)
class Extent:
    """The part of a matrix that lies on this rank; all of it without sharding."""

    stack: slice
    out: slice
    into: slice

    @classmethod
    def whole(cls, matrix: Matrix) -> Extent:
        """Return the extent of a matrix that is not sharded."""
        stack = matrix.stack[0] if matrix.stack else 1
        return cls(slice(0, stack), slice(0, matrix.num_out), slice(0, matrix.num_in))


def local_values(matrix: Matrix, extent: Extent, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut full multipliers down to an extent."""
    along = {"row": extent.out, "col": extent.into}
    cut = {}
    for name, value in values.items():
        value = value[extent.stack] if matrix.stack else value
        cut[name] = value[..., along[name]] if name in along else value
    return cut


@dataclass(frozen=True)
class _Place:
    """Where one matrix's numbers lie in the flat tensors."""

    values: dict[str, tuple[int, tuple[int, ...]]]
    """Start and shape of each of its multipliers."""
    out: tuple[int, tuple[int, int]]
    """Start and (stack, out) shape of its output factors."""
    into: tuple[int, tuple[int, int]]


class MultiplierBank:
    """Values, moments, factors and gradients of the multipliers of many matrices."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        extents: Sequence[Extent],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.matrices = tuple(matrices)
        locals_ = [
            local_values(matrix, extent, initial_values(matrix, dtype=dtype))
            for matrix, extent in zip(matrices, extents, strict=True)
        ]
        # Rows of all matrices first, then columns, then scalars: where every matrix carries
        # rows, the rows' values lie as the factors do.
        starts: list[dict[str, tuple[int, tuple[int, ...]]]] = [{} for _ in matrices]
        values, trained, is_log, owner = [], [], [], []
        size = 0
        for name in NAMES:
            for index, (matrix, extent) in enumerate(zip(matrices, extents, strict=True)):
                if name not in locals_[index]:
                    continue
                value = locals_[index][name]
                starts[index][name] = (size, tuple(value.shape))
                size += value.numel()
                values.append(value.flatten())
                trained.append(_trained(matrix, extent, name).flatten())
                is_log.append(torch.full((value.numel(),), matrix.scale == "log"))
                owner.append(torch.full((value.numel(),), index))
        self._places: list[_Place] = []
        row_slots, scalar_slots, col_slots = [], [], []
        num_out, num_in = 0, 0
        for matrix, extent, start in zip(matrices, extents, starts, strict=True):
            stack = extent.stack.stop - extent.stack.start
            out = (stack, extent.out.stop - extent.out.start)
            into = (stack, extent.into.stop - extent.into.start)
            row_slots.append(_slots(start, "row", out))
            col_slots.append(_slots(start, "col", into))
            scalar_slots.append(_scalar_slots(matrix, extent, start))
            self._places.append(_Place(start, (num_out, out), (num_in, into)))
            num_out, num_in = num_out + out[0] * out[1], num_in + into[0] * into[1]

        def packed(parts: list[Tensor], empty_dtype: torch.dtype) -> Tensor:
            joined = torch.cat(parts) if parts else torch.empty(0, dtype=empty_dtype)
            return joined.to(device)

        # The last place stands for "no multiplier": its value is 1 and its gradient is dropped.
        self._extended_values = torch.cat([packed(values, dtype), torch.ones(1, device=device)])
        self._extended_values = self._extended_values.to(dtype)
        self.values = self._extended_values[:-1]
        self.exp_avg = torch.zeros_like(self.values)
        self.exp_avg_sq = torch.zeros_like(self.values)
        self.owner = packed(owner, torch.int64)
        self.trained = packed(trained, torch.bool)
        self._all_trained = bool(self.trained.all())
        is_log_scale = packed(is_log, torch.bool)
        self._is_log = is_log_scale if bool(is_log_scale.any()) else None
        self._rows = _or_none(packed(row_slots, torch.int64), size)
        self._cols = _or_none(packed(col_slots, torch.int64), size)
        self._scalars = _or_none(packed(scalar_slots, torch.int64), size)
        has_scalars = self._scalars is not None
        self._scalar_runs = _Runs(packed(scalar_slots, torch.int64)) if has_scalars else None
        self._in_order = (
            size == num_out + num_in
            and not has_scalars
            and self._is_log is None
            and _counts_up(self._rows, 0)
            and _counts_up(self._cols, num_out)
        )
        # Factors before and after the multipliers' update, and the sums that give gradients.
        self.out_factors, self.out_factors_next = self.values.new_ones(2, num_out)
        self.in_factors, self.in_factors_next = self.values.new_ones(2, num_in)
        self.out_sums, self.in_sums = self.values.new_zeros(num_out), self.values.new_zeros(num_in)

    def state_views(self, index: int) -> dict[str, Tensor]:
        """Return a matrix's multipliers and moments, as views."""
        flats = zip(MOMENTS, (self.values, self.exp_avg, self.exp_avg_sq), strict=True)
        return {
            f"{name}{suffix}": view
            for suffix, flat in flats
            for name, view in self.views_of(flat, index).items()
        }

    def views_of(self, flat: Tensor, index: int) -> dict[str, Tensor]:
        """Return a matrix's part of a flat tensor over all values, by multiplier."""
        return {
            name: flat[start : start + math.prod(shape)].view(shape)
            for name, (start, shape) in self._places[index].values.items()
        }

    def out_view(self, flat: Tensor, index: int) -> Tensor:
        """Return a matrix's part of a flat tensor over output features, (stack, out)."""
        start, shape = self._places[index].out
        return flat[start : start + shape[0] * shape[1]].view(shape)

    def in_view(self, flat: Tensor, index: int) -> Tensor:
        """Return a matrix's part of a flat tensor over input features, (stack, in)."""
        start, shape = self._places[index].into
        return flat[start : start + shape[0] * shape[1]].view(shape)

    def out_start(self, index: int) -> int:
        """Return where a matrix's output features start."""
        return self._places[index].out[0]

    def in_start(self, index: int) -> int:
        """Return where a matrix's input features start."""
        return self._places[index].into[0]

    def multipliers(self) -> Tensor:
        """Return what the stored values stand for."""
        if self._is_log is None:
            return self.values
        return torch.where(self._is_log, self.values.exp(), self.values)

    def write_factors_(self, *, following: bool = False) -> None:
        """Compute the factors of all matrices from the current values."""
        out, into = (
            (self.out_factors_next, self.in_factors_next)
            if following
            else (self.out_factors, self.in_factors)
        )
        if self._in_order:
            out.copy_(self.values[: len(out)])
            into.copy_(self.values[len(out) :])
            return
        extended = self._extended()
        if self._rows is not None:
            torch.index_select(extended, 0, self._rows, out=out)
            if self._scalars is not None:
                out.mul_(extended[self._scalars])
        elif self._scalars is not None:
            torch.index_select(extended, 0, self._scalars, out=out)
        if self._cols is not None:
            torch.index_select(extended, 0, self._cols, out=into)

    def gradients(self) -> Tensor:
        """Return the gradients of all stored values from the row and column sums (eq. 4)."""
        if self._in_order:
            grads = torch.cat([self.out_sums, self.in_sums])
            return grads if self._all_trained else grads * self.trained
        extended = self._extended()
        grads = torch.zeros_like(extended)
        if self._rows is not None:
            through = self.out_sums
            if self._scalars is not None:
                through = through * extended[self._scalars]
            grads[self._rows] = through
        if self._cols is not None:
            grads[self._cols] = self.in_sums
        if self._scalar_runs is not None:
            through = self.out_sums
            if self._rows is not None:
                through = through * extended[self._rows]
            grads[self._scalar_runs.slots] = self._scalar_runs.sum(through)
        grads = grads[:-1]
        if self._is_log is not None:
            grads = torch.where(self._is_log, grads * extended[:-1], grads)
        return torch.where(self.trained, grads, torch.zeros_like(grads))

    def _extended(self) -> Tensor:
        if self._is_log is None:
            return self._extended_values
        values = self.multipliers()
        return torch.cat([values, values.new_ones(1)])


def _trained(matrix: Matrix, extent: Extent, name: str) -> Tensor:
    """Tell which entries are trained: not the rows of blocks that carry none."""
    shape = matrix.value_shapes()[name]
    mask = torch.ones(shape, dtype=torch.bool)
    if name == "row":
        grid = mask.view(*matrix.stack, *matrix.row_pattern)
        parts = grid.split([block.size for block in matrix.blocks], -1)
        for part, block in zip(parts, matrix.blocks, strict=True):
            part.fill_(block.row)
    return local_values(matrix, extent, {name: mask})[name]


def _slots(
    starts: dict[str, tuple[int, tuple[int, ...]]], name: str, shape: tuple[int, int]
) -> Tensor:
    """Return the slot of the multiplier of each feature; -1 where there is none."""
    if name not in starts:
        return torch.full((shape[0] * shape[1],), -1)
    start, _ = starts[name]
    return torch.arange(start, start + shape[0] * shape[1])


def _scalar_slots(
    matrix: Matrix, extent: Extent, starts: dict[str, tuple[int, tuple[int, ...]]]
) -> Tensor:
    stack = extent.stack.stop - extent.stack.start
    pattern = torch.full((matrix.row_pattern[1],), -1)
    if "scalar" in starts:
        which = iter(range(matrix.num_scalars))
        parts = pattern.split([block.size for block in matrix.blocks])
        for part, block in zip(parts, matrix.blocks, strict=True):
            part.fill_(next(which) if block.scalar else -1)
    rows = pattern.repeat(matrix.repeats)[extent.out]
    if "scalar" not in starts:
        return rows.repeat(stack)
    first = starts["scalar"][0] + matrix.num_scalars * torch.arange(stack)
    return torch.where(rows >= 0, rows + first[:, None], -1).flatten()


def _counts_up(slots: Tensor | None, first: int) -> bool:
    if slots is None:
        return False
    return torch.equal(slots, torch.arange(first, first + len(slots), device=slots.device))


def _or_none(slots: Tensor, size: int) -> Tensor | None:
    """Return slots with -1 sent to the neutral one; None where no slot is real."""
    return torch.where(slots < 0, size, slots) if bool((slots >= 0).any()) else None


class _Runs:
    """Sums over the features of each scalar, in a fixed order and without asking the host.

    Features are gathered into lines of one length, and the lines' sums into one line a scalar;
    what is left over points at a zero.
    """

    LINE = 256

    def __init__(self, slots: Tensor):
        order = torch.argsort(slots, stable=True)
        order = order[slots[order] >= 0]
        self.slots, lengths = torch.unique_consecutive(slots[order], return_counts=True)
        lines, groups = [], []
        for features in order.split(lengths.tolist()):
            pieces = features.split(self.LINE)
            groups.append(torch.arange(len(lines), len(lines) + len(pieces)))
            lines += pieces
        device = slots.device
        self._lines = _padded(lines, len(slots)).to(device)
        self._groups = _padded(groups, len(lines)).to(device)

    def sum(self, features: Tensor) -> Tensor:
        """Return the sum of each scalar's features."""
        zero = features.new_zeros(1)
        lines = torch.cat([features, zero])[self._lines].sum(1)
        return torch.cat([lines, zero])[self._groups].sum(1)


def _padded(lines: list[Tensor], filler: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=filler)

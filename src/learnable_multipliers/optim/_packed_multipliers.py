"""All multipliers of an optimizer in a few flat tensors.

Hundreds of matrices carry thousands of small vectors. Packed end to end, their factors, gradients
and AdamW update take a handful of operations for the whole model. The optimizer's state holds views
of these tensors for each matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learnable_multipliers._multiplier import (
    MULTIPLIERS,
    Matrix,
    by_block,
    initial_values,
    scalar_index,
)
from learnable_multipliers.kernels._parameter import RowsCols
from learnable_multipliers.optim._sharding import LocalShard, local_values

MOMENTS = ("", "_exp_avg", "_exp_avg_sq")
"""Suffixes of a multiplier's value and its two AdamW moments in the optimizer's state."""


@dataclass(frozen=True)
class _Offsets:
    """Where one matrix's numbers are in the flat tensors."""

    values: dict[str, tuple[int, tuple[int, ...]]]
    """Start and shape of each of its multipliers."""
    out: tuple[int, tuple[int, int]]
    """Start and (stack, out) shape of its output factors."""
    into: tuple[int, tuple[int, int]]
    """The same for its input factors."""


class PackedMultipliers:
    """Values, moments, factors and gradients of the multipliers of many matrices."""

    def __init__(
        self,
        matrices: Mapping[int, Matrix],
        shards: Sequence[LocalShard],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Pack the multipliers of matrices, which are given by their parameter's index."""
        self.matrices = dict(matrices)
        own = {
            index: local_values(matrix, shards[index], initial_values(matrix, dtype=dtype))
            for index, matrix in matrices.items()
        }
        # Rows of all matrices first, then columns, then scalars: where every matrix carries
        # rows, the rows' values are in the order of the factors.
        starts: dict[int, dict[str, tuple[int, tuple[int, ...]]]] = {i: {} for i in matrices}
        values, trained, is_log, owner = [], [], [], []
        size = 0
        for name in MULTIPLIERS:
            for index, matrix in matrices.items():
                if name not in own[index]:
                    continue
                value = own[index][name]
                starts[index][name] = (size, tuple(value.shape))
                size += value.numel()
                values.append(value.flatten())
                trained.append(_trained(matrix, shards[index], name).flatten())
                is_log.append(torch.full((value.numel(),), matrix.scale == "log"))
                owner.append(torch.full((value.numel(),), index))
        self._offsets: dict[int, _Offsets] = {}
        row_indices, scalar_indices, col_indices = [], [], []
        num_out, num_in = 0, 0
        for index, matrix in matrices.items():
            shard, start = shards[index], starts[index]
            stack = shard.stack.stop - shard.stack.start
            out = (stack, shard.out_features.stop - shard.out_features.start)
            into = (stack, shard.in_features.stop - shard.in_features.start)
            row_indices.append(_feature_index(start, "row", out))
            col_indices.append(_feature_index(start, "col", into))
            scalar_indices.append(_scalar_index(matrix, shard, start))
            self._offsets[index] = _Offsets(start, (num_out, out), (num_in, into))
            num_out, num_in = num_out + out[0] * out[1], num_in + into[0] * into[1]

        # The last entry stands for "no multiplier": its value is 1 and its gradient is dropped.
        self._extended_values = torch.cat([*values, torch.ones(1, dtype=dtype)]).to(device)
        self.values = self._extended_values[:-1]
        self.exp_avg = torch.zeros_like(self.values)
        self.exp_avg_sq = torch.zeros_like(self.values)
        self.owner = torch.cat(owner).to(device)
        """Index of the parameter that each value belongs to."""
        self.trained = torch.cat(trained).to(device)
        self._all_trained = bool(self.trained.all())
        is_log_scale = torch.cat(is_log).to(device)
        self._is_log = is_log_scale if bool(is_log_scale.any()) else None
        self._rows = _or_none(torch.cat(row_indices).to(device), size)
        self._cols = _or_none(torch.cat(col_indices).to(device), size)
        scalars = torch.cat(scalar_indices).to(device)
        self._scalars = _or_none(scalars, size)
        self._scalar_sums = None if self._scalars is None else _ScalarSums(scalars)
        self._in_order = (
            size == num_out + num_in
            and self._scalars is None
            and self._is_log is None
            and _is_range(self._rows, 0)
            and _is_range(self._cols, num_out)
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
        """Return a matrix's views of a flat tensor over all values, by multiplier."""
        return {
            name: flat[start : start + math.prod(shape)].view(shape)
            for name, (start, shape) in self._offsets[index].values.items()
        }

    def feature_views(self, index: int) -> tuple[RowsCols, RowsCols, RowsCols]:
        """Return a matrix's factors, next factors and sums along its stored rows and columns."""
        offsets, transposed = self._offsets[index], self.matrices[index].transposed

        def views(out: Tensor, into: Tensor) -> RowsCols:
            (out_start, out_shape), (in_start, in_shape) = offsets.out, offsets.into
            along_out = out[out_start : out_start + math.prod(out_shape)].view(out_shape)
            along_in = into[in_start : in_start + math.prod(in_shape)].view(in_shape)
            return (along_in, along_out) if transposed else (along_out, along_in)

        return (
            views(self.out_factors, self.in_factors),
            views(self.out_factors_next, self.in_factors_next),
            views(self.out_sums, self.in_sums),
        )

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
        """Return the gradients of all stored values, from the row and column sums (eq. 4)."""
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
        if self._scalar_sums is not None:
            through = self.out_sums
            if self._rows is not None:
                through = through * extended[self._rows]
            grads[self._scalar_sums.index] = self._scalar_sums.sum(through)
        grads = grads[:-1]
        if self._is_log is not None:
            grads = torch.where(self._is_log, grads * extended[:-1], grads)
        return torch.where(self.trained, grads, torch.zeros_like(grads))

    def _extended(self) -> Tensor:
        if self._is_log is None:
            return self._extended_values
        values = torch.where(self._is_log, self.values.exp(), self.values)
        return torch.cat([values, values.new_ones(1)])


def _trained(matrix: Matrix, shard: LocalShard, name: str) -> Tensor:
    """Return which entries are trained: all but the rows of blocks that carry none."""
    shape = matrix.value_shapes()[name]
    mask = torch.ones(shape, dtype=torch.bool)
    if name == "row":
        for block, rows in by_block(matrix, mask):
            rows.fill_(block.row)
    return local_values(matrix, shard, {name: mask})[name]


def _feature_index(
    starts: dict[str, tuple[int, tuple[int, ...]]], name: str, shape: tuple[int, int]
) -> Tensor:
    """Return the index of each feature's multiplier; -1 if it has none."""
    if name not in starts:
        return torch.full((shape[0] * shape[1],), -1)
    start, _ = starts[name]
    return torch.arange(start, start + shape[0] * shape[1])


def _scalar_index(
    matrix: Matrix, shard: LocalShard, starts: dict[str, tuple[int, tuple[int, ...]]]
) -> Tensor:
    """Return the index of each output feature's scalar; -1 if it has none."""
    stack = shard.stack.stop - shard.stack.start
    rows = scalar_index(matrix)[shard.out_features]
    first = starts.get("scalar", (0, ()))[0] + matrix.num_scalars * torch.arange(stack)
    return torch.where(rows >= 0, rows + first[:, None], -1).flatten()


def _is_range(index: Tensor | None, first: int) -> bool:
    """Return whether indices count up by one from the first."""
    if index is None:
        return False
    return torch.equal(index, torch.arange(first, first + len(index), device=index.device))


def _or_none(index: Tensor, size: int) -> Tensor | None:
    """Return indices with the neutral one, `size`, in place of -1; None if all are -1."""
    return torch.where(index < 0, size, index) if bool((index >= 0).any()) else None


class _ScalarSums:
    """Sums over the features of each scalar, in a fixed order and without a host synchronization.

    Features are gathered into lines of one length, and the sums of lines into one line per scalar;
    padding points to a zero.
    """

    LINE = 256

    def __init__(self, index: Tensor):
        order = torch.argsort(index, stable=True)
        order = order[index[order] >= 0]
        self.index, lengths = torch.unique_consecutive(index[order], return_counts=True)
        lines, groups = [], []
        for features in order.split(lengths.tolist()):
            pieces = features.split(self.LINE)
            groups.append(torch.arange(len(lines), len(lines) + len(pieces)))
            lines += pieces
        device = index.device
        self._lines = _padded(lines, len(index)).to(device)
        self._groups = _padded(groups, len(lines)).to(device)

    def sum(self, features: Tensor) -> Tensor:
        """Return the sum of each scalar's features."""
        zero = features.new_zeros(1)
        lines = torch.cat([features, zero])[self._lines].sum(1)
        return torch.cat([lines, zero])[self._groups].sum(1)


def _padded(lines: list[Tensor], filler: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=filler)

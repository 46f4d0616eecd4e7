"""Batch whole matrices of one shape, to orthogonalize them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Block, Matrix
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._newton_schulz import result_dtype
from learnable_multipliers.optim._orthogonalization import Coefficients, orthogonalize

AdjustLr = Literal["match_rms_adamw", "original"]
Split = Literal["blocks", "heads"]
"""Orthogonalize each block of a matrix by itself, or in queries, keys and values each head."""


def lr_factor(rule: AdjustLr, num_out: int, num_in: int) -> float:
    """Return the factor on Muon's learning rate for a matrix of this shape."""
    if rule == "original":
        return math.sqrt(max(1.0, num_out / max(num_in, 1)))
    return 0.2 * math.sqrt(max(num_out, num_in))


def num_rows(matrix: Matrix, block: Block, split: Split) -> int:
    """Return the rows that are orthogonalized together: those of a block, or of one head of it."""
    if split == "heads" and block.head_dim is not None:
        return block.head_dim
    return block.size * matrix.repeats


def adjust_of(matrix: Matrix, rule: AdjustLr, split: Split) -> float:
    """Return the factor on a whole update; 1 if its partitions were scaled one by one."""
    if _is_noncontiguous(matrix, split):
        return 1.0
    return lr_factor(rule, num_rows(matrix, matrix.blocks[0], split), matrix.num_in)


class _BatchSlice(NamedTuple):
    """A block's partitions: the batch of their shape, and the slice of it that they take."""

    shape: tuple[int, int]
    at: slice


class Batches:
    """The updates of many matrices, in one batch for each shape.

    If the partitions of a matrix are contiguous, its update is a view of a batch; otherwise it has
    its own buffer and is copied in and out.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        rule: AdjustLr,
        split: Split,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._matrices = matrices
        self._rule: AdjustLr = rule
        self._split: Split = split
        self._dtype, self._device = dtype, device
        self._counts: dict[tuple[int, int], int] = {}
        self._slices: list[list[_BatchSlice]] = []
        """Of the blocks of each matrix."""
        for matrix in matrices:
            slices = []
            for shape, parts in zip(
                partition_shapes(matrix, split), num_partitions(matrix, split), strict=True
            ):
                start = self._counts.get(shape, 0)
                self._counts[shape] = start + math.prod(matrix.stack) * parts
                slices.append(_BatchSlice(shape, slice(start, self._counts[shape])))
            self._slices.append(slices)
        self._noncontiguous = [_is_noncontiguous(matrix, split) for matrix in matrices]
        self.adjust = [adjust_of(matrix, rule, split) for matrix in matrices]

    def allocate(self) -> list[Tensor]:
        """Return an uninitialized tensor for the update of each matrix."""
        self._batches = {
            shape: torch.empty(count, *shape, dtype=self._dtype, device=self._device)
            for shape, count in self._counts.items()
        }
        return self._views(self._batches, self._own_buffers(self._dtype))

    def orthogonalize(
        self, updates: list[Tensor], coefficients: Coefficients, backend: Backend
    ) -> list[Tensor]:
        """Return every update in its orthogonalized form, in `result_dtype`."""
        noncontiguous = [i for i, flag in enumerate(self._noncontiguous) if flag]
        for i in noncontiguous:
            parts = _partition_views(self._matrices[i], updates[i], self._split)
            for part, place in zip(parts, self._slices[i], strict=True):
                target = self._batches[place.shape][place.at]
                target.copy_(part.reshape(target.shape))
        done = {
            shape: orthogonalize(batch, coefficients, backend)
            for shape, batch in self._batches.items()
        }
        del self._batches
        own = self._own_buffers(result_dtype(self._dtype))
        for i in noncontiguous:
            matrix, buffer = self._matrices[i], own[i]
            assert buffer is not None
            parts = _partition_views(matrix, buffer, self._split)
            for block, part, place in zip(matrix.blocks, parts, self._slices[i], strict=True):
                rows = num_rows(matrix, block, self._split)
                factor = lr_factor(self._rule, rows, matrix.num_in)
                update = done[place.shape][place.at]
                part.copy_((update * factor).view(part.shape))
        return self._views(done, own)

    def _own_buffers(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Return a buffer for each matrix whose update is no view of a batch; None for others."""
        return [
            torch.empty(matrix.shape, dtype=dtype, device=self._device) if has_own else None
            for matrix, has_own in zip(self._matrices, self._noncontiguous, strict=True)
        ]

    def _views(
        self, batches: dict[tuple[int, int], Tensor], own: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return each matrix's update: a view of a batch, or its own buffer."""
        units = {shape: batch.unbind(0) for shape, batch in batches.items()}
        views = []
        for matrix, slices, buffer in zip(self._matrices, self._slices, own, strict=True):
            shape, at = slices[0]
            if buffer is not None:
                views.append(buffer)
            elif shape == matrix.shape:
                views.append(units[shape][at.start])
            else:
                views.append(batches[shape][at].view(matrix.shape))
        return views


def partition_shapes(matrix: Matrix, split: Split) -> list[tuple[int, int]]:
    """Return the stored shape of the partitions of each block."""
    rows = [num_rows(matrix, block, split) for block in matrix.blocks]
    return [(matrix.num_in, n) if matrix.transposed else (n, matrix.num_in) for n in rows]


def num_partitions(matrix: Matrix, split: Split) -> list[int]:
    """Return the number of partitions of each block of a single matrix."""
    sizes = [block.size * matrix.repeats for block in matrix.blocks]
    rows = [num_rows(matrix, block, split) for block in matrix.blocks]
    return [size // max(n, 1) or 1 for size, n in zip(sizes, rows, strict=True)]


def update_dtype(raw: Tensor) -> torch.dtype:
    """Return the dtype of updates before they are orthogonalized: bfloat16 on a GPU, else float32.

    Not float16: before they are divided by their norm, updates may be too small for it.
    Updates of float64 weights stay float64.
    """
    if raw.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if raw.device.type == "cuda" else torch.float32


def _is_noncontiguous(matrix: Matrix, split: Split) -> bool:
    """Return whether the partitions of a stored matrix are not contiguous, one after another."""
    by_heads = split == "heads" and matrix.blocks[0].head_dim is not None
    return len(matrix.blocks) > 1 or (by_heads and matrix.transposed)


def _partition_views(matrix: Matrix, stored: Tensor, split: Split) -> list[Tensor]:
    """Return the partitions of each block of a stored matrix, as views with their axes last.

    Repeats that belong to one partition are an axis of their own beside its rows.
    """
    sizes = [block.size for block in matrix.blocks]
    dim = -1 if matrix.transposed else -2
    blocks = stored.unflatten(dim, matrix.row_pattern).split(sizes, dim)
    views = []
    for block, view in zip(matrix.blocks, blocks, strict=True):
        if split == "heads" and block.head_dim is not None:
            view = view.unflatten(dim, (-1, block.head_dim))
            # (in, repeats, heads, rows) -> (repeats, heads, in, rows)
            view = view.movedim(-4, -2) if matrix.transposed else view
        views.append(view)
    return views

"""Whole matrices to orthogonalize, those of one shape side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Block, Matrix
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._newton_schulz import result_dtype
from learnable_multipliers.optim._newton_schulz import Coefficients, orthogonalize

AdjustLr = Literal["match_rms_adamw", "original"]
Split = Literal["blocks", "heads"]
"""What is orthogonalized by itself: each block of a matrix, or in queries, keys and values each
head."""


def lr_factor(rule: AdjustLr, num_out: int, num_in: int) -> float:
    """Return what Muon's learning rate is multiplied by for a matrix of this shape."""
    if rule == "original":
        return math.sqrt(max(1.0, num_out / max(num_in, 1)))
    return 0.2 * math.sqrt(max(num_out, num_in))


def num_rows(matrix: Matrix, block: Block, split: Split) -> int:
    """Return the rows that are orthogonalized together: those of a block, or of one head of it."""
    if split == "heads" and block.head_dim is not None:
        return block.head_dim
    return block.size * matrix.repeats


def adjust_of(matrix: Matrix, rule: AdjustLr, split: Split) -> float:
    """Return what is left to multiply a whole update with; parts that are apart have their own."""
    if _is_apart(matrix, split):
        return 1.0
    return lr_factor(rule, num_rows(matrix, matrix.blocks[0], split), matrix.num_in)


class _Place(NamedTuple):
    """Where the parts of a block are in the batch of their shape."""

    shape: tuple[int, int]
    at: slice


class Batches:
    """Where the updates of many matrices lie, those of one shape side by side.

    A matrix that is one block, or the heads of one side by side, has its update right in its
    batch; what lies apart in others is copied in and out.
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
        self._places: list[list[_Place]] = []
        """Of the blocks of each matrix."""
        for matrix in matrices:
            places = []
            for shape, parts in zip(
                part_shapes(matrix, split), num_parts(matrix, split), strict=True
            ):
                start = self._counts.get(shape, 0)
                self._counts[shape] = start + math.prod(matrix.stack) * parts
                places.append(_Place(shape, slice(start, self._counts[shape])))
            self._places.append(places)
        self._apart = [_is_apart(matrix, split) for matrix in matrices]
        self.adjust = [adjust_of(matrix, rule, split) for matrix in matrices]

    def fresh(self) -> list[Tensor]:
        """Return room for the update of each matrix."""
        self._batches = {
            shape: torch.empty(count, *shape, dtype=self._dtype, device=self._device)
            for shape, count in self._counts.items()
        }
        return self._views(self._batches, self._room_apart(self._dtype))

    def orthogonalize(
        self, updates: list[Tensor], coefficients: Coefficients, backend: Backend
    ) -> list[Tensor]:
        """Return every update in its orthogonalized form, in `result_dtype`."""
        apart = [at for at, is_apart in enumerate(self._apart) if is_apart]
        for at in apart:
            parts = _part_views(self._matrices[at], updates[at], self._split)
            for part, place in zip(parts, self._places[at], strict=True):
                room = self._batches[place.shape][place.at]
                room.copy_(part.reshape(room.shape))
        done = {
            shape: orthogonalize(batch, coefficients, backend)
            for shape, batch in self._batches.items()
        }
        del self._batches
        own = self._room_apart(result_dtype(self._dtype))
        for at in apart:
            matrix, room = self._matrices[at], own[at]
            assert room is not None
            parts = _part_views(matrix, room, self._split)
            for block, part, place in zip(matrix.blocks, parts, self._places[at], strict=True):
                rows = num_rows(matrix, block, self._split)
                factor = lr_factor(self._rule, rows, matrix.num_in)
                found = done[place.shape][place.at]
                part.copy_((found * factor).view(part.shape))
        return self._views(done, own)

    def _room_apart(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Return a tensor for each matrix that has its update in no batch; None for others."""
        return [
            torch.empty(matrix.shape, dtype=dtype, device=self._device) if apart else None
            for matrix, apart in zip(self._matrices, self._apart, strict=True)
        ]

    def _views(
        self, batches: dict[tuple[int, int], Tensor], own: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return each matrix's update: its place in a batch, or the tensor of its own."""
        units = {shape: batch.unbind(0) for shape, batch in batches.items()}
        views = []
        for at, (matrix, places) in enumerate(zip(self._matrices, self._places, strict=True)):
            shape, at_batch = places[0]
            room = own[at]
            if room is not None:
                views.append(room)
            elif shape == matrix.shape:
                views.append(units[shape][at_batch.start])
            else:
                views.append(batches[shape][at_batch].view(matrix.shape))
        return views


def part_shapes(matrix: Matrix, split: Split) -> list[tuple[int, int]]:
    """Return the shape, as stored, of what is orthogonalized together in each block."""
    rows = [num_rows(matrix, block, split) for block in matrix.blocks]
    return [(matrix.num_in, n) if matrix.transposed else (n, matrix.num_in) for n in rows]


def num_parts(matrix: Matrix, split: Split) -> list[int]:
    """Return how many parts of that shape each block of a single matrix has."""
    sizes = [block.size * matrix.repeats for block in matrix.blocks]
    rows = [num_rows(matrix, block, split) for block in matrix.blocks]
    return [size // max(n, 1) or 1 for size, n in zip(sizes, rows, strict=True)]


def update_dtype(raw: Tensor) -> torch.dtype:
    """Return the dtype of what is to be orthogonalized: 2 bytes on a GPU; a CPU has float32.

    bfloat16, because gradients may be too small for float16 before they are divided by their norm.
    """
    if raw.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if raw.device.type == "cuda" else torch.float32


def _is_apart(matrix: Matrix, split: Split) -> bool:
    """Return whether parts of a matrix are not one after the other as it is stored."""
    by_heads = split == "heads" and matrix.blocks[0].head_dim is not None
    return len(matrix.blocks) > 1 or (by_heads and matrix.transposed)


def _part_views(matrix: Matrix, stored: Tensor, split: Split) -> list[Tensor]:
    """Return the parts of each block of a stored matrix, as views with the parts' axes last.

    Repeats that belong to one part are an axis of their own beside its rows.
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

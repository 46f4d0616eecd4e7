"""Whole matrices to orthogonalize, those of one shape side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers.optim._newton_schulz import Coefficients, orthogonalize

AdjustLr = Literal["match_rms_adamw", "original"]


def lr_factor(rule: AdjustLr, num_out: int, num_in: int) -> float:
    """Return what Muon's learning rate is multiplied by for a matrix of this shape."""
    if rule == "original":
        return math.sqrt(max(1.0, num_out / max(num_in, 1)))
    return 0.2 * math.sqrt(max(num_out, num_in))


def adjust_of(matrix: Matrix, rule: AdjustLr) -> float:
    """Return what is left to multiply a whole update with; blocks have their own factors."""
    return lr_factor(rule, matrix.num_out, matrix.num_in) if len(matrix.blocks) == 1 else 1.0


class Batches:
    """Where the updates of many matrices lie, those of one shape side by side.

    A matrix that is one block and no stack has its update right in its batch; the blocks of
    others are copied in and out.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        rule: AdjustLr,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._matrices = matrices
        self._rule: AdjustLr = rule
        self._dtype, self._device = dtype, device
        self._counts: dict[tuple[int, int], int] = {}
        # For each matrix, the shape, first place and number of each of its blocks.
        self._places: list[list[tuple[tuple[int, int], int, int]]] = []
        for matrix in matrices:
            places = []
            for shape in block_shapes(matrix):
                count = math.prod(matrix.stack)
                places.append((shape, self._counts.get(shape, 0), count))
                self._counts[shape] = self._counts.get(shape, 0) + count
            self._places.append(places)
        self.adjust = [adjust_of(matrix, rule) for matrix in matrices]

    def fresh(self) -> list[Tensor]:
        """Return room for the update of each matrix."""
        self._batches = {
            shape: torch.empty(count, *shape, dtype=self._dtype, device=self._device)
            for shape, count in self._counts.items()
        }
        apart = [
            torch.empty(matrix.shape, dtype=self._dtype, device=self._device)
            if len(places) > 1
            else None
            for matrix, places in zip(self._matrices, self._places, strict=True)
        ]
        return self._views(self._batches, apart)

    def orthogonalize(self, updates: list[Tensor], coefficients: Coefficients) -> list[Tensor]:
        """Return every update in its orthogonalized form."""
        for matrix, update, places in zip(self._matrices, updates, self._places, strict=True):
            if len(places) > 1:
                blocks = _block_views(matrix, update)
                for block, (shape, start, count) in zip(blocks, places, strict=True):
                    room = self._batches[shape][start : start + count]
                    room.copy_(block.reshape(count, *shape))
        done = {shape: orthogonalize(x, coefficients) for shape, x in self._batches.items()}
        del self._batches
        for matrix, update, places in zip(self._matrices, updates, self._places, strict=True):
            if len(places) > 1:
                blocks = zip(matrix.blocks, _block_views(matrix, update), places, strict=True)
                for block, view, (shape, start, count) in blocks:
                    factor = lr_factor(self._rule, block.size * matrix.repeats, matrix.num_in)
                    view.copy_((done[shape][start : start + count] * factor).view(view.shape))
        return self._views(done, updates)

    def _views(
        self, batches: dict[tuple[int, int], Tensor], apart: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return each matrix's update: its place in a batch, or the tensor it has apart."""
        units = {shape: batch.unbind(0) for shape, batch in batches.items()}
        views = []
        for matrix, places, own in zip(self._matrices, self._places, apart, strict=True):
            shape, start, count = places[0]
            if len(places) > 1 and own is not None:
                views.append(own)
            elif not matrix.stack:
                views.append(units[shape][start])
            else:
                views.append(batches[shape][start : start + count])
        return views


def block_shapes(matrix: Matrix) -> list[tuple[int, int]]:
    """Return the shape, as stored, of each block of a matrix, without its stack."""
    rows = [block.size * matrix.repeats for block in matrix.blocks]
    return [(matrix.num_in, n) if matrix.transposed else (n, matrix.num_in) for n in rows]


def update_dtype(raw: Tensor) -> torch.dtype:
    """Newton-Schulz runs in bfloat16 on a GPU; a CPU is faster in float32."""
    if raw.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if raw.device.type == "cuda" else torch.float32


def _block_views(matrix: Matrix, stored: Tensor) -> list[Tensor]:
    """Return the blocks of a stored matrix, as views with the repeats on an axis of their own."""
    sizes = [block.size for block in matrix.blocks]
    dim = -1 if matrix.transposed else -2
    grid = stored.unflatten(dim, matrix.row_pattern)
    return list(grid.split(sizes, dim if matrix.transposed else -2))

"""Muon on distributed matrices: each is orthogonalized once, whole, on the rank that owns it.

Every rank sends its parts of the updates to their owners and gets its parts of the results back:
two all-to-all exchanges a step, 2 bytes a number on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._newton_schulz import result_dtype
from learnable_multipliers.optim._batches import (
    AdjustLr,
    Batches,
    Split,
    adjust_of,
    num_parts,
    part_shapes,
    update_dtype,
)
from learnable_multipliers.optim._newton_schulz import COEFFICIENTS, Coefficients
from learnable_multipliers.optim._sharding import Box

_EMPTY = range(0)


@dataclass(frozen=True)
class _Whole:
    """One matrix to orthogonalize: a parameter, or one expert of a stack."""

    parameter: int
    expert: int | None
    matrix: Matrix
    owner: int
    boxes: tuple[Box, ...]
    """Rows and columns that each rank holds."""
    sources: frozenset[int]
    """The ranks that bring it to its owner, each part once."""


@dataclass(frozen=True)
class _Piece:
    """A part of a matrix that travels: from its rows and columns to a place in a buffer."""

    whole: int
    box: Box

    @property
    def size(self) -> int:
        return len(self.box[0]) * len(self.box[1])


class SharedBatches:
    """As `Batches`, for updates whose parts are on the ranks of a process group."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        boxes: Sequence[Sequence[Box]],
        raws: Sequence[Tensor],
        group: dist.ProcessGroup,
        rule: AdjustLr,
        split: Split,
    ):
        """Divide the work; `boxes` has the part of each matrix that every rank holds."""
        self._group, self._raws = group, raws
        rank, ranks = group.rank(), range(group.size())
        self._dtype, self._device = update_dtype(raws[0]), raws[0].device
        self._first_expert = [of[rank][0].start for of in boxes]
        self._wholes = _divided(matrices, boxes, group.size(), split)
        self.adjust = [adjust_of(matrix, rule, split) for matrix in matrices]
        mine = [at for at, whole in enumerate(self._wholes) if whole.owner == rank]
        self._owned = {at: place for place, at in enumerate(mine)}
        self._batches = Batches(
            [self._wholes[at].matrix for at in mine], rule, split, self._dtype, self._device
        )
        self._to_owners = [self._pieces(rank, owner, brought=True) for owner in ranks]
        self._from_sources = [self._pieces(holder, rank, brought=True) for holder in ranks]
        self._to_holders = [self._pieces(holder, rank, brought=False) for holder in ranks]
        self._from_owners = [self._pieces(rank, owner, brought=False) for owner in ranks]

    def _pieces(self, holder: int, owner: int, *, brought: bool) -> list[_Piece]:
        """Return what goes between a holder and an owner: brought there, or sent back to all."""
        pieces = [
            _Piece(at, whole.boxes[holder])
            for at, whole in enumerate(self._wholes)
            if whole.owner == owner and (not brought or holder in whole.sources)
        ]
        return [piece for piece in pieces if piece.size]

    def fresh(self) -> list[Tensor]:
        """Return room for this rank's part of each update."""
        return [torch.empty_like(raw, dtype=self._dtype) for raw in self._raws]

    def orthogonalize(
        self, updates: list[Tensor], coefficients: Coefficients, backend: Backend
    ) -> list[Tensor]:
        """Return this rank's part of every update in its orthogonalized form."""
        whole = self._batches.fresh()

        def room(piece: _Piece) -> Tensor:
            rows, cols = piece.box
            matrix = whole[self._owned[piece.whole]]
            return matrix[rows.start : rows.stop, cols.start : cols.stop]

        def part(piece: _Piece) -> Tensor:
            of = self._wholes[piece.whole]
            update = updates[of.parameter]
            if of.expert is None:
                return update
            return update[of.expert - self._first_expert[of.parameter]]

        self._exchange(self._to_owners, part, self._from_sources, room, self._dtype)
        whole = self._batches.orthogonalize(whole, coefficients, backend)
        dtype = result_dtype(self._dtype)
        updates = [torch.empty_like(update, dtype=dtype) for update in updates]
        self._exchange(self._to_holders, room, self._from_owners, part, dtype)
        return updates

    def _exchange(
        self,
        leaving: list[list[_Piece]],
        source: Any,
        arriving: list[list[_Piece]],
        target: Any,
        dtype: torch.dtype,
    ) -> None:
        """Exchange pieces between ranks: read from `source(piece)`, written to `target(piece)`."""
        parts = [source(piece).reshape(-1) for pieces in leaving for piece in pieces]
        nothing = torch.empty(0, dtype=dtype, device=self._device)
        sent = torch.cat([nothing, *parts])
        sizes = [[piece.size for piece in pieces] for pieces in arriving]
        found = sent.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            found,
            sent,
            [sum(some) for some in sizes],
            [sum(piece.size for piece in pieces) for pieces in leaving],
            group=self._group,
        )
        came = found.split([size for some in sizes for size in some])
        for piece, numbers in zip((p for some in arriving for p in some), came, strict=True):
            room = target(piece)
            room.copy_(numbers.view(room.shape))


def gathered_boxes(
    group: dist.ProcessGroup, own: Sequence[Box], device: torch.device
) -> list[list[Box]]:
    """Return what every rank of a process group holds of each tensor, given what this one does."""
    bounds = [[(part.start, part.stop) for part in _three(box)] for box in own]
    mine = torch.tensor(bounds, dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    by_rank = torch.stack(found, 1).tolist()
    return [
        [tuple(range(*pair) for pair in parts)[3 - len(box) :] for parts in ranks]
        for box, ranks in zip(own, by_rank, strict=True)
    ]


def newton_schulz_cost(matrix: Matrix, split: Split) -> int:
    """Return the multiplications of orthogonalizing the parts of a single matrix."""
    steps = len(COEFFICIENTS["quintic"])
    total = 0
    for shape, count in zip(part_shapes(matrix, split), num_parts(matrix, split), strict=True):
        small, large = sorted(shape)
        total += count * steps * (2 * small**2 * large + small**3)
    return total


def assigned(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank that gets each piece of work: the costliest first, to who has least."""
    loads, owners = [0] * num_ranks, [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        owners[at] = min(range(num_ranks), key=loads.__getitem__)
        loads[owners[at]] += costs[at]
    return owners


def _divided(
    matrices: Sequence[Matrix], boxes: Sequence[Sequence[Box]], num_ranks: int, split: Split
) -> list[_Whole]:
    """Give each matrix, and each expert of a stack, to the rank that orthogonalizes it."""
    found: list[tuple[int, int | None, Matrix]] = []
    for at, matrix in enumerate(matrices):
        single = replace(matrix, shape=matrix.shape[-2:])
        experts = range(matrix.stack[0]) if matrix.stack else [None]
        found += [(at, expert, single) for expert in experts]
    owners = assigned([newton_schulz_cost(single, split) for _, _, single in found], num_ranks)
    wholes = []
    for (at, expert, single), owner in zip(found, owners, strict=True):
        held = tuple(_of_expert(box, expert) for box in boxes[at])
        holders: dict[Box, list[int]] = {}
        for rank, box in enumerate(held):
            holders.setdefault(box, []).append(rank)
        # Of ranks with copies, the nearest to the owner: mostly on the same machine.
        nearest = {min(ranks, key=lambda r: abs(r - owner)) for ranks in holders.values()}
        wholes.append(_Whole(at, expert, single, owner, held, frozenset(nearest)))
    return wholes


def _of_expert(box: Box, expert: int | None) -> Box:
    """Return the rows and columns that a part holds of one matrix of a stack."""
    if expert is None:
        return box
    return box[1:] if expert in box[0] else (_EMPTY, _EMPTY)


def _three(box: Box) -> Box:
    return (*(range(1),) * (3 - len(box)), *box)

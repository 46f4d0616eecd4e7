"""Muon on distributed matrices: each is orthogonalized once, as a whole, on the rank that owns it.

Every rank sends its shards of the updates to their owners and gets its shards of the results back:
two all-to-all exchanges per step, with 2 bytes per number on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

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
    num_partitions,
    partition_shapes,
    update_dtype,
)
from learnable_multipliers.optim._orthogonalization import COEFFICIENTS, Coefficients
from learnable_multipliers.optim._sharding import Box

_EMPTY = range(0)


@dataclass(frozen=True)
class _Job:
    """One matrix to orthogonalize: a parameter, or one expert of a stack."""

    parameter: int
    expert: int | None
    matrix: Matrix
    owner: int
    boxes: tuple[Box, ...]
    """The rows and columns on each rank."""
    sources: frozenset[int]
    """The ranks that send to the owner; of replicas only one sends."""


@dataclass(frozen=True)
class _Transfer:
    """A box of one job's matrix that one rank sends to another."""

    job: int
    box: Box

    @property
    def size(self) -> int:
        return len(self.box[0]) * len(self.box[1])


class DistributedBatches:
    """Like `Batches`, for updates that are sharded or replicated over a process group."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        boxes: Sequence[Sequence[Box]],
        raws: Sequence[Tensor],
        group: dist.ProcessGroup,
        rule: AdjustLr,
        split: Split,
    ):
        """Assign the work to ranks; `boxes` has the box of each matrix on every rank."""
        self._group, self._raws = group, raws
        rank, ranks = group.rank(), range(group.size())
        self._dtype, self._device = update_dtype(raws[0]), raws[0].device
        self._first_expert = [of[rank][0].start for of in boxes]
        self._jobs = _assign_jobs(matrices, boxes, group.size(), split)
        self.adjust = [adjust_of(matrix, rule, split) for matrix in matrices]
        own = [i for i, job in enumerate(self._jobs) if job.owner == rank]
        self._owned = {job: i for i, job in enumerate(own)}
        self._batches = Batches(
            [self._jobs[i].matrix for i in own], rule, split, self._dtype, self._device
        )
        self._to_owners = [self._transfers(rank, owner, to_owner=True) for owner in ranks]
        self._from_sources = [self._transfers(holder, rank, to_owner=True) for holder in ranks]
        self._to_holders = [self._transfers(holder, rank, to_owner=False) for holder in ranks]
        self._from_owners = [self._transfers(rank, owner, to_owner=False) for owner in ranks]

    def _transfers(self, holder: int, owner: int, *, to_owner: bool) -> list[_Transfer]:
        """Return the transfers between a holder and an owner; replicas only receive."""
        transfers = [
            _Transfer(i, job.boxes[holder])
            for i, job in enumerate(self._jobs)
            if job.owner == owner and (not to_owner or holder in job.sources)
        ]
        return [transfer for transfer in transfers if transfer.size]

    def allocate(self) -> list[Tensor]:
        """Return an uninitialized tensor for this rank's shard of each update."""
        return [torch.empty_like(raw, dtype=self._dtype) for raw in self._raws]

    def orthogonalize(
        self, updates: list[Tensor], coefficients: Coefficients, backend: Backend
    ) -> list[Tensor]:
        """Return this rank's shard of every update in its orthogonalized form."""
        owned = self._batches.allocate()

        def in_owned(transfer: _Transfer) -> Tensor:
            rows, cols = transfer.box
            matrix = owned[self._owned[transfer.job]]
            return matrix[rows.start : rows.stop, cols.start : cols.stop]

        def in_shard(transfer: _Transfer) -> Tensor:
            job = self._jobs[transfer.job]
            update = updates[job.parameter]
            if job.expert is None:
                return update
            return update[job.expert - self._first_expert[job.parameter]]

        self._exchange(self._to_owners, in_shard, self._from_sources, in_owned, self._dtype)
        owned = self._batches.orthogonalize(owned, coefficients, backend)
        dtype = result_dtype(self._dtype)
        updates = [torch.empty_like(update, dtype=dtype) for update in updates]
        self._exchange(self._to_holders, in_owned, self._from_owners, in_shard, dtype)
        return updates

    def _exchange(
        self,
        sends: list[list[_Transfer]],
        source: Callable[[_Transfer], Tensor],
        receives: list[list[_Transfer]],
        target: Callable[[_Transfer], Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Send `source(transfer)` of each of `sends`; write `target(transfer)` of `receives`.

        Both have a list for each rank.
        """
        values = [source(transfer).reshape(-1) for transfers in sends for transfer in transfers]
        nothing = torch.empty(0, dtype=dtype, device=self._device)
        sent = torch.cat([nothing, *values])
        sizes = [[transfer.size for transfer in transfers] for transfers in receives]
        received = sent.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            sent,
            [sum(of_rank) for of_rank in sizes],
            [sum(transfer.size for transfer in transfers) for transfers in sends],
            group=self._group,
        )
        arrived = received.split([size for of_rank in sizes for size in of_rank])
        for transfer, numbers in zip(chain.from_iterable(receives), arrived, strict=True):
            view = target(transfer)
            view.copy_(numbers.view(view.shape))


def gather_boxes(
    group: dist.ProcessGroup, own: Sequence[Box], device: torch.device
) -> list[list[Box]]:
    """Return the box of each tensor on every rank of a process group, given those on this rank."""
    bounds = [[(side.start, side.stop) for side in _three(box)] for box in own]
    mine = torch.tensor(bounds, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    by_rank = torch.stack(gathered, 1).tolist()
    return [
        [tuple(range(*pair) for pair in sides)[3 - len(box) :] for sides in ranks]
        for box, ranks in zip(own, by_rank, strict=True)
    ]


def newton_schulz_cost(matrix: Matrix, split: Split) -> int:
    """Return the multiplications of orthogonalizing a single matrix."""
    steps = len(COEFFICIENTS["quintic"])
    total = 0
    shapes, counts = partition_shapes(matrix, split), num_partitions(matrix, split)
    for shape, count in zip(shapes, counts, strict=True):
        small, large = sorted(shape)
        total += count * steps * (2 * small**2 * large + small**3)
    return total


def assign_owners(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner of each job: the most expensive first, to the rank with the least work."""
    loads, owners = [0] * num_ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = min(range(num_ranks), key=loads.__getitem__)
        loads[owners[i]] += costs[i]
    return owners


def _assign_jobs(
    matrices: Sequence[Matrix], boxes: Sequence[Sequence[Box]], num_ranks: int, split: Split
) -> list[_Job]:
    """Assign each matrix, and each expert of a stack, to the rank that orthogonalizes it."""
    singles: list[tuple[int, int | None, Matrix]] = []
    for at, matrix in enumerate(matrices):
        single = replace(matrix, shape=matrix.shape[-2:])
        experts = range(matrix.stack[0]) if matrix.stack else [None]
        singles += [(at, expert, single) for expert in experts]
    costs = [newton_schulz_cost(single, split) for _, _, single in singles]
    owners = assign_owners(costs, num_ranks)
    jobs = []
    for (at, expert, single), owner in zip(singles, owners, strict=True):
        held = tuple(_of_expert(box, expert) for box in boxes[at])
        holders: dict[Box, list[int]] = {}
        for rank, box in enumerate(held):
            holders.setdefault(box, []).append(rank)
        # Of replicas, the nearest to the owner sends: mostly on the same machine.
        nearest = {min(ranks, key=lambda r: abs(r - owner)) for ranks in holders.values()}
        jobs.append(_Job(at, expert, single, owner, held, frozenset(nearest)))
    return jobs


def _of_expert(box: Box, expert: int | None) -> Box:
    """Return the rows and columns that a box has of one matrix of a stack."""
    if expert is None:
        return box
    return box[1:] if expert in box[0] else (_EMPTY, _EMPTY)


def _three(box: Box) -> Box:
    return (*(range(1),) * (3 - len(box)), *box)

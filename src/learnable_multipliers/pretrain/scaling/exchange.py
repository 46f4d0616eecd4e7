"""Muon's exchange: which rank orthogonalizes which matrix, and the numbers sent for it.

The formulas of `optim/_distributed_batches.py` for any number of ranks, without ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers.optim._distributed_batches import assign_owners, newton_schulz_cost
from learnable_multipliers.optim._muon import is_hidden
from learnable_multipliers.optim._sharding import Box, box_of
from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.scaling.weights import Weight


@dataclass(frozen=True)
class Exchange:
    """One all-to-all: counts of numbers sent from rank to rank, or kept on a rank."""

    numbers: Mapping[tuple[int, int], int]
    """By (sender, receiver); pairs without any are left out."""


@dataclass(frozen=True)
class MuonWork:
    """The work of a step that is divided among ranks."""

    there: Exchange
    """Updates, each number once, to the owners of their matrices."""
    back: Exchange
    """Results, to all ranks that hold a part or a copy."""
    flops: tuple[int, ...]
    """Of Newton-Schulz, by rank."""


def muon_work(weights: Sequence[Weight], axes: Axes) -> MuonWork:
    """Divide the hidden matrices, and the experts of stacks, among all ranks."""
    size = math.prod(axes)
    wholes = [whole for weight in weights if weight.is_trained for whole in _wholes(weight)]
    costs = [newton_schulz_cost(matrix, "blocks") for _, _, matrix in wholes]
    owners = assign_owners(costs, size)
    loads = [0] * size
    there: Counter[tuple[int, int]] = Counter()
    back: Counter[tuple[int, int]] = Counter()
    holders: dict[tuple[object, ...], dict[Box, list[int]]] = {}
    for (weight, expert, _), cost, owner in zip(wholes, costs, owners, strict=True):
        # Two operations for each multiplication: the sum counts.
        loads[owner] += 2 * cost
        key = (weight.shape, weight.tensor_dim, expert)
        if key not in holders:
            holders[key] = _holders(weight, expert, axes)
        for box, ranks in holders[key].items():
            number = math.prod(map(len, box))
            there[min(ranks, key=lambda rank: abs(rank - owner)), owner] += number
            for rank in ranks:
                back[owner, rank] += number
    return MuonWork(Exchange(there), Exchange(back), tuple(loads))


def _wholes(weight: Weight) -> list[tuple[Weight, int | None, Matrix]]:
    """Return the matrices of a parameter that are orthogonalized, each with its expert."""
    matrix = weight.matrix
    if matrix is None or not is_hidden(matrix):
        return []
    single = replace(matrix, shape=matrix.shape[-2:])
    experts = range(matrix.stack[0]) if matrix.stack else [None]
    return [(weight, expert, single) for expert in experts]


def _holders(weight: Weight, expert: int | None, axes: Axes) -> dict[Box, list[int]]:
    """Return the ranks that hold each part of a matrix; empty parts are left out."""
    holders: dict[Box, list[int]] = {}
    for rank in range(math.prod(axes)):
        shard_rank, tensor_rank = rank // axes.tensor % axes.shard, rank % axes.tensor
        box = box_of(weight.shape, weight.chunks(axes, shard_rank, tensor_rank))
        if expert is not None:
            if expert not in box[0]:
                continue
            box = box[1:]
        if all(map(len, box)):
            holders.setdefault(box, []).append(rank)
    return holders

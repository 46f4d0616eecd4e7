"""All sums over ranks in one all-reduce per step.

These are partial gradients of multipliers, the squared norm of every parameter's gradient, and
whether any gradient is not finite. Each rank adds its share to a buffer that covers whole vectors,
so that sums over different axes of a mesh share one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learnable_multipliers.optim._packed_multipliers import PackedMultipliers
from learnable_multipliers.optim._sharding import LocalShard, local_values


@dataclass(frozen=True)
class _Route:
    """Indices that map the partial gradients of some packed multipliers to the buffer."""

    taken: Tensor
    """Indices of the partial gradients among all gradients."""
    put: Tensor
    """Their indices in the buffer."""
    weight: Tensor
    """One over the number of ranks that contribute the same numbers."""
    unsent: Tensor
    """The same weight for gradients that are complete on their rank and not sent; else 0."""


class PackedSums:
    """Layout of the buffer, the same on all ranks of a process group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        shards: Sequence[LocalShard],
        packed: dict[torch.dtype, PackedMultipliers],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._group, self._dtype, self._device = group, dtype, device
        parts = torch.tensor([shard.num_shards for shard in shards], dtype=dtype)
        self._square_weights = (parts / group.size()).to(device)
        self._squares = slice(1, 1 + len(shards))
        self.size = 1 + len(shards)
        """Number of elements in the all-reduce."""
        self._routes = {dtype: self._route(one, shards) for dtype, one in packed.items()}

    def _route(self, packed: PackedMultipliers, shards: Sequence[LocalShard]) -> _Route:
        places = torch.arange(len(packed.values))
        taken, put, weight = [], [], []
        unsent = torch.zeros(len(places), dtype=packed.values.dtype)
        for index, matrix in packed.matrices.items():
            shard = shards[index]
            for name, own in packed.views_of(places, index).items():
                if name not in shard.partial:
                    unsent[own.flatten()] = shard.num_shards / self._group.size()
                    continue
                shape = torch.Size(matrix.value_shapes()[name])
                whole = torch.arange(self.size, self.size + shape.numel()).view(shape)
                self.size += shape.numel()
                taken.append(own.flatten())
                put.append(local_values(matrix, shard, {name: whole})[name].flatten())
                replicas = self._group.size() / shard.num_shards
                weight.append(torch.full((own.numel(),), 1 / replicas, dtype=packed.values.dtype))
        none, nothing = places[:0], torch.zeros(0, dtype=packed.values.dtype)
        joined = [none, *taken], [none, *put], [nothing, *weight], [unsent]
        return _Route(*(torch.cat(tensors).to(self._device) for tensors in joined))

    def all_reduce_(
        self, grads: dict[torch.dtype, Tensor], squares: Tensor, multipliers: bool
    ) -> tuple[Tensor, Tensor]:
        """Complete gradients and squared norms in place; return the sum of squares, and if finite.

        `squares` holds the squared norm of each parameter's shard on this rank. With `multipliers`
        the sum includes the squares of their gradients.
        """
        size = self.size + multipliers
        packed = torch.zeros(size, dtype=self._dtype, device=self._device)
        for grad in grads.values():
            # Gradients that are complete on this rank are not sent, but their check is.
            packed[0] += ~grad.isfinite().all()
        packed[self._squares] = squares * self._square_weights
        for dtype, route in self._routes.items():
            own = grads[dtype].index_select(0, route.taken) * route.weight
            packed.index_copy_(0, route.put, own.to(packed.dtype))
        if multipliers:
            for dtype, route in self._routes.items():
                packed[-1] += (grads[dtype].square() * route.unsent).sum()
        dist.all_reduce(packed, group=self._group)
        squares.copy_(packed[self._squares])
        total = squares.sum()
        if multipliers:
            total = total + packed[self._squares.stop : self.size].square().sum() + packed[-1]
        for dtype, route in self._routes.items():
            sums = packed.index_select(0, route.put).to(dtype)
            grads[dtype].index_copy_(0, route.taken, sums)
        return total, packed.isfinite().all() & (packed[0] == 0)

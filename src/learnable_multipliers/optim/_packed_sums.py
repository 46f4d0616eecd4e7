"""The sums that no rank can take alone, in one all-reduce a step.

Partial gradients of multipliers, the squared norm of every parameter's gradient, and whether any
number anywhere is not finite. Each rank writes what it has at its place in a buffer that covers
whole vectors, so that sums over different axes of a mesh travel together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers.optim._packed_multipliers import MultiplierBank, local_values
from learnable_multipliers.optim._process_group import Team
from learnable_multipliers.optim._sharding import Share


@dataclass(frozen=True)
class _Route:
    """Where the partial gradients of one bank go in the buffer."""

    taken: Tensor
    """Their places among the bank's gradients."""
    put: Tensor
    weight: Tensor
    """What a copy counts: one over the number of ranks that bring the same numbers."""


class PackedSums:
    """Where everything goes in the buffer; the same on all ranks of a team."""

    def __init__(
        self,
        team: Team,
        parameters: Sequence[tuple[Matrix | None, Share]],
        banks: dict[torch.dtype, tuple[MultiplierBank, list[int]]],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Lay out the buffer; `banks` tells which of the parameters each bank holds."""
        self._team, self._dtype, self._device = team, dtype, device
        shares = [share for _, share in parameters]
        parts = torch.tensor([share.num_parts for share in shares], dtype=dtype)
        self._square_weights = (parts / team.size).to(device)
        self._squares = slice(1, 1 + len(shares))
        self.size = 1 + len(shares)
        """Numbers that travel."""
        self._routes = {
            kind: self._route(bank, members, parameters) for kind, (bank, members) in banks.items()
        }

    def _route(
        self,
        bank: MultiplierBank,
        members: list[int],
        parameters: Sequence[tuple[Matrix | None, Share]],
    ) -> _Route:
        places = torch.arange(len(bank.values))
        taken, put, weight = [], [], []
        for place, index in enumerate(members):
            matrix, share = parameters[index]
            assert matrix is not None
            for name, own in bank.views_of(places, place).items():
                if name not in share.partial:
                    continue
                shape = torch.Size(matrix.value_shapes()[name])
                whole = torch.arange(self.size, self.size + shape.numel()).view(shape)
                self.size += shape.numel()
                taken.append(own.flatten())
                put.append(local_values(matrix, share.extent, {name: whole})[name].flatten())
                copies = self._team.size / share.num_parts
                weight.append(torch.full((own.numel(),), 1 / copies, dtype=bank.values.dtype))
        none, nothing = places[:0], torch.zeros(0, dtype=bank.values.dtype)
        joined = [none, *taken], [none, *put], [nothing, *weight]
        return _Route(*(torch.cat(tensors).to(self._device) for tensors in joined))

    def take_(self, grads: dict[torch.dtype, Tensor], squares: Tensor) -> Tensor:
        """Complete gradients and squared norms in place; tell whether all numbers are finite.

        `squares` holds the squared norm of each parameter's part here.
        """
        packed = torch.zeros(self.size, dtype=self._dtype, device=self._device)
        for grad in grads.values():
            # Rows that lie here alone do not travel; that they are not finite does.
            packed[0] += ~grad.isfinite().all()
        packed[self._squares] = squares * self._square_weights
        for dtype, route in self._routes.items():
            own = grads[dtype].index_select(0, route.taken) * route.weight
            packed.index_copy_(0, route.put, own.to(packed.dtype))
        dist.all_reduce(packed, group=self._team.group)
        squares.copy_(packed[self._squares])
        for dtype, route in self._routes.items():
            total = packed.index_select(0, route.put).to(dtype)
            grads[dtype].index_copy_(0, route.taken, total)
        return packed.isfinite().all() & (packed[0] == 0)

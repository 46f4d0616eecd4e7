"""Attention and MLP cut among ranks inside their products: heads and hidden features apart.

Rows of q, k, v, gate and up, and columns of o and down, lie on different ranks. What enters such a
block is the same on all of them, and what leaves it is summed. The state-space mixer, norms,
embedding and head are computed on every rank alike.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function


class _Enter(Function):
    """The same features for all ranks: their gradients add up on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(Function):
    """The sum of what ranks computed: each has the whole gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


def enter(x: Tensor, group: Any) -> Tensor:
    """Return features for a block that is cut among a group of ranks; None is no group."""
    return x if group is None else _Enter.apply(x, group)  # pyright: ignore[reportReturnType]


def leave(x: Tensor, group: Any) -> Tensor:
    """Return what such a block has computed, from this rank's part of it."""
    return x if group is None else _Leave.apply(x, group)  # pyright: ignore[reportReturnType]


def cut_(linear: nn.Linear, dim: int, mesh: Any) -> None:
    """Leave this rank its part of a linear's weight, cut along a dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(linear.weight.detach(), mesh, [Shard(dim)])
    linear.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)


def refuse_uneven(what: str, count: int, size: int) -> None:
    """Refuse to cut what does not come out even."""
    if count % size:
        raise ValueError(
            f"parallel.tensor={size} does not divide model.{what}={count}: choose one that does"
        )

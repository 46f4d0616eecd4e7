"""A model spread over the ranks of a world, and its loss as each of them computes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from learnable_multipliers.pretrain.distributed import World
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.loss import Losses


@dataclass(frozen=True)
class SpreadModel:
    """How a rank computes the loss of its part of a batch."""

    loss: Callable[[Tensor, float], Losses]
    """Tokens and the weight of the z-loss -> losses."""
    keeps_apart: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of all micro-batches but the last, whose gradients need not travel yet."""
    num_readers: int = 1
    """Ranks whose gradients are averaged."""
    copies: Any = None
    """The group of ranks that hold plain copies of every parameter."""


def spread_(model: HybridLM, world: World) -> SpreadModel:
    """Cut a model among ranks, before its optimizer is made; each rank has all of it until then."""
    if world.axis("tensor") > 1:
        model.cut_(world.mesh["tensor"])
    readers = world.num_readers
    if readers == 1:
        return SpreadModel(model.loss)
    if world.axis("shard") > 1 or world.axis("tensor") > 1:
        _shard_(model, world)
        return SpreadModel(model.loss, num_readers=readers)
    copies = world.mesh.get_group("data")
    copy = DistributedDataParallel(_Loss(model), process_group=copies)
    return SpreadModel(copy, copy.no_sync, readers, copies)


class _Loss(nn.Module):
    """The loss as a forward pass, which is what DistributedDataParallel watches."""

    def __init__(self, model: HybridLM):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, z_loss: float) -> Losses:
        return self.model.loss(tokens, z_loss)


def _shard_(model: HybridLM, world: World) -> None:
    """Apply FSDP2 layer by layer; embedding, last norm and head go together."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = world.mesh["data", "shard"] if world.axis("data") > 1 else world.mesh["shard"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")

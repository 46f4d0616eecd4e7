"""Parallelize a model with tensor parallelism, FSDP2 and DDP, without changes to its forward pass.

Tensor parallelism is a `ParallelStyle` for each block, applied by `parallelize_module`. Attention
is sharded by heads, MLPs by hidden features, embedding and head by rows of the vocabulary. Hooks
around a block give all ranks the same input and sum their outputs; inside, the block computes on
this rank's shards. Torch's own styles do not serve the linears of a block: projections are joined
into one product that never calls `Linear.forward`. The state-space mixer stays whole: its input
matrix holds five blocks that no contiguous shard divides by heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from learnable_multipliers.pretrain.distributed import World
from learnable_multipliers.pretrain.model.attention import Attention
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.loss import (
    Losses,
    head_logits,
    losses_of,
    target_logits,
)
from learnable_multipliers.pretrain.model.projections import weight_of


@dataclass(frozen=True)
class ParallelModel:
    """How a rank computes the loss of its part of a batch."""

    loss: Callable[[Tensor, float], Losses]
    """Tokens and the weight of the z-loss -> losses."""
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of all micro-batches except the last, which do not exchange gradients."""
    dp_degree: int = 1
    """Data-parallel degree, over which gradients are averaged."""
    dp_group: Any = None
    """The process group of DDP, whose ranks hold replicas of every parameter."""


def parallelize(model: HybridLM, world: World) -> ParallelModel:
    """Parallelize a model that is whole on every rank, before its optimizer is made."""
    if world.axes.tensor > 1:
        tensor_parallelize(model, world.mesh["tensor"])
    degree = world.axes.dp_degree
    if degree == 1:
        return ParallelModel(model.loss)
    if world.axes.shard > 1 or world.axes.tensor > 1:
        mesh = world.mesh["data", "shard"] if world.axes.data > 1 else world.mesh["shard"]
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        # Embedding, last norm and head are gathered together.
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "loss")
        return ParallelModel(model.loss, dp_degree=degree)
    group = world.mesh.get_group("data")
    copy = DistributedDataParallel(_Loss(model), process_group=group)
    return ParallelModel(copy, copy.no_sync, degree, group)


class _Loss(nn.Module):
    """The loss as a forward pass, which is what DistributedDataParallel hooks into."""

    def __init__(self, model: HybridLM):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, z_loss: float) -> Losses:
        return self.model.loss(tokens, z_loss)


# -- tensor parallelism -----------------------------------------------------------------------


def tensor_parallelize(model: HybridLM, mesh: DeviceMesh) -> None:
    """Shard attention, MLPs, embedding and head over a mesh of one axis."""
    config, degree = model.config, mesh.size()
    rank_shape(config, degree)
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": EmbeddingParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    if config.has_attention:
        styles["model.layers.*.self_attn"] = BlockParallel(("q_proj", "k_proj", "v_proj"), "o_proj")
    if config.has_mlp:
        styles["model.layers.*.feed_forward"] = BlockParallel(("gate_proj", "up_proj"), "down_proj")
    parallelize_module(model, mesh, styles)
    for module in model.modules():
        if isinstance(module, Attention):
            module.num_heads //= degree
            module.num_kv_heads //= degree
            # Its input and output are exchanged, which those of the other mixer are not.
            module.joinable = False
    # Each style has made a separate parameter.
    model.tie_()
    # Called, the head returns the logits of all tokens; the loss reads its shard.
    model.lm_head.computes_on_local_shard = True  # pyright: ignore[reportArgumentType]
    model.head_loss = vocab_parallel_loss(mesh, config.vocab_size)


def rank_shape(config: ModelConfig, degree: int) -> ModelConfig:
    """Return the model shape of one tensor-parallel rank, the largest if they differ.

    Raises:
        ValueError: The model cannot be sharded over as many ranks.
    """
    # A group of query heads stays with its key head.
    names = (
        ("num_kv_heads", "intermediate_size") if config.has_attention else ("intermediate_size",)
    )
    for name in names:
        if getattr(config, name) % degree:
            raise ValueError(
                f"parallel.tensor={degree} does not divide model.{name}={getattr(config, name)}: "
                "choose one that does"
            )
    rows = math.ceil(config.vocab_size / degree)
    if rows * (degree - 1) >= config.vocab_size:
        raise ValueError(
            f"parallel.tensor={degree} leaves a rank without any of model.vocab_size="
            f"{config.vocab_size} tokens: choose a smaller one"
        )
    sharded = {name: getattr(config, name) // degree for name in (*names, "num_heads")}
    return replace(config, vocab_size=rows, **sharded)


class BlockParallel(ParallelStyle):
    """Shards the linears of a block, copies its input to all ranks and sums their outputs."""

    def __init__(self, by_rows: tuple[str, ...], by_columns: str):
        self.dims = dict.fromkeys(by_rows, 0) | {by_columns: 1}
        """The dim of the weight that is sharded, by linear."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, dim in self.dims.items():
            _shard_weight(module.get_submodule(name), dim, device_mesh)
        module.register_forward_pre_hook(
            lambda _, inputs: (copy_to_tp(inputs[0], device_mesh), *inputs[1:])
        )
        module.register_forward_hook(lambda _, inputs, output: reduce_from_tp(output, device_mesh))  # pyright: ignore[reportArgumentType]
        return module


class EmbeddingParallel(ParallelStyle):
    """Shards an embedding by rows of the vocabulary: each token is looked up on one rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        _shard_weight(module, 0, device_mesh)
        first = _first_row(module.num_embeddings, device_mesh)

        def forward(tokens: Tensor) -> Tensor:
            weight = weight_of(module)
            rows = tokens - first
            elsewhere = (rows < 0) | (rows >= len(weight))
            embedded = F.embedding(rows.masked_fill(elsewhere, 0), weight)
            return reduce_from_tp(embedded.masked_fill(elsewhere[..., None], 0.0), device_mesh)

        module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        return module


def _shard_weight(module: nn.Module, dim: int, mesh: DeviceMesh) -> None:
    """Shard a weight, and let its block compute on the local shard."""
    weight = module.get_parameter("weight")
    shard = distribute_tensor(weight.detach(), mesh, [Shard(dim)])
    module.weight = nn.Parameter(shard, requires_grad=weight.requires_grad)
    module.computes_on_local_shard = True  # pyright: ignore[reportArgumentType]


def _first_row(vocab_size: int, mesh: DeviceMesh) -> int:
    return mesh.get_local_rank() * math.ceil(vocab_size / mesh.size())


def vocab_parallel_loss(mesh: DeviceMesh, vocab_size: int) -> Callable[..., Losses]:
    """Return `head_loss` with a head sharded by rows."""
    first_row = _first_row(vocab_size, mesh)

    def loss(
        features: Tensor, head: Tensor, mup_head: float, targets: Tensor, z_loss: float
    ) -> Losses:
        logits = head_logits(copy_to_tp(features, mesh), head, mup_head)
        # Shared by all ranks; the normalizer's gradient does not depend on it.
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        own = (logits - largest[..., None]).exp().sum(-1)
        normalizer = reduce_from_tp(own, mesh).log() + largest
        target = reduce_from_tp(target_logits(logits, targets - first_row), mesh)
        return losses_of(normalizer, target, z_loss)

    return loss


def copy_to_tp(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return features that every rank has; their gradients are summed over the ranks."""
    copies = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return copies.to_local(grad_placements=[Partial()])


def reduce_from_tp(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over ranks; each rank gets the whole gradient."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).full_tensor()

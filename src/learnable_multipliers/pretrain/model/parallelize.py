"""How a model is parallelized: tensor parallelism, FSDP2 and DDP; its forward pass knows of none.

Tensor parallelism is one `ParallelStyle` for each kind of block, applied by `parallelize_module`.
Attention is sharded by heads, MLPs by hidden features, embedding and head by rows of the
vocabulary. Hooks around a block give all ranks the same input and sum their outputs; inside, the
block computes on this rank's shards. Torch's own styles for linears do not work here: projections
are joined into one product that never calls `Linear.forward`. The state-space mixer stays whole:
its input matrix holds five blocks that no contiguous shard divides by heads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from learnable_multipliers.pretrain.distributed import World
from learnable_multipliers.pretrain.model.attention import Attention
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import MLP, HybridLM
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
    """The context of all micro-batches but the last, whose gradients are not exchanged yet."""
    dp_degree: int = 1
    """Data-parallel degree: gradients are averaged over as many parts of the batch."""
    dp_group: Any = None
    """The process group of DDP, whose ranks hold copies of every parameter."""


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
    config = model.config
    rank_shape(config, mesh.size())
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": EmbeddingParallel(),
        "lm_head": HeadParallel(),
    }
    if config.has_attention:
        styles["model.layers.*.self_attn"] = AttentionParallel()
    if config.has_mlp:
        styles["model.layers.*.feed_forward"] = MLPParallel()
    parallelize_module(model, mesh, styles)
    # Each style has made a parameter of its own.
    model.tie_()
    model.head_loss = vocab_parallel_loss(mesh.get_group(), _first_row(config.vocab_size, mesh))


def rank_shape(config: ModelConfig, degree: int) -> ModelConfig:
    """Return the shape of what one tensor-parallel rank computes, the largest if they differ.

    Raises:
        ValueError: The model cannot be sharded over as many ranks.
    """
    # A group of query heads stays with its key head.
    whole = {"num_kv_heads": config.has_attention, "intermediate_size": config.has_mlp}
    for name, present in whole.items():
        count = getattr(config, name)
        if present and count % degree:
            raise ValueError(
                f"parallel.tensor={degree} does not divide model.{name}={count}: choose one that "
                "does"
            )
    rows = math.ceil(config.vocab_size / degree)
    if rows * (degree - 1) >= config.vocab_size:
        raise ValueError(
            f"parallel.tensor={degree} leaves a rank without any of model.vocab_size="
            f"{config.vocab_size} tokens: choose a smaller one"
        )
    sharded = {name: getattr(config, name) // degree for name, present in whole.items() if present}
    return replace(config, vocab_size=rows, num_heads=config.num_heads // degree, **sharded)


class BlockParallel(ParallelStyle):
    """Shards the weights of a block, copies its input to all ranks and sums their outputs."""

    @abstractmethod
    def linears(self, block: Any) -> Iterable[tuple[nn.Linear, int]]:
        """Return the linears of a block, each with the dim of its weight that is sharded."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for linear, dim in self.linears(module):
            _shard_weight(linear, dim, device_mesh)
        group = device_mesh.get_group()
        module.register_forward_pre_hook(
            lambda _, inputs: (copy_to_tp(inputs[0], group), *inputs[1:])
        )
        module.register_forward_hook(lambda *call: reduce_from_tp(call[2], group))  # pyright: ignore[reportArgumentType]
        return module


class MLPParallel(BlockParallel):
    """Shards an MLP by its hidden features."""

    def linears(self, block: MLP) -> Iterable[tuple[nn.Linear, int]]:
        """Return gate and up, sharded by rows, and down, sharded by columns."""
        return (block.gate_proj, 0), (block.up_proj, 0), (block.down_proj, 1)


class AttentionParallel(BlockParallel):
    """Shards attention by its heads."""

    def linears(self, block: Attention) -> Iterable[tuple[nn.Linear, int]]:
        """Return q, k and v, sharded by rows, and o, sharded by columns."""
        return (*((linear, 0) for linear in block.inputs), (block.o_proj, 1))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Attention)
        module.num_heads //= device_mesh.size()
        module.num_kv_heads //= device_mesh.size()
        # Its input and output are exchanged, which those of the other mixer are not.
        module.joinable = False
        return super()._apply(module, device_mesh)


class EmbeddingParallel(ParallelStyle):
    """Shards an embedding by rows of the vocabulary: each token is looked up on one rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        first, group = _first_row(module.num_embeddings, device_mesh), device_mesh.get_group()
        _shard_weight(module, 0, device_mesh)

        def forward(tokens: Tensor) -> Tensor:
            weight = weight_of(module)
            rows = tokens - first
            elsewhere = (rows < 0) | (rows >= len(weight))
            found = F.embedding(rows.masked_fill(elsewhere, 0), weight)
            return reduce_from_tp(found.masked_fill(elsewhere[..., None], 0.0), group)

        module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        return module


class HeadParallel(ParallelStyle):
    """Shards a head by rows of the vocabulary; called, it returns the logits of all tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # The loss reads the weight itself; torch's style does the rest.
        style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(module, device_mesh, style)
        module.register_forward_hook(lambda _, inputs, output: output.full_tensor())
        module.used_by_shard = True  # pyright: ignore[reportArgumentType]
        return module


def _shard_weight(module: nn.Linear | nn.Embedding, dim: int, mesh: DeviceMesh) -> None:
    """Leave this rank its shard of a weight, and let its block compute on that."""
    weight = distribute_tensor(module.weight.detach(), mesh, [Shard(dim)])
    module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    module.used_by_shard = True  # pyright: ignore[reportArgumentType]


def _first_row(vocab_size: int, mesh: DeviceMesh) -> int:
    return mesh.get_local_rank() * math.ceil(vocab_size / mesh.size())


def vocab_parallel_loss(group: Any, first_row: int) -> Callable[..., Losses]:
    """Return `head_loss` for ranks that each hold rows of the head, this one from `first_row`."""

    def loss(
        features: Tensor, head: Tensor, mup_head: float, targets: Tensor, z_loss: float
    ) -> Losses:
        logits = head_logits(copy_to_tp(features, group), head, mup_head)
        # Shared by all ranks; the normalizer's gradient does not depend on it.
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        own = (logits - largest[..., None]).exp().sum(-1)
        normalizer = reduce_from_tp(own, group).log() + largest
        target = reduce_from_tp(target_logits(logits, targets - first_row), group)
        return losses_of(normalizer, target, z_loss)

    return loss


def copy_to_tp(x: Tensor, group: Any) -> Tensor:
    """Return features that every rank of a group has; their gradients are summed over it."""
    return _CopyToTP.apply(x, group)  # pyright: ignore[reportReturnType]


def reduce_from_tp(x: Tensor, group: Any) -> Tensor:
    """Return the sum of what the ranks of a group have; each gets the whole gradient."""
    return _ReduceFromTP.apply(x, group)  # pyright: ignore[reportReturnType]


class _CopyToTP(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_reduced(grad, ctx.group), None


class _ReduceFromTP(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


def _all_reduced(x: Tensor, group: Any) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total

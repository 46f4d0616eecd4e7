"""The collectives of a train step, with their bytes, as `lrm train` issues them.

FSDP2 gathers and reduces in float32: parameters are float32, and no mixed-precision policy is set.
Tensor parallelism sums the outputs of a block in the dtype of its products, and the gradients of
its inputs in that of the residual stream, float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from learnable_multipliers.optim._sharding import shard_from_chunks
from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.scaling.weights import ROOT, Weight

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]
Over = Literal["data", "shard", "tensor", "all"]
FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective, the same on all ranks that take part."""

    what: str
    """Its purpose."""
    kind: Kind
    over: Over
    """The axis of the mesh whose ranks take part, or all ranks."""
    num_bytes: int
    """Bytes of the whole tensor that is gathered, scattered or reduced."""


# -- FSDP2, of one micro-batch ----------------------------------------------------------------


def fsdp_forward(weights: Sequence[Weight], axes: Axes, tensor_rank: int = 0) -> list[Collective]:
    """One all-gather for each unit, the root's first."""
    if axes.shard == 1:
        return []
    units = dict.fromkeys([ROOT, *(weight.unit for weight in weights)])
    return [_gathered(weights, unit, axes, tensor_rank) for unit in units]


def fsdp_backward(weights: Sequence[Weight], axes: Axes, tensor_rank: int = 0) -> list[Collective]:
    """Each layer gathered again, the gradients of each unit reduced; the root's last."""
    collectives: list[Collective] = []
    if axes.dp_degree == 1:
        return collectives
    units = list(dict.fromkeys(weight.unit for weight in weights if weight.unit != ROOT))
    if axes.shard > 1:
        # The root unit stays gathered after the forward pass.
        collectives += [_gathered(weights, unit, axes, tensor_rank) for unit in reversed(units)]
    for unit in [*reversed(units), ROOT]:
        trained = [weight for weight in weights if weight.is_trained and weight.unit == unit]
        whole = padded_bytes(trained, axes, tensor_rank)
        if axes.shard > 1 and whole:
            collectives.append(
                Collective(what="gradients", kind="reduce-scatter", over="shard", num_bytes=whole)
            )
        if axes.data > 1 and whole:
            collectives.append(
                Collective(
                    what="gradients of replicas",
                    kind="all-reduce",
                    over="data",
                    num_bytes=whole // axes.shard,
                )
            )
    return collectives


def padded_bytes(weights: Iterable[Weight], axes: Axes, tensor_rank: int) -> int:
    """Return sum of shards * ceil(first dim / shards) * other dims, in float32.

    Shards are padded to one size, so that a vector of 24 numbers takes 1,024 on 1,024 ranks.
    """
    total = 0
    for weight in weights:
        first, *rest = weight.tensor_shape(axes, tensor_rank)
        total += FLOAT * axes.shard * math.ceil(first / axes.shard) * math.prod(rest)
    return total


def _gathered(weights: Sequence[Weight], unit: str, axes: Axes, tensor_rank: int) -> Collective:
    own = [weight for weight in weights if weight.unit == unit]
    size = padded_bytes(own, axes, tensor_rank)
    return Collective(what="weights", kind="all-gather", over="shard", num_bytes=size)


# -- tensor parallelism, of one micro-batch ---------------------------------------------------


def tensor_forward(config: ModelConfig, axes: Axes, tokens: int, width: int) -> list[Collective]:
    """Outputs of embedding and blocks; largest logit, normalizer and target of each token.

    Args:
        width: Bytes of a number in matrix products: 2 for bfloat16.
    """
    if axes.tensor == 1:
        return []
    features = tokens * config.hidden_size
    blocks = [width * features] * (_num_blocks(config) * config.num_layers)
    return _summed("activations", [FLOAT * features, *blocks, *[FLOAT * tokens] * 3])


def tensor_backward(config: ModelConfig, axes: Axes, tokens: int) -> list[Collective]:
    """Gradients of what goes into the head and each block."""
    if axes.tensor == 1:
        return []
    number = 1 + _num_blocks(config) * config.num_layers
    return _summed("gradients of activations", [FLOAT * tokens * config.hidden_size] * number)


def _num_blocks(config: ModelConfig) -> int:
    """Return the sharded blocks of a layer; the state-space mixer is whole on every rank."""
    return config.has_attention + config.has_mlp


def _summed(what: str, sizes: list[int]) -> list[Collective]:
    return [
        Collective(what=what, kind="all-reduce", over="tensor", num_bytes=size) for size in sizes
    ]


# -- once a step ------------------------------------------------------------------------------


def packed_sums(weights: Sequence[Weight], axes: Axes) -> list[Collective]:
    """One number for all, one for each trained parameter, and multipliers along sharded dims.

    A multiplier's gradient is a sum over a dim of its matrix. Where that dim is sharded, whole
    vectors are sent: columns under FSDP2, and rows of what tensor parallelism shards by columns.
    """
    if math.prod(axes) == 1:
        return []
    size = 1
    for weight in weights:
        if not weight.is_trained:
            continue
        size += 1
        if weight.matrix is not None and weight.matrix.carries:
            partial = shard_from_chunks(weight.shape, weight.matrix, weight.chunks(axes)).partial
            shapes = weight.matrix.value_shapes()
            size += sum(math.prod(shapes[name]) for name in partial & shapes.keys())
    return [Collective(what="packed sums", kind="all-reduce", over="all", num_bytes=FLOAT * size)]

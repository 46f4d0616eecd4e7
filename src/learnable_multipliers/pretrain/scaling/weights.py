"""The parameters of a model as sharded over ranks: shapes, FSDP2 units, tensor-parallel dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._names import named_parameters
from learnable_multipliers._plan import Plan
from learnable_multipliers.optim._sharding import Chunk, box_of
from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.model.hybrid import HybridLM

# The dim that `tensor_parallelize` shards, by module; it leaves the others whole.
_TENSOR_DIMS: dict[str, int] = {
    **dict.fromkeys(("embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
ROOT = ""
"""The FSDP2 unit outside of the layers: embedding, last norm and head."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    matrix: Matrix | None
    """Its entry in the plan; None for a vector."""
    is_trained: bool
    unit: str
    """The FSDP2 unit that it is gathered with."""
    tensor_dim: int | None
    """The dim that tensor parallelism shards."""

    def chunks(self, axes: Axes, shard_rank: int = 0, tensor_rank: int = 0) -> list[Chunk]:
        """Return the chunks that give one rank its shard, in the order they are taken."""
        chunks = []
        if self.tensor_dim is not None and axes.tensor > 1:
            chunks.append(Chunk(self.tensor_dim, axes.tensor, tensor_rank))
        if axes.shard > 1:
            chunks.append(Chunk(0, axes.shard, shard_rank))
        return chunks

    def tensor_shape(self, axes: Axes, tensor_rank: int = 0) -> tuple[int, ...]:
        """Return the shape on one tensor-parallel rank."""
        whole = Axes(tensor=axes.tensor)
        return tuple(map(len, box_of(self.shape, self.chunks(whole, tensor_rank=tensor_rank))))


def weights_of(model: nn.Module, plan: Plan) -> tuple[Weight, ...]:
    """Return the parameters of a model; of one on the meta device too.

    The members of its outermost lists of modules are FSDP2's units, as `parallelize` has them.
    """
    matrices = {entry.name: entry.matrix for entry in plan.entries}
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outermost = [name for name in lists if not any(name.startswith(f"{o}.") for o in lists)]
    units = [f"{name}.{at}." for name in outermost for at in range(len(lists[name]))]
    own = isinstance(model, HybridLM)
    return tuple(
        Weight(
            name=name,
            shape=tuple(parameter.shape),
            matrix=matrices.get(name),
            is_trained=parameter.requires_grad,
            unit=next((unit for unit in units if name.startswith(unit)), ROOT),
            tensor_dim=_TENSOR_DIMS.get(name.rpartition(".")[0].rpartition(".")[2])
            if own
            else None,
        )
        for name, parameter in named_parameters(model)
    )


def num_parameters(weights: Sequence[Weight], axes: Axes) -> int:
    """Return the parameters that one tensor-parallel rank computes with."""
    return sum(math.prod(weight.tensor_shape(axes)) for weight in weights)

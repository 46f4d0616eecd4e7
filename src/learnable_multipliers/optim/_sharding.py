"""How a sharded parameter and its state are laid out on the ranks, and their process group.

Row multipliers are sharded like the output features, column multipliers like the input features. A
sum along a sharded dim is partial; `_packed_sums` completes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from learnable_multipliers._multiplier import MULTIPLIERS, Matrix

Box = tuple[range, ...]
"""The shard of a stored tensor on one rank: a range for each of its dims."""

GATHERS_UNEVEN = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
"""Whether torch gathers a dim in the right order if FSDP2 and tensor parallelism both shard it and
its size does not divide evenly; before 2.10 `full_tensor` and checkpoints mix up its chunks."""


class Chunk(NamedTuple):
    """One chunk of a dim, as `torch.chunk` makes them."""

    dim: int
    num_chunks: int
    position: int


@dataclass(frozen=True)
class LocalShard:
    """The shard of one parameter on this rank; all of it if it is not sharded."""

    box: Box
    stack: slice
    """The same shard in terms of the matrix: experts, output features, input features."""
    out_features: slice
    in_features: slice
    partial: frozenset[str]
    """Which of `row`, `col` and `scalar` get a gradient that is a partial sum on this rank."""
    num_shards: int
    """Different shards of the parameter; if there are more ranks, some hold replicas."""


def is_sharded(parameter: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return a tensor's shard on this rank."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def local_gradient(parameter: Any, grad: Any) -> Tensor:
    """Return a gradient's shard on this rank, with the placements of the parameter.

    Under sequence parallelism the gradient of a norm's weight is a partial sum.
    """
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    shard = grad.to_local()
    # The result of a pending collective has no address yet that a kernel could read.
    return shard.wait() if hasattr(shard, "wait") else shard


def full(tensor: Tensor) -> Tensor:
    """Return a tensor in full, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def local_box(tensor: Any) -> Box:
    """Return the box of a tensor on this rank: all of a tensor that is not sharded."""
    return box_of(tensor.shape, _chunks_of(tensor) if is_sharded(tensor) else [])


def local_shard(parameter: Any, matrix: Matrix | None) -> LocalShard:
    """Return the shard of a parameter on this rank, and which sums over it are partial."""
    chunks = _chunks_of(parameter) if is_sharded(parameter) else []
    shard = shard_from_chunks(parameter.shape, matrix, chunks)
    expected, shape = tuple(map(len, shard.box)), tuple(local(parameter).shape)
    if expected != shape:
        raise NotImplementedError(
            f"a parameter of shape {tuple(parameter.shape)} with the placements "
            f"{parameter.placements} has {shape} on this rank, where {expected} was expected; "
            "FSDP2, HSDP and tensor parallel layouts of torch are supported"
        )
    return shard


def shard_from_chunks(
    shape: Sequence[int], matrix: Matrix | None, chunks: Sequence[Chunk]
) -> LocalShard:
    """Return the shard that is left of a tensor when each of these chunks is taken in turn."""
    box = box_of(shape, chunks)
    num_shards = math.prod(chunk.num_chunks for chunk in chunks)
    parts = [slice(part.start, part.stop) for part in box]
    if matrix is None:
        nothing = slice(0, 0)
        return LocalShard(box, nothing, nothing, nothing, frozenset(), num_shards)
    dims = {chunk.dim for chunk in chunks}
    out_dim, in_dim = _feature_dims(matrix)
    stack = parts[0] if matrix.stack else slice(0, 1)
    summed = {"row": {in_dim}, "col": {out_dim}, "scalar": {in_dim, out_dim}}
    partial = frozenset(name for name, over in summed.items() if dims & over)
    return LocalShard(box, stack, parts[out_dim], parts[in_dim], partial, num_shards)


def local_values(matrix: Matrix, shard: LocalShard, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's shard of full multipliers."""
    along = {"row": shard.out_features, "col": shard.in_features}
    own = {}
    for name, value in values.items():
        value = value[shard.stack] if matrix.stack else value
        own[name] = value[..., along[name]] if name in along else value
    return own


def box_of(shape: Sequence[int], chunks: Sequence[Chunk]) -> Box:
    """Return the box that is left of a shape when each of these chunks is taken in turn.

    As with `torch.chunk`, the last chunks of a dim may be smaller, or empty.
    """
    box = [range(size) for size in shape]
    for dim, num_chunks, position in chunks:
        size = -(-len(box[dim]) // num_chunks)
        box[dim] = box[dim][position * size : (position + 1) * size]
    return tuple(box)


def _chunks_of(parameter: Any) -> list[Chunk]:
    """Return the chunks that give a DTensor's shard on this rank, in the order they are taken."""
    mesh, plain, strided = parameter.device_mesh, [], []
    for axis, place in enumerate(parameter.placements):
        if place.is_partial():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is a sum not yet taken "
                f"({place}); redistribute it first"
            )
        if not _is_shard(place) or mesh.size(axis) == 1:
            continue
        chunk = Chunk(place.dim % parameter.ndim, mesh.size(axis), mesh.get_local_rank(axis))
        # FSDP2 shards what tensor parallelism has sharded already, though its axis of the mesh
        # comes first; torch marks such an axis as strided.
        (strided if hasattr(place, "split_factor") else plain).append(chunk)
    for dim, number, _ in strided:
        parts = number * math.prod(chunk.num_chunks for chunk in plain if chunk.dim == dim)
        if not GATHERS_UNEVEN and parameter.shape[dim] % parts:
            raise ValueError(
                f"torch {torch.__version__} gathers a parameter of shape {tuple(parameter.shape)} "
                f"wrongly whose {parameter.shape[dim]} rows FSDP2 and tensor parallelism cut into "
                f"{parts} parts, and would save it so: use torch 2.10 or newer, or sizes that "
                "divide evenly"
            )
    return [*plain, *reversed(strided)]


def shard_state(values: dict[str, Tensor], parameter: Any, matrix: Matrix | None) -> dict[str, Any]:
    """Return state tensors as DTensors placed like the parameter; unchanged if it is none."""
    if not is_sharded(parameter):
        return dict(values)
    from torch.distributed.tensor import Replicate

    sharded: dict[str, Any] = {}
    for name, value in values.items():
        kind = name.split("_", 1)[0]
        if value.ndim == 0:
            # Counts and averages over a whole parameter are the same number on every rank.
            sharded[name] = value
        elif matrix is not None and kind in MULTIPLIERS:
            keep = _dims_kept(matrix, kind)
            placements = [
                _on_dim(place, keep[place.dim % parameter.ndim])
                if _is_shard(place) and place.dim % parameter.ndim in keep
                else Replicate()
                for place in parameter.placements
            ]
            shape = matrix.value_shapes()[kind]
            sharded[name] = _dtensor(value, parameter.device_mesh, placements, shape)
        else:
            sharded[name] = dtensor_like(value, parameter)
    return sharded


def dtensor_like(value: Tensor, parameter: Any) -> Tensor:
    """Return a local shard as a DTensor placed like the parameter; unchanged if it is none."""
    if not is_sharded(parameter):
        return value
    return _dtensor(value, parameter.device_mesh, parameter.placements, tuple(parameter.shape))


def _dtensor(value: Tensor, mesh: Any, placements: Sequence[Any], shape: tuple[int, ...]) -> Any:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    # A DTensor takes the storage offset of the tensor it is made from, but no storage of its own:
    # one that is made from a view into packed multipliers cannot be copied, pickled or staged.
    own = torch.empty_like(value) if value.storage_offset() else value
    dtensor = DTensor.from_local(
        own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    if own is not value:
        dtensor._local_tensor = value
    return dtensor


def _is_shard(place: Any) -> bool:
    """Return whether a placement shards a dim; in some releases `_StridedShard` is no `Shard`."""
    from torch.distributed.tensor import Shard

    return isinstance(place, Shard) or hasattr(place, "split_factor")


def _on_dim(place: Any, dim: int) -> Any:
    """Return the placement that shards another dim in the same way."""
    if hasattr(place, "split_factor"):
        return type(place)(dim, split_factor=place.split_factor)
    return type(place)(dim)


def _feature_dims(matrix: Matrix) -> tuple[int, int]:
    """Return the stored dims of the output and input features."""
    first = len(matrix.stack)
    return (first + 1, first) if matrix.transposed else (first, first + 1)


def _dims_kept(matrix: Matrix, kind: str) -> dict[int, int]:
    """Map dims of the stored matrix to those of one of its multipliers."""
    out_dim, in_dim = _feature_dims(matrix)
    first = len(matrix.stack)
    kept = {0: 0} if matrix.stack else {}
    if kind == "row":
        kept[out_dim] = first
    elif kind == "col":
        kept[in_dim] = first
    return kept


def process_group_of(
    parameters: Iterable[Any], groups: dict[tuple[int, ...], Any]
) -> dist.ProcessGroup | None:
    """Return the process group of the largest device mesh; None where nothing is distributed.

    It includes the axes of replicas, so that all ranks take the same decisions. `groups` keeps
    those made here: making one is a collective call, and binding again must not make one.
    """
    meshes: dict[tuple[int, ...], Any] = {}
    for parameter in parameters:
        if is_sharded(parameter):
            mesh = parameter.device_mesh
            meshes.setdefault(tuple(sorted(mesh.mesh.flatten().tolist())), mesh)
    if not meshes:
        return None
    ranks = max(meshes, key=len)
    for others in meshes:
        if not set(others) <= set(ranks):
            raise ValueError(
                f"some parameters lie on the ranks {others}, others on {ranks}: one of the "
                "device meshes must hold them all, as that of FSDP2 over tensor parallelism does"
            )
    if len(ranks) == 1:
        return None
    if ranks not in groups:
        groups[ranks] = _group_of(meshes[ranks], ranks)
    return groups[ranks]


def all_agree(
    group: dist.ProcessGroup | None, flags: list[bool], device: torch.device
) -> list[bool]:
    """Return which flags are true on all ranks."""
    if group is None:
        return flags
    held = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MIN, group=group)
    return held.bool().tolist()


def _group_of(mesh: Any, ranks: tuple[int, ...]) -> Any:
    for axis in range(mesh.ndim):
        if mesh.size(axis) == len(ranks):
            return mesh.get_group(axis)
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    # Only these ranks call this; others may belong to another stage of a pipeline.
    return dist.new_group(list(ranks), use_local_synchronization=True)

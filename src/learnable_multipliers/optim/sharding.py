"""How a sharded parameter's multipliers lie on the ranks, and which sums have to travel.

Rows are sharded like the output features, columns like the input features. A sum along a
sharded axis is partial: it travels over that axis of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learnable_multipliers.multiplier import Matrix
from learnable_multipliers.optim.bank import Extent

MeshAxis = tuple[Any, int]
"""A device mesh and one of its axes."""


@dataclass(frozen=True)
class Share:
    """The part of one parameter on this rank."""

    extent: Extent
    sums: dict[str, tuple[MeshAxis, ...]]
    """Mesh axes over which the gradient of `row`, `col`, `scalar` and the squared norm are
    partial."""


_NOWHERE = Extent(slice(0, 0), slice(0, 0), slice(0, 0))
_NO_SUMS: dict[str, tuple[MeshAxis, ...]] = dict.fromkeys(("row", "col", "scalar", "norm"), ())


def is_sharded(parameter: Tensor) -> bool:
    """Tell a DTensor."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return a tensor's part on this rank."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def full(tensor: Tensor) -> Tensor:
    """Return a tensor in full, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def share_of(parameter: Tensor, matrix: Matrix | None) -> Share:
    """Return what of a parameter lies here, and over which mesh axes its sums are partial."""
    if not is_sharded(parameter):
        return Share(Extent.whole(matrix) if matrix else _NOWHERE, _NO_SUMS)
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh: Any = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    placements: Any = parameter.placements  # pyright: ignore[reportAttributeAccessIssue]
    sharded = {axis: place.dim for axis, place in enumerate(placements) if isinstance(place, Shard)}
    norm = tuple((mesh, axis) for axis in sharded)
    if matrix is None:
        return Share(
            Extent(*(slice(0, 0),) * 3), {"row": (), "col": (), "scalar": (), "norm": norm}
        )
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    parts = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]
    out_dim, in_dim = _feature_dims(matrix)
    stack = parts[0] if matrix.stack else slice(0, 1)
    over_in = tuple((mesh, axis) for axis, dim in sharded.items() if dim == in_dim)
    over_out = tuple((mesh, axis) for axis, dim in sharded.items() if dim == out_dim)
    return Share(
        Extent(stack, parts[out_dim], parts[in_dim]),
        {"row": over_in, "col": over_out, "scalar": over_in + over_out, "norm": norm},
    )


def as_sharded(
    values: dict[str, Tensor], parameter: Tensor, matrix: Matrix | None
) -> dict[str, Any]:
    """Return state tensors as DTensors that lie like the parameter; as they are without one."""
    if not is_sharded(parameter):
        return dict(values)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh: Any = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    found: dict[str, Any] = {}
    for name, value in values.items():
        kind = name.split("_", 1)[0]
        if value.ndim == 0:
            # Counts and averages over a whole parameter: the same number on every rank.
            found[name] = value
            continue
        placements, shape = parameter.placements, tuple(parameter.shape)  # pyright: ignore[reportAttributeAccessIssue]
        if matrix is not None and kind in ("row", "col", "scalar"):
            shape = matrix.value_shapes()[kind]
            keep = _dims_kept(matrix, kind)
            placements = [
                Shard(keep[place.dim])
                if isinstance(place, Shard) and place.dim in keep
                else Replicate()
                for place in placements
            ]
        stride = torch.empty(shape, device="meta").stride()
        found[name] = DTensor.from_local(
            value, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    return found


def all_reduce_(parts: Sequence[tuple[Tensor, tuple[MeshAxis, ...]]]) -> None:
    """Sum tensors over the mesh axes each is partial along: one packed all-reduce per axis."""
    axes: list[MeshAxis] = []
    for _, over in parts:
        axes += [axis for axis in over if not any(_same(axis, known) for known in axes)]
    for mesh, axis in axes:
        partial = [t for t, over in parts if any(_same((mesh, axis), one) for one in over)]
        packed = torch.cat([t.reshape(-1) for t in partial])
        dist.all_reduce(packed, group=mesh.get_group(axis))
        for target, total in zip(partial, packed.split([t.numel() for t in partial]), strict=True):
            target.copy_(total.view_as(target))


def _same(one: MeshAxis, other: MeshAxis) -> bool:
    return one[0] == other[0] and one[1] == other[1]


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

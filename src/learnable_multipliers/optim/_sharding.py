"""How a sharded parameter and what belongs to it lie on the ranks.

Rows are sharded like the output features, columns like the input features. A sum along a sharded
axis is partial; `packed_sums` lets it travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers.optim._packed_multipliers import Extent

Box = tuple[range, ...]
"""The part of a stored tensor on one rank, a range for each of its dims."""
Cut = tuple[int, int, int]
"""A dim, the number of parts it is cut into, and which of them is kept."""


@dataclass(frozen=True)
class Share:
    """The part of one parameter on this rank."""

    box: Box
    extent: Extent
    """The same part, in terms of the matrix."""
    partial: frozenset[str]
    """Which of `row`, `col` and `scalar` get a gradient that is one rank's part of a sum."""
    num_parts: int
    """Parts the parameter is cut into; more ranks than these hold copies."""


_NOWHERE = Extent(slice(0, 0), slice(0, 0), slice(0, 0))


def is_sharded(parameter: Tensor) -> bool:
    """Tell a DTensor."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return a tensor's part on this rank."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def local_gradient(parameter: Any, grad: Any) -> Tensor:
    """Return a gradient's part on this rank, lying as the parameter does.

    Under sequence parallelism the gradient of a norm's weight comes as a sum not yet taken.
    """
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    found = grad.to_local()
    # What a collective call still writes has no address yet that a kernel could read.
    return found.wait() if hasattr(found, "wait") else found


def full(tensor: Tensor) -> Tensor:
    """Return a tensor in full, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def box_here(tensor: Any) -> Box:
    """Return the part of a tensor that lies on this rank: all of one that is not sharded."""
    return box_of(tensor.shape, _cuts(tensor) if is_sharded(tensor) else [])


def share_of(parameter: Any, matrix: Matrix | None) -> Share:
    """Return what of a parameter lies here, and which sums over it are partial."""
    cuts = _cuts(parameter) if is_sharded(parameter) else []
    share = share_after(parameter.shape, matrix, cuts)
    expected, found = tuple(map(len, share.box)), tuple(local(parameter).shape)
    if expected != found:
        raise NotImplementedError(
            f"a parameter of shape {tuple(parameter.shape)} with the placements "
            f"{parameter.placements} has {found} on this rank, where {expected} was expected; "
            "FSDP2, HSDP and tensor parallel layouts of torch are supported"
        )
    return share


def share_after(shape: Sequence[int], matrix: Matrix | None, cuts: Sequence[Cut]) -> Share:
    """Return the share that cuts leave of a tensor."""
    box = box_of(shape, cuts)
    num_parts = math.prod(number for _, number, _ in cuts)
    if matrix is None:
        return Share(box, _NOWHERE, frozenset(), num_parts)
    dims = {dim for dim, _, _ in cuts}
    out_dim, in_dim = _feature_dims(matrix)
    parts = [slice(part.start, part.stop) for part in box]
    stack = parts[0] if matrix.stack else slice(0, 1)
    over = {"row": {in_dim}, "col": {out_dim}, "scalar": {in_dim, out_dim}}
    partial = frozenset(name for name, summed in over.items() if dims & summed)
    return Share(box, Extent(stack, parts[out_dim], parts[in_dim]), partial, num_parts)


def box_of(shape: Sequence[int], cuts: Sequence[Cut]) -> Box:
    """Return what cuts leave of a shape, made one after the other.

    Parts are as torch.chunk makes them: the last ones may be smaller, or empty.
    """
    box = [range(size) for size in shape]
    for dim, number, which in cuts:
        size = -(-len(box[dim]) // number)
        box[dim] = box[dim][which * size : (which + 1) * size]
    return tuple(box)


def _cuts(parameter: Any) -> list[Cut]:
    """Return the cuts that made a DTensor's part on this rank, in the order they were made."""
    mesh, plain, strided = parameter.device_mesh, [], []
    for axis, place in enumerate(parameter.placements):
        if place.is_partial():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is a sum not yet taken "
                f"({place}); redistribute it first"
            )
        if not _cuts_up(place) or mesh.size(axis) == 1:
            continue
        cut = (place.dim % parameter.ndim, mesh.size(axis), mesh.get_local_rank(axis))
        # FSDP2 cuts what tensor parallelism has cut already, though its axis of the mesh comes
        # first; torch marks such an axis as strided.
        (strided if hasattr(place, "split_factor") else plain).append(cut)
    return [*plain, *reversed(strided)]


def as_sharded(values: dict[str, Tensor], parameter: Any, matrix: Matrix | None) -> dict[str, Any]:
    """Return state tensors as DTensors that lie like the parameter; as they are without one."""
    if not is_sharded(parameter):
        return dict(values)
    from torch.distributed.tensor import Replicate

    found: dict[str, Any] = {}
    for name, value in values.items():
        kind = name.split("_", 1)[0]
        if value.ndim == 0:
            # Counts and averages over a whole parameter: the same number on every rank.
            found[name] = value
        elif matrix is not None and kind in ("row", "col", "scalar"):
            keep = _dims_kept(matrix, kind)
            placements = [
                _moved_to(place, keep[place.dim % parameter.ndim])
                if _cuts_up(place) and place.dim % parameter.ndim in keep
                else Replicate()
                for place in parameter.placements
            ]
            shape = matrix.value_shapes()[kind]
            found[name] = _dtensor(value, parameter.device_mesh, placements, shape)
        else:
            found[name] = lying_like(value, parameter)
    return found


def lying_like(value: Tensor, parameter: Any) -> Tensor:
    """Return this rank's part of a tensor as a DTensor that lies like the parameter."""
    if not is_sharded(parameter):
        return value
    return _dtensor(value, parameter.device_mesh, parameter.placements, tuple(parameter.shape))


def _dtensor(value: Tensor, mesh: Any, placements: Sequence[Any], shape: tuple[int, ...]) -> Any:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _cuts_up(place: Any) -> bool:
    """Tell a placement that cuts a dim; the strided one is no Shard in every torch release."""
    from torch.distributed.tensor import Shard

    return isinstance(place, Shard) or hasattr(place, "split_factor")


def _moved_to(place: Any, dim: int) -> Any:
    """Return the placement that cuts another dim in the same way."""
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

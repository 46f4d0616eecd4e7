"""Tensors in safetensors files: whole, or in pieces by rank.

A rank writes its pieces to `model-00003.safetensors`, with the position of each piece in the file's
metadata; a single process writes `model.safetensors`. Readers assemble what they need, so a run can
resume on any number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from learnable_multipliers._serialization import MAX_BYTES, parse_object
from learnable_multipliers.optim._sharding import Box, dtensor_like, is_sharded, local, local_box
from learnable_multipliers.pretrain.distributed import AXES, World

SUFFIX = ".safetensors"
_PIECES = "pieces"
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32")
"""Of weights and optimizer states."""
# How safetensors reports an error of the system.
_SYSTEM_ERROR = re.compile(r"\(os error ([0-9]+)\)")
_MALFORMED = SafetensorError, RuntimeError, TypeError, AttributeError, OverflowError, ValueError
_OF_A_RANK = re.compile(r"(.+)-([0-9]{5})")

Tensors = dict[str, dict[str, Tensor]]
"""By file (without suffix) and name."""


@dataclass(frozen=True)
class _Piece:
    """A tensor in a file, as a part of a whole."""

    file: Any
    shape: tuple[int, ...]
    """Of the whole."""
    box: Box
    dtype: str


def save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the default permissions of new files.

    safetensors itself creates a file that only its owner can read.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        number = _SYSTEM_ERROR.search(str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    path.chmod(mode)


def write(folder: Path, group: str, tensors: Mapping[str, Tensor], world: World) -> Path:
    """Write this rank's pieces to a file; of replicated pieces one rank writes a copy."""
    # By name: the same tensors give the same bytes.
    mine = {name: tensors[name] for name in sorted(tensors) if _writes(world, tensors[name])}
    parts = {name: local(tensor).contiguous() for name, tensor in mine.items()}
    if world.size == 1:
        path, metadata = folder / f"{group}{SUFFIX}", None
    else:
        boxes = {
            name: {"shape": list(tensor.shape), "start": [r.start for r in local_box(tensor)]}
            for name, tensor in mine.items()
        }
        path = folder / f"{group}-{world.rank:05d}{SUFFIX}"
        metadata = {_PIECES: json.dumps(boxes)}
    save(parts, path, metadata)
    return path


def read(folder: Path, like: Tensors | None = None) -> Tensors:
    """Return copies of all tensors of a folder.

    Args:
        like: This rank's tensors: those of the same name and shape are returned sharded like them,
            reading only this rank's part. All others are returned whole.
    """
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        match = _OF_A_RANK.fullmatch(path.stem)
        groups.setdefault(match[1] if match else path.stem, []).append(path)
    return {
        group: _read_group(files, (like or {}).get(group, {})) for group, files in groups.items()
    }


def _writes(world: World, tensor: Tensor) -> bool:
    """Return whether a rank writes its part: of replicas along an axis, the first one does."""
    if world.mesh is None:
        return True
    cut: set[str] = set()
    if is_sharded(tensor):
        mesh: Any = tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        placements: Any = tensor.placements  # pyright: ignore[reportAttributeAccessIssue]
        names = mesh.mesh_dim_names
        cut = {name for name, p in zip(names, placements, strict=True) if not p.is_replicate()}
    return (
        all(name in cut or world.axis_rank(name) == 0 for name in AXES)
        and local(tensor).numel() > 0
    )


def _read_group(files: Iterable[Path], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pieces: dict[str, list[_Piece]] = {}
    with ExitStack() as stack:
        for path in files:
            with _errors_naming(path):
                _check_header(path)
                opened = stack.enter_context(safe_open(path, framework="pt"))
                for name, piece in _pieces(opened):
                    pieces.setdefault(name, []).append(piece)
        tensors = {}
        for name, parts in pieces.items():
            with _errors_naming(*files):
                tensors[name] = _assembled(name, parts, like.get(name))
    return tensors


def _check_header(path: Path) -> None:
    """Raise a ValueError for what safetensors accepts: a name twice, types we never write."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size, MAX_BYTES):
            raise ValueError(f"its header cannot have {length:,} bytes")
        header = parse_object(file.read(length), "its header")
    for name, entry in header.items():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if name != "__metadata__" and dtype not in _DTYPES:
            raise ValueError(f"{name} is of type {dtype}, not one of {', '.join(_DTYPES)}")


def _pieces(opened: Any) -> Iterator[tuple[str, _Piece]]:
    """Yield the pieces of a file, with their positions in their tensors."""
    metadata = (opened.metadata() or {}).get(_PIECES)
    boxes = {} if metadata is None else parse_object(metadata.encode(), _PIECES)
    for name in opened.keys():  # noqa: SIM118
        part = opened.get_slice(name)
        shape = tuple(part.get_shape())
        whole, start = shape, (0,) * len(shape)
        if metadata is not None:
            entry: Any = boxes.get(name)
            try:
                whole, start = tuple(entry["shape"]), tuple(entry["start"])
            except (TypeError, KeyError) as error:
                raise ValueError(f"it does not give the position of {name}") from error
        box = tuple(range(s, s + size) for s, size in zip(start, shape, strict=True))
        inside = all(r.start >= 0 and r.stop <= size for r, size in zip(box, whole, strict=True))
        if not inside:
            raise ValueError(f"{name} lies outside of its tensor")
        yield name, _Piece(opened, whole, box, part.get_dtype())


def _assembled(name: str, parts: list[_Piece], like: Tensor | None) -> Tensor:
    """Return a tensor, or a rank's part of it, from its pieces."""
    shape = parts[0].shape
    covered = sum(_volume(part.box) for part in parts)
    alike = all((part.shape, part.dtype) == (shape, parts[0].dtype) for part in parts)
    if not alike or covered != math.prod(shape) or not _disjoint([part.box for part in parts]):
        raise ValueError(f"the pieces of {name} do not form the whole tensor")
    if like is None or not is_sharded(like) or tuple(like.shape) != shape:
        like = None
        if len(parts) == 1:
            return parts[0].file.get_tensor(name).clone()
    box = tuple(range(size) for size in shape) if like is None else local_box(like)
    read = [
        (_inside(box, both), part.file.get_slice(name)[_inside(part.box, both)])
        for part in parts
        if _volume(both := _overlap(box, part.box))
    ]
    # A rank may have no part of a small tensor.
    dtype = read[0][1].dtype if read else local(like).dtype if like is not None else None
    taken = torch.empty([len(r) for r in box], dtype=dtype)
    for where, values in read:
        taken[where] = values
    return taken if like is None else dtensor_like(taken.to(local(like).device), like)


def _disjoint(boxes: list[Box]) -> bool:
    boxes = sorted(boxes, key=lambda box: [r.start for r in box])
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if other[0].start >= box[0].stop:
                break
            if _volume(_overlap(box, other)):
                return False
    return True


def _overlap(box: Box, other: Box) -> Box:
    pairs = zip(box, other, strict=True)
    return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)


def _inside(box: Box, part: Box) -> tuple[slice, ...]:
    """Return the position of a part in a box, relative to its corner."""
    pairs = zip(box, part, strict=True)
    return tuple(slice(p.start - b.start, p.stop - b.start) for b, p in pairs)


def _volume(box: Box) -> int:
    return math.prod(len(r) for r in box)


@contextmanager
def _errors_naming(*paths: Path) -> Iterator[None]:
    """Add the names of the files to errors.

    safetensors checks offsets and sizes on opening, shapes and types on reading a tensor.
    """
    try:
        yield
    except _MALFORMED as error:
        names = ", ".join(path.name for path in paths)
        raise ValueError(f"{names} cannot be read: {error}") from error

"""The ranks that hold one optimizer's parameters together, and how they speak to each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learnable_multipliers.optim._sharding import is_sharded


@dataclass(frozen=True)
class Team:
    """Ranks that take a step together: parts and copies of every parameter lie among them."""

    group: Any
    """Their process group; a rank's number here is its place in the group."""
    size: int
    rank: int


def team_of(parameters: Iterable[Tensor], known: dict[tuple[int, ...], Any]) -> Team | None:
    """Return the ranks of the largest device mesh; None where nothing is spread out.

    Axes with copies are part of it, so that all ranks take the same decisions. `known` keeps
    process groups made here: making one is a collective call, and binding anew must not be.
    """
    meshes: dict[tuple[int, ...], Any] = {}
    for parameter in parameters:
        if is_sharded(parameter):
            mesh: Any = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
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
    if ranks not in known:
        known[ranks] = _group_of(meshes[ranks], ranks)
    return team_in(known[ranks])


def team_in(group: Any) -> Team | None:
    """Return the team of a process group; None for a single rank."""
    size = dist.get_world_size(group)
    return Team(group, size, dist.get_rank(group)) if size > 1 else None


def all_agree(team: Team | None, flags: list[bool], device: torch.device) -> list[bool]:
    """Return which flags are true on all ranks."""
    if team is None:
        return flags
    held = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MIN, group=team.group)
    return held.bool().tolist()


def _group_of(mesh: Any, ranks: tuple[int, ...]) -> Any:
    for axis in range(mesh.ndim):
        if mesh.size(axis) == len(ranks):
            return mesh.get_group(axis)
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    # Only these ranks come here; others may belong to another stage of a pipeline.
    return dist.new_group(list(ranks), use_local_synchronization=True)

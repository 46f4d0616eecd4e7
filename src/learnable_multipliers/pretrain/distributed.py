"""The processes that train one model together, and how they communicate.

torchrun starts them. Ranks lie on a mesh of three axes: `data` (copies of the model), `shard`
(FSDP2) and `tensor` (tensor parallelism). Ranks that differ in `tensor` alone read the same text,
all others different parts of each batch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

Result = TypeVar("Result")
AXES = ("data", "shard", "tensor")


class Axes(NamedTuple):
    """The number of ranks along each axis."""

    data: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def dp_degree(self) -> int:
        """Data-parallel degree: the number of parts that a batch is divided into."""
        return self.data * self.shard


class RankLostError(OSError):
    """A rank did not answer in time."""


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them; a run in one process is a world of one."""

    rank: int = 0
    size: int = 1
    axes: Axes = Axes()
    mesh: Any = None
    """A device mesh with the three axes; None in a world of one."""
    control: Any = None
    """A group of all ranks on the CPU, for plain data."""
    timeout: float = 0.0
    """Seconds a rank waits for the others."""
    groups: list[Any] = field(default_factory=list)
    """The process groups that `leave` destroys."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files of the run."""
        return self.rank == 0

    def axis_rank(self, name: str) -> int:
        """Return the rank of this process along an axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(name)

    def share(self, sequences: int) -> range:
        """Return this rank's part of a batch, as positions in it."""
        part = sequences // self.axes.dp_degree
        dp_rank = self.axis_rank("data") * self.axes.shard + self.axis_rank("shard")
        return range(dp_rank * part, (dp_rank + 1) * part)

    def all_reduce_dp(self, value: Tensor) -> Tensor:
        """Return the sum of a number over the parts of a batch, the same on all ranks.

        Ranks that read the same part have the same number, unless one of them is wrong.
        """
        if self.mesh is None:
            return value
        total = value.detach() / self.axes.tensor
        dist.all_reduce(total)
        return total

    def all_reduce_max(self, number: int) -> int:
        """Return the largest number of all ranks."""
        found = torch.tensor(number)
        if self.size > 1:
            with self.collective():
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.control)
        return int(found)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the plain data of every rank, in the order of ranks."""
        found = [value] * self.size
        if self.size > 1:
            with self.collective():
                dist.all_gather_object(found, value, group=self.control)
        return found

    def broadcast(self, value: Any) -> Any:
        """Return the plain data of the first rank."""
        return self.all_gather(value)[0]

    def run_on_all(self, work: Callable[[], Result]) -> Result:
        """Call a function on every rank; an error on one is an error on all."""
        result, error = None, None
        try:
            result = work()
        except Exception as own:
            error = own
        try:
            failed = self.all_reduce_max(0 if error is None else self.rank + 1)
        except RankLostError as lost:
            raise (error or lost) from lost
        if error is not None:
            raise error
        if failed:
            raise OSError(f"it failed on rank {failed - 1}, whose message says why")
        return result  # pyright: ignore[reportReturnType]

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Explain the error of a collective that timed out or lost a rank."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_connection_error(error):
                raise
            raise RankLostError(
                f"rank {self.rank} of {self.size} lost a rank or waited too long "
                f"({self.timeout:g} s at most): one of them has died or hangs, and its own "
                "messages say why. Start all of them again with --resume; ranks that are slow "
                "rather than dead need a larger --parallel.timeout. "
                f"({str(error).splitlines()[0]})"
            ) from error

    def leave(self) -> None:
        """Destroy every process group that was made for this run: on all ranks, or it waits.

        Not after an error on one of them: it would wait before it has said what is wrong.
        """
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        if self.groups:
            # Cached specs hold this mesh, and a later one of the same ranks is equal to it.
            _clear_sharding_prop_cache()
        while self.groups:
            dist.destroy_process_group(self.groups.pop())


ALONE = World()


def _is_connection_error(error: RuntimeError) -> bool:
    # gloo has no class of its own for its errors.
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def num_processes() -> int:
    """Return the number of processes that were started together."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def planned_axes(data: int, shard: int, tensor: int) -> Axes:
    """Return the axes that a config asks for; 0 copies are what is left of the processes."""
    return Axes(data or max(1, num_processes() // (shard * tensor)), shard, tensor)


def join(*, data: int, shard: int, tensor: int, timeout: float, device_type: str) -> World:
    """Join the processes that torchrun started, if any; raise if the axes do not fit them."""
    started, size = dist.is_initialized(), num_processes()
    axes = planned_axes(data, shard, tensor)
    needed = math.prod(axes)
    if needed != size:
        raise ValueError(
            f"parallel.data x shard x tensor is {axes.data} x {shard} x {tensor}, but there "
            f"{'is 1 process' if size == 1 else f'are {size} processes'}: start as many with "
            f"torchrun --nproc-per-node {needed} --no-python lrm train ..., or set them "
            "otherwise (parallel.data=0 takes what is left)"
        )
    if size == 1 and not started:
        return World()
    limit = timedelta(seconds=timeout)
    try:
        if not started:
            dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=limit)
        mesh = init_device_mesh(device_type, tuple(axes), mesh_dim_names=AXES)
        for name in AXES:
            # A mesh makes its groups with a timeout of its own.
            _set_pg_timeout(limit, mesh.get_group(name))
        control = dist.new_group(backend="gloo", timeout=limit)
    except RuntimeError as error:
        if not _is_connection_error(error):
            raise
        raise RankLostError(
            f"rank {os.environ.get('RANK', 0)} of {size} could not connect to the others within "
            f"{timeout:g} s: one of them has died, hangs or was not started, and its own messages "
            f"say why. Start all of them again. ({str(error).splitlines()[0]})"
        ) from error
    # Destroying the default group destroys all others. A mesh may use it for one of its axes.
    made = [group for group in (*mesh.get_all_groups(), control) if group != dist.group.WORLD]
    made = made if started else [dist.group.WORLD]
    return World(dist.get_rank(), size, axes, mesh, control, timeout, made)

"""The processes that train one model together, and how they communicate.

torchrun starts them. Ranks lie on a mesh of three axes: `data` (copies of the model), `shard`
(FSDP2) and `tensor` (tensor parallelism). Ranks that differ in `tensor` alone read the same text,
all others different parts of each batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
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

    data: int
    shard: int
    tensor: int

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.data * self.shard * self.tensor

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
    mesh: Any = None
    """A device mesh with the three axes; None in a world of one."""
    control: Any = None
    """A group of all ranks on the CPU, for what Python has to agree on."""
    timeout: float = 0.0
    """Seconds a rank waits for the others."""
    groups: list[Any] = field(default_factory=list)
    """The process groups that `leave` destroys."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes down what all have done."""
        return self.rank == 0

    def axis(self, name: str) -> int:
        """Return the number of ranks along an axis."""
        return 1 if self.mesh is None else self.mesh[name].size()

    def place(self, name: str) -> int:
        """Return where along an axis this rank is."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(name)

    @property
    def dp_degree(self) -> int:
        """Data-parallel degree: the number of parts that a batch is divided into."""
        return self.axis("data") * self.axis("shard")

    @property
    def dp_rank(self) -> int:
        """Which part of a batch this rank reads."""
        return self.place("data") * self.axis("shard") + self.place("shard")

    def share(self, sequences: int) -> range:
        """Return this rank's part of a batch, as positions in it."""
        part = sequences // self.dp_degree
        return range(self.dp_rank * part, (self.dp_rank + 1) * part)

    def sum_over_dp(self, value: Tensor) -> Tensor:
        """Return the sum of a number over the parts of a batch, the same on all ranks.

        Ranks that read the same part have the same number, unless one of them is wrong.
        """
        if self.mesh is None:
            return value
        total = value.detach() / self.axis("tensor")
        dist.all_reduce(total)
        return total

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks; the same on all of them."""
        if self.size == 1:
            return list(numbers)
        found = torch.tensor(list(numbers), dtype=torch.int64)
        with self.waiting():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.control)
        return found.tolist()

    def tell(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the first rank, on all of them."""
        if self.size == 1:
            return list(numbers)
        found = torch.tensor(list(numbers), dtype=torch.int64)
        with self.waiting():
            dist.broadcast(found, src=0, group=self.control)
        return found.tolist()

    def gather(self, content: bytes) -> list[bytes]:
        """Return what each rank has to say, as many bytes each, in the order of ranks."""
        if self.size == 1:
            return [content]
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.waiting():
            dist.all_gather(found, mine, group=self.control)
        return [bytes(each.tolist()) for each in found]

    def together(self, work: Callable[[], Result]) -> Result:
        """Do something on every rank; what fails on one has failed on all."""
        result, error = None, None
        try:
            result = work()
        except Exception as own:
            error = own
        try:
            (failed,) = self.agree([0 if error is None else self.rank + 1])
        except RankLostError as lost:
            raise (error or lost) from lost
        if error is not None:
            raise error
        if failed:
            raise OSError(f"it failed on rank {failed - 1}, whose message says why")
        return result  # pyright: ignore[reportReturnType]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say what it means if ranks have waited for each other in vain."""
        try:
            yield
        except RuntimeError as error:
            # gloo has no class of its own for its errors.
            if self.size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise RankLostError(
                f"rank {self.rank} of {self.size} waited for the others in vain "
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


def own_rank() -> int:
    """Return the rank that torchrun gave to this process; 0 for one by itself."""
    return int(os.environ.get("RANK", "0"))


def take_own_device() -> None:
    """Let each process of a node have a GPU of its own, before anything is put on one.

    Where a launcher lets each process see one GPU alone, it is that one.
    """
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def num_processes() -> int:
    """Return the number of processes that were started together."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def planned_axes(data: int, shard: int, tensor: int) -> Axes:
    """Return the axes that a config asks for; 0 copies are what is left of the processes."""
    return Axes(data or max(1, num_processes() // (shard * tensor)), shard, tensor)


def join(*, data: int, shard: int, tensor: int, timeout: float, device_type: str) -> World:
    """Join the world that torchrun made, or be one; axes that do not fit it are refused."""
    started, size = dist.is_initialized(), num_processes()
    axes = planned_axes(data, shard, tensor)
    if axes.size != size:
        raise ValueError(
            f"parallel.data x shard x tensor is {axes.data} x {shard} x {tensor}, but there "
            f"{'is 1 process' if size == 1 else f'are {size} processes'}: start as many with "
            f"torchrun --nproc-per-node {axes.size} --no-python lrm train ..., or set them "
            "otherwise (parallel.data=0 takes what is left)"
        )
    if size == 1 and not started:
        return World()
    limit = timedelta(seconds=timeout)
    if not started:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=limit)
    mesh = init_device_mesh(device_type, tuple(axes), mesh_dim_names=AXES)
    for name in AXES:
        # A mesh makes its groups with a timeout of its own.
        _set_pg_timeout(limit, mesh.get_group(name))
    control = dist.new_group(backend="gloo", timeout=limit)
    # Destroying the default group destroys all others. A mesh may use it for one of its axes.
    made = [group for group in (*mesh.get_all_groups(), control) if group != dist.group.WORLD]
    made = made if started else [dist.group.WORLD]
    return World(dist.get_rank(), size, mesh, control, timeout, made)

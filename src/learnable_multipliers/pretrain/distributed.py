"""The ranks that train one model together, and how they communicate.

torchrun starts them. Ranks form a mesh of three axes: `data` (copies of the model), `shard`
(FSDP2) and `tensor` (tensor parallelism). Ranks that differ only in `tensor` read the same text,
all others read different parts of each batch.
"""

from __future__ import annotations

import math
import os
import sys
import threading
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
    """All ranks of a run, seen from one of them; a single process is a world of size 1."""

    rank: int = 0
    size: int = 1
    axes: Axes = Axes()
    mesh: Any = None
    """A device mesh with the three axes; None for a single process."""
    control: Any = None
    """A CPU process group of all ranks, for plain data."""
    timeout: float = 0.0
    """Seconds a rank waits for the others."""
    groups: list[Any] = field(default_factory=list)
    """The process groups made for this run."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files of the run."""
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """Whether this rank reads files for its node; nodes may have different files."""
        return self.size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"

    def axis_rank(self, name: str) -> int:
        """Return the rank of this process along an axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(name)

    def share(self, sequences: int) -> range:
        """Return this rank's positions in a batch."""
        part = sequences // self.axes.dp_degree
        dp_rank = self.axis_rank("data") * self.axes.shard + self.axis_rank("shard")
        return range(dp_rank * part, (dp_rank + 1) * part)

    def all_reduce_dp(self, value: Tensor) -> Tensor:
        """Return the sum of a number over the parts of a batch, the same on all ranks.

        Ranks that read the same part hold the same number.
        """
        if self.mesh is None:
            return value
        total = value.detach() / self.axes.tensor
        dist.all_reduce(total)
        return total

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum over all ranks."""
        largest = torch.tensor(number)
        if self.size > 1:
            with self.collective():
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control)
        return int(largest)

    def all_gather(self, value: Any) -> list[Any]:
        """Return plain data of every rank, ordered by rank."""
        gathered = [value] * self.size
        if self.size > 1:
            with self.collective():
                dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def broadcast(self, value: Any) -> Any:
        """Return the plain data of the first rank."""
        return self.all_gather(value)[0]

    def run_on_all(self, work: Callable[[], Result]) -> Result:
        """Call a function on every rank; if it raises on one rank, raise on all."""
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
        """Turn errors of a collective that timed out or lost a rank into a RankLostError."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_connection_error(error):
                raise
            raise RankLostError(
                f"rank {self.rank} of {self.size} lost a rank or waited too long "
                f"({self.timeout:g} s at most): one of them has died or hangs, and its own "
                "messages say why. Start all of them again; ranks that are slow rather than dead "
                "need a larger --parallel.timeout. "
                f"({str(error).splitlines()[0]})"
            ) from error

    def destroy(self) -> None:
        """Destroy the process groups made for this run; collective.

        Do not call it after an error on one rank: that rank would wait before it reports the error.
        """
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        if self.groups:
            # Cached specs hold this mesh, and a later mesh of the same ranks compares equal.
            _clear_sharding_prop_cache()
        while self.groups:
            dist.destroy_process_group(self.groups.pop())


SINGLE_PROCESS = World()


def _is_connection_error(error: RuntimeError) -> bool:
    # gloo has no class of its own for its errors.
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def num_processes() -> int:
    """Return the number of processes that were started together."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def resolve_axes(data: int, shard: int, tensor: int) -> Axes:
    """Return the axes of a config; data=0 becomes world size / (shard x tensor)."""
    return Axes(data or max(1, num_processes() // (shard * tensor)), shard, tensor)


def init_world(*, data: int, shard: int, tensor: int, timeout: float, device_type: str) -> World:
    """Initialize the world of torchrun's processes; raise if the axes do not match their number."""
    started, size = dist.is_initialized(), num_processes()
    axes = resolve_axes(data, shard, tensor)
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
    lost = (
        f"rank {os.environ.get('RANK', 0)} of {size} could not connect to the others within "
        f"{timeout:g} s: one of them has died, hangs or was not started, and its own messages "
        "say why. Start all of them again."
    )
    try:
        with _deadline(3 * timeout, lost):
            mesh, control = _connect(axes, limit, device_type, started)
    except RuntimeError as error:
        if not _is_connection_error(error):
            raise
        raise RankLostError(f"{lost} ({str(error).splitlines()[0]})") from error
    # Destroying the default group destroys all others. A mesh may use it for one of its axes.
    made = [group for group in (*mesh.get_all_groups(), control) if group != dist.group.WORLD]
    made = made if started else [dist.group.WORLD]
    return World(dist.get_rank(), size, axes, mesh, control, timeout, made)


def _connect(axes: Axes, limit: timedelta, device_type: str, started: bool) -> tuple[Any, Any]:
    """Return the mesh, and the group of all ranks for plain data."""
    if not started:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=limit)
    mesh = init_device_mesh(
        device_type,
        tuple(axes),
        mesh_dim_names=AXES,
        backend_override=_options(axes, limit) if device_type == "cpu" else None,
    )
    for name in AXES:
        # A mesh makes its groups with a timeout of its own.
        _set_pg_timeout(limit, mesh.get_group(name))
    return mesh, dist.new_group(backend="gloo", timeout=limit)


@contextmanager
def _deadline(seconds: float, text: str) -> Iterator[None]:
    """End the process if the work inside takes longer.

    A gloo group that loses a rank while it connects may wait beyond its timeout, and cannot be
    interrupted. Nothing has been written by then.
    """

    def end() -> None:
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _options(axes: Axes, limit: timedelta) -> dict[Any, Any]:
    """Return gloo options for the groups of a mesh: connect at once, within the timeout."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = limit
    # An axis of all ranks shares the default group.
    return {name: options for name, n in zip(AXES, axes, strict=True) if n < math.prod(axes)}

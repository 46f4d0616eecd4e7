"""Seconds of collectives on a cluster of nodes: bytes over bandwidth, plus a latency per message.

GPUs of a node are joined by NVLink; each has its own link to the network. Ranks are numbered node
by node, with the axes of the mesh in the order data, shard, tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.scaling.exchange import Exchange
from learnable_multipliers.pretrain.scaling.traffic import Collective, Over
from learnable_multipliers.pretrain.trainer.device import PEAK_TFLOPS


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Speed of GPUs and links; all numbers are assumed, not measured."""

    gpus_per_node: int = 8
    """GPUs of a node."""
    node_bandwidth: float = 450e9
    """Bytes per second and direction between a GPU and the others of its node (NVLink 4)."""
    network_bandwidth: float = 50e9
    """Bytes per second and direction between a GPU and other nodes (400 Gb/s)."""
    node_latency: float = 1e-6
    """Seconds of a message inside a node."""
    network_latency: float = 5e-6
    """Seconds of a message between nodes."""
    flops: float = PEAK_TFLOPS["H200"] * 1e12
    """Operations per second of large bfloat16 products on one GPU."""
    mfu: float = 0.4
    """Fraction of them that forward and backward reach, at 6 operations per parameter and token."""
    newton_schulz_mfu: float = 0.6
    """Fraction of them that Newton-Schulz reaches."""


class Span(NamedTuple):
    """Distribution of the ranks of a process group over nodes."""

    per_node: int
    nodes: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.per_node * self.nodes


def span(axes: Axes, over: Over, cluster: Cluster) -> Span:
    """Return the distribution of the ranks along an axis over nodes."""
    strides = {"data": axes.shard * axes.tensor, "shard": axes.tensor}
    size = math.prod(axes) if over == "all" else getattr(axes, over)
    per_node = min(size, max(1, cluster.gpus_per_node // strides.get(over, 1)))
    return Span(per_node, math.ceil(size / per_node))


def bytes_sent(collective: Collective, size: int) -> float:
    """Return the bytes each of `size` ranks sends: (n - 1) / n of the tensor, twice for a
    reduction."""
    return _num_passes(collective) * (size - 1) / size * collective.num_bytes


def num_messages(collective: Collective, over: Span) -> tuple[int, int]:
    """Return the messages one after another, inside nodes and between them.

    A ring for all-gather and reduce-scatter; for all-reduce a chain in each node and a tree of
    nodes, up and down.
    """
    if collective.kind == "all-reduce":
        return 2 * (over.per_node - 1), 2 * math.ceil(math.log2(over.nodes))
    return over.per_node - 1, over.nodes - 1


def seconds(collective: Collective, over: Span, cluster: Cluster) -> float:
    """Return the time of a collective: of the slower of the two kinds of links, and latency.

    A ring enters and leaves a node over the links of all the node's GPUs in the group.
    """
    whole = _num_passes(collective) * collective.num_bytes
    inside = (over.size - 1) / over.size * whole / cluster.node_bandwidth
    network = over.per_node * cluster.network_bandwidth
    between = (over.nodes - 1) / over.nodes * whole / network
    near, far = num_messages(collective, over)
    inside = inside if over.per_node > 1 else 0.0
    return max(inside, between) + near * cluster.node_latency + far * cluster.network_latency


def _num_passes(collective: Collective) -> int:
    return 2 if collective.kind == "all-reduce" else 1


class Load(NamedTuple):
    """Numbers that one rank sends, or receives, in an all-to-all."""

    inside: int = 0
    """Numbers for ranks of its node."""
    between: int = 0
    """Numbers for other nodes."""
    messages: int = 0

    def plus(self, number: int, *, same_node: bool) -> Load:
        """Return the load with one more message."""
        near, far = (number, 0) if same_node else (0, number)
        return Load(self.inside + near, self.between + far, self.messages + 1)


def loads(exchange: Exchange, cluster: Cluster) -> list[Load]:
    """Return the loads of all ranks, sending and receiving; numbers that stay on a rank are
    excluded."""
    rank_loads: dict[tuple[str, int], Load] = {}
    for (sender, receiver), number in exchange.numbers.items():
        if sender == receiver:
            continue
        same = sender // cluster.gpus_per_node == receiver // cluster.gpus_per_node
        for key in (("sends", sender), ("receives", receiver)):
            rank_loads[key] = rank_loads.get(key, Load()).plus(number, same_node=same)
    return list(rank_loads.values())


def exchange_seconds(exchange: Exchange, width: int, cluster: Cluster) -> float:
    """Return the time of an all-to-all: that of its busiest rank.

    Messages start together, so the network's latency counts once and each message costs as much
    as one inside a node.
    """

    def busy(load: Load) -> float:
        inside = width * load.inside / cluster.node_bandwidth
        between = width * load.between / cluster.network_bandwidth
        start = cluster.network_latency if load.between else 0.0
        return max(inside, between) + load.messages * cluster.node_latency + start

    return max(map(busy, loads(exchange, cluster)), default=0.0)

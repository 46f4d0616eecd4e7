"""The command `lrm scaling`: what a train step would cost on a cluster, from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from learnable_multipliers import _planner
from learnable_multipliers._formats import aligned, count
from learnable_multipliers._placement import Placement
from learnable_multipliers.cli.arguments import command
from learnable_multipliers.cli.models import named_model
from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.optimizer_config import OptimizerKind
from learnable_multipliers.pretrain.scaling.cluster import Cluster
from learnable_multipliers.pretrain.scaling.forecast import Batch, Forecast, forecast
from learnable_multipliers.pretrain.scaling.weights import weights_of

_GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """Model, layout and cluster."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A preset (tiny, 20m, falcon-h1-0.5b, ...) or a local Hugging Face folder."""
    ranks: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    """Numbers of GPUs, one line each; a single one shows every kind of message."""
    shard: int = 0
    """Ranks that shard a replica, like parallel.shard of lrm train; 0 is all of them."""
    tensor: int = 1
    """Tensor-parallel ranks, like parallel.tensor; presets only."""
    optimizer: OptimizerKind = "muon"
    """Optimizer of the step."""
    placement: Placement = "full"
    """Placement of the multipliers; none is without them."""
    batch_tokens: int = Batch.tokens
    """Tokens of the whole batch of a step."""
    micro_tokens: int = Batch.micro_tokens
    """Maximum tokens of a micro-batch on one data-parallel rank."""
    gpus_per_node: int = Cluster.gpus_per_node
    """GPUs connected by NVLink."""
    nvlink: float = Cluster.node_bandwidth / _GIGA
    """Gigabytes per second and direction between a GPU and its node."""
    network: float = 8 * Cluster.network_bandwidth / _GIGA
    """Gigabits per second and direction between a GPU and other nodes."""
    mfu: float = Cluster.mfu
    """Fraction of 790 TFLOP/s that forward and backward reach."""


@command(ScalingConfig)
def scaling(config: ScalingConfig) -> None:
    """Forecast the time of a train step on many GPUs, and what ranks send each other.

    Computed from shapes by the formulas of docs/scaling.md: bytes and messages are those of the
    code, bandwidths and speeds are assumed. Nothing is measured.
    """
    _check(config)
    model = named_model(config.model, weights=False)
    weights = weights_of(model, _planner.plan(model, config.placement))
    cluster = Cluster(
        gpus_per_node=config.gpus_per_node,
        node_bandwidth=config.nvlink * _GIGA,
        network_bandwidth=config.network * _GIGA / 8,
        mfu=config.mfu,
    )
    forecasts = [
        forecast(
            weights,
            axes_of(ranks, config.shard, config.tensor),
            optimizer=config.optimizer,
            batch=Batch(tokens=config.batch_tokens, micro_tokens=config.micro_tokens),
            cluster=cluster,
            config=model.config if isinstance(model, HybridLM) else None,
        )
        for ranks in config.ranks
    ]
    print(
        f"{config.model}, {config.optimizer}, multipliers: {config.placement}, "
        f"{count(config.batch_tokens)} tokens per step\n"
    )
    if len(forecasts) == 1:
        print(_messages(forecasts[0]) + "\n")
    print(_times(forecasts))


def axes_of(ranks: int, shard: int, tensor: int) -> Axes:
    """Return the axes of a number of ranks; `shard` 0 leaves no replicas."""
    shard = shard or max(1, ranks // tensor)
    data, rest = divmod(ranks, shard * tensor)
    if rest or not data:
        raise ValueError(
            f"{ranks} ranks cannot be divided into groups of shard x tensor = {shard} x {tensor}: "
            "choose numbers whose product divides it"
        )
    return Axes(data, shard, tensor)


def _check(config: ScalingConfig) -> None:
    least = {"shard": 0, "tensor": 1, "batch_tokens": 1, "micro_tokens": 1, "gpus_per_node": 1}
    for name, minimum in least.items():
        if getattr(config, name) < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {getattr(config, name)}")
    if not config.ranks or min(config.ranks) < 1:
        raise ValueError(f"ranks must be positive numbers, got {config.ranks}")
    for name in ("nvlink", "network", "mfu"):
        if not 0 < getattr(config, name) < float("inf"):
            raise ValueError(f"{name} must be a positive number, got {getattr(config, name):g}")


def _messages(forecasted: Forecast) -> str:
    """Return what one rank sends in a step."""
    lines = [("of a step, per rank", "kind", "over", "number", "sent, MB", "messages", "ms")]
    lines += [
        (
            row.what,
            row.kind,
            row.over,
            f"{row.number:,}",
            f"{row.num_bytes / 1e6:,.2f}",
            f"{row.messages:,}",
            f"{1e3 * row.seconds:,.2f}",
        )
        for row in forecasted.rows
    ]
    return "\n".join(aligned(lines, left=range(3)))


def _times(forecasts: Sequence[Forecast]) -> str:
    """Return a line of milliseconds for each number of ranks."""
    names = ("compute", "exposed", "tensor", "sums", "exchange", "newton_schulz", "step")
    heads = ("compute", "FSDP2", "TP", "sums", "exchange", "NS", "step")
    lines: list[Sequence[str]] = [
        ("ms, data x shard x tensor", *heads, "exchange/step", "overlap saves")
    ]
    for one in forecasts:
        times = [f"{1e3 * getattr(one, name):,.2f}" for name in names]
        shares = [f"{value / one.step:.1%}" for value in (one.exchange, one.hideable)]
        lines.append((" x ".join(map(str, one.axes)), *times, *shares))
    return "\n".join(aligned(lines, left=[0]))

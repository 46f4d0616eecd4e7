"""Forecast the seconds of a train step on a cluster, by part, and its exposed communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.parallelize import rank_shape
from learnable_multipliers.pretrain.optimizer_config import OptimizerKind
from learnable_multipliers.pretrain.scaling.cluster import (
    Cluster,
    bytes_sent,
    exchange_seconds,
    loads,
    num_messages,
    seconds,
    span,
)
from learnable_multipliers.pretrain.scaling.exchange import Exchange, muon_work
from learnable_multipliers.pretrain.scaling.traffic import (
    Collective,
    fsdp_backward,
    fsdp_forward,
    packed_sums,
    tensor_backward,
    tensor_forward,
)
from learnable_multipliers.pretrain.scaling.weights import Weight, num_parameters

_BFLOAT16 = 2
"""Bytes of a number in matrix products and in Newton-Schulz, on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of a step."""

    tokens: int = 2**22
    """Tokens of the whole batch."""
    micro_tokens: int = 2**14
    """Maximum tokens of a micro-batch on one data-parallel rank."""

    def micro_batches(self, axes: Axes) -> tuple[int, float]:
        """Return how many micro-batches a rank has, and the tokens of each."""
        own = self.tokens / axes.dp_degree
        number = max(1, math.ceil(own / self.micro_tokens))
        return number, own / number


@dataclass(frozen=True, kw_only=True)
class Row:
    """Communication of the busiest rank in a step, for one purpose."""

    what: str
    kind: str
    over: str
    number: int
    """Collectives of a step."""
    num_bytes: float
    """Bytes sent in a step."""
    messages: int
    """Sequential messages in a step."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A train step; all times in seconds."""

    axes: Axes
    rows: tuple[Row, ...]
    compute: float
    """Forward and backward."""
    exposed: float
    """Exposed time of FSDP2's collectives."""
    tensor: float
    """Collectives of tensor parallelism, all exposed."""
    sums: float
    """The optimizer's packed all-reduce."""
    exchange: float
    """Muon's two all-to-alls."""
    newton_schulz: float
    """Newton-Schulz on the busiest rank."""

    @property
    def step(self) -> float:
        """The whole step; in the current code the optimizer overlaps nothing."""
        optimizer = self.sums + self.exchange + self.newton_schulz
        return self.compute + self.exposed + self.tensor + optimizer

    @property
    def hideable(self) -> float:
        """Upper bound of the time saved by overlapping the exchange with Newton-Schulz."""
        return min(self.exchange, self.newton_schulz)


def forecast(
    weights: Sequence[Weight],
    axes: Axes,
    *,
    optimizer: OptimizerKind,
    batch: Batch,
    cluster: Cluster,
    config: ModelConfig | None,
) -> Forecast:
    """Return the forecast of a step; `config` is that of a model `lrm train` builds."""
    _check(axes, batch, config)
    number, tokens = batch.micro_batches(axes)
    forward, backward = fsdp_forward(weights, axes), fsdp_backward(weights, axes)
    activations: list[Collective] = []
    if config is not None:
        activations += tensor_forward(config, axes, round(tokens), _BFLOAT16)
        activations += tensor_backward(config, axes, round(tokens))
    sums = packed_sums(weights, axes)

    def total(collectives: Sequence[Collective]) -> float:
        return sum(seconds(one, span(axes, one.over, cluster), cluster) for one in collectives)

    times = [[total([one]) for one in some] for some in (forward, backward)]
    # Gradients of the root unit are reduce-scattered over shards, then summed over replicas.
    last = (axes.shard > 1) + (axes.data > 1)
    operations = 2 * num_parameters(weights, axes) * tokens
    one_pass = operations / (cluster.flops * cluster.mfu)
    rows = _rows([*forward, *backward, *activations], number, axes, cluster)
    rows += _rows(sums, 1, axes, cluster)
    exchange = newton_schulz = 0.0
    if optimizer == "muon":
        work = muon_work(weights, axes)
        newton_schulz = max(work.flops) / (cluster.flops * cluster.newton_schulz_mfu)
        rows += [
            _exchange_row("updates to owners", work.there, cluster),
            _exchange_row("results to holders", work.back, cluster),
        ]
        exchange = sum(row.seconds for row in rows[-2:])
    return Forecast(
        axes=axes,
        rows=tuple(rows),
        # The backward pass has twice the operations of the forward pass.
        compute=3 * one_pass * number,
        exposed=number * exposed_seconds(times[0], times[1], one_pass, last=last),
        tensor=number * total(activations),
        sums=total(sums),
        exchange=exchange,
        newton_schulz=newton_schulz,
    )


def exposed_seconds(
    forward: list[float], backward: list[float], one_pass: float, *, last: int = 1
) -> float:
    """Return the exposed time of FSDP2's collectives in one micro-batch.

    The first all-gather and the `last` collectives of the backward pass, all of the root, have
    nothing beside them. The others run beside the pass they belong to, as far as it lasts.
    """
    others = len(backward) - last
    gathers = sum(forward[:1]) + max(0.0, sum(forward[1:]) - one_pass)
    reductions = max(0.0, sum(backward[:others]) - 2 * one_pass) + sum(backward[others:])
    return gathers + reductions


def _check(axes: Axes, batch: Batch, config: ModelConfig | None) -> None:
    if axes.tensor > 1:
        if config is None:
            raise ValueError(
                f"tensor={axes.tensor}: tensor parallelism is that of lrm train, which builds "
                "presets: choose one of them, or tensor=1"
            )
        rank_shape(config, axes.tensor)
    if axes.data > 1 and axes.shard == axes.tensor == 1:
        raise ValueError(
            f"{axes.data} replicas that nothing shards are DDP, whose buckets are not modelled: "
            "give shard a number above 1, or 0 for all ranks"
        )
    if batch.tokens < axes.dp_degree:
        raise ValueError(
            f"a batch of {batch.tokens:,} tokens leaves some of {axes.dp_degree:,} data-parallel "
            "ranks without any: give batch_tokens a larger number"
        )


def _rows(collectives: Sequence[Collective], times: int, axes: Axes, cluster: Cluster) -> list[Row]:
    """Return a row for each purpose, in the order they are first met."""
    kinds: dict[tuple[str, str], list[Collective]] = {}
    for one in collectives:
        kinds.setdefault((one.what, one.kind), []).append(one)
    rows = []
    for (what, kind), group in kinds.items():
        over = span(axes, group[0].over, cluster)
        rows.append(
            Row(
                what=what,
                kind=kind,
                over=group[0].over,
                number=times * len(group),
                num_bytes=times * sum(bytes_sent(one, over.size) for one in group),
                messages=times * sum(sum(num_messages(one, over)) for one in group),
                seconds=times * sum(seconds(one, over, cluster) for one in group),
            )
        )
    return rows


def _exchange_row(what: str, exchange: Exchange, cluster: Cluster) -> Row:
    rank_loads = loads(exchange, cluster)
    return Row(
        what=what,
        kind="all-to-all",
        over="all",
        number=1,
        num_bytes=_BFLOAT16 * max((load.inside + load.between for load in rank_loads), default=0),
        messages=max((load.messages for load in rank_loads), default=0),
        seconds=exchange_seconds(exchange, _BFLOAT16, cluster),
    )

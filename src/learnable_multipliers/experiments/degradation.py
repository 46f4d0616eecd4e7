"""Sweeps of a norm scale: loss at an extreme scale, and how much of it multipliers recover."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from learnable_multipliers.experiments.readings import by_seed, distinct, exponents, loss, select
from learnable_multipliers.experiments.record import Labelled, Record

Sweep = Mapping[float, Record]
"""Scale -> run, of one seed and arm."""


def complete_sweeps(
    records: Sequence[Labelled], needed: Iterable[float], **labels: Any
) -> dict[int, dict[float, Record]]:
    """Return the runs with these labels by seed and scale, for seeds that have all scales.

    There is none without the scales that are needed.
    """
    scales = distinct(select(records, **labels), "scale")
    if not set(needed) <= set(scales):
        return {}
    at = {scale: by_seed(records, scale=scale, **labels) for scale in scales}
    seeds = set[int].intersection(*(set(runs) for runs in at.values()))
    return {seed: {scale: at[scale][seed] for scale in scales} for seed in sorted(seeds)}


def degradation(sweep: Sweep, end: float, others: Iterable[float]) -> float:
    """Return the loss at one scale over the best of the others, in nats."""
    return loss(sweep[end]) - min(loss(sweep[scale]) for scale in others)


def recovered(without: float, with_multipliers: float, least: float) -> float:
    """Return the share of a degradation that multipliers take away: 1 if they are free of it.

    A degradation below `least` counts as that: the share of next to nothing is mere noise, and two
    curves that are flat leave nothing to recover.
    """
    if math.isinf(without) and math.isfinite(with_multipliers):
        # Diverged without multipliers alone.
        return 1.0
    without = max(without, least)
    return (without - with_multipliers) / without


def exponent(values: Mapping[float, float | None]) -> float | None:
    """Return a of value ~ scale^a; None where a value is missing."""
    known = {scale: value for scale, value in values.items() if value is not None and value > 0}
    if len(known) < len(values):
        return None
    slopes = exponents([(scale,) for scale in known], list(known.values()))
    return None if slopes is None else slopes[0]

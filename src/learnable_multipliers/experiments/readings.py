"""Reading records: by label, by seed, by role, over layers and over steps.

A number that a record does not hold is None, and `paired` leaves that seed out, so that an analysis
of half an experiment says less and never fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.pretrain.trainer.schedule import Schedule

Number = float | None
Curve = Mapping[float, float]
"""x -> y of one run: step -> loss."""
Value = TypeVar("Value")


def select(records: Iterable[Labelled], **labels: str | float) -> list[Labelled]:
    """Return the records that carry these labels."""
    return [
        one
        for one in records
        if all(name in one.labels and one.labels[name] == value for name, value in labels.items())
    ]


def finished(records: Iterable[Labelled]) -> list[Labelled]:
    """Return the records of runs that did not diverge: the others have no norms at the end."""
    return [one for one in records if one.record.outcome == "finished"]


def by_seed(records: Iterable[Labelled], **labels: str | float) -> dict[int, Record]:
    """Return the one record of each seed with these labels."""
    seeds: dict[int, Record] = {}
    for one in select(records, **labels):
        seed = int(one.labels["seed"])
        if seed in seeds:
            raise ValueError(f"two records of seed {seed} with {labels}: give more labels")
        seeds[seed] = one.record
    return seeds


def paired(function: Callable[..., Value | None], *arms: Mapping[int, Any]) -> dict[int, Value]:
    """Return a function of one record (or number) from each arm, for every seed that all have.

    Seeds for which it is None are left out. A diverged run stays in, with an infinite loss.
    """
    shared = set(arms[0]).intersection(*arms[1:]) if arms else set()
    values = {seed: function(*(arm[seed] for arm in arms)) for seed in sorted(shared)}
    return {seed: value for seed, value in values.items() if value is not None}


def distinct(records: Iterable[Labelled], label: str) -> list[Any]:
    """Return the values that a label takes, in order."""
    return sorted({one.labels[label] for one in records if label in one.labels})


def sweep(
    records: Iterable[Labelled], label: str, function: Callable[[Record], Number], **labels: Any
) -> dict[float, list[float]]:
    """Return a number of every run with these labels, by the value of another label."""
    by_value: dict[float, list[float]] = {}
    for one in select(records, **labels):
        value = function(one.record)
        if label in one.labels and value is not None:
            by_value.setdefault(float(one.labels[label]), []).append(value)
    return dict(sorted(by_value.items()))


def loss(record: Record) -> float:
    """Return the held-out loss at the end; infinite for a run that diverged."""
    return math.inf if record.loss is None else record.loss


def final_weights(record: Record) -> dict[str, Any]:
    """Return the last record of the weights; empty without any."""
    return record.weights[-1] if record.weights else {}


def final_signals(record: Record) -> dict[str, Any]:
    """Return the last record of the signals; empty without any."""
    return record.signals[-1] if record.signals else {}


def names_of(record: Record, role: str) -> list[str]:
    """Return the matrices of a role; a fused matrix has all of its blocks' roles."""
    roles: dict[str, str] = final_weights(record).get("roles", {})
    return [name for name, blocks in roles.items() if role in blocks.split("/")]


def role_rms(
    record: Record, *roles: str, key: str = "raw_rms", weights: Mapping[str, Any] | None = None
) -> Number:
    """Return the geometric mean of the rms of all matrices of some roles.

    Args:
        key: `raw_rms`, or `predicted_rms` for what noise would have given them.
        weights: The record of the weights to read; the last one by default.
    """
    values = (final_weights(record) if weights is None else weights).get(key, {})
    names = [name for role in roles for name in names_of(record, role)]
    return geometric_mean(values.get(name) for name in names)


def role_multiplier(
    record: Record, *roles: str, kind: str = "scalar", weights: Mapping[str, Any] | None = None
) -> Number:
    """Return the geometric mean of the median multipliers of all matrices of some roles.

    The blocks of a fused matrix have one scalar each: of those this is the median.
    """
    values = (final_weights(record) if weights is None else weights).get("multipliers", {})
    names = [name for role in roles for name in names_of(record, role)]
    medians = (values.get(name, {}).get(kind) for name in names)
    return geometric_mean(None if q is None else abs(q[len(q) // 2]) for q in medians)


def layer_scalars(record: Record, role: str) -> list[float] | None:
    """Return the size of the scalar multiplier of a role in each layer, at the end.

    It is what the effective rows have over the raw ones, so blocks of fused matrices have theirs.
    """
    rows = final_signals(record).get("rows", {}).get(role)
    if not rows or not all(mean > 0 for mean in rows["raw"]["mean"]):
        return None
    pairs = zip(rows["effective"]["mean"], rows["raw"]["mean"], strict=True)
    return [effective / raw for effective, raw in pairs]


def diagnoses(record: Record, **fields: str) -> list[dict[str, Any]]:
    """Return the diagnoses of the tensors with these fields; a fused matrix has several roles."""
    return [
        reading
        for reading in record.readings
        if all(
            value in str(reading.get(name)).split("/") if name == "role" else reading[name] == value
            for name, value in fields.items()
        )
    ]


def activation(
    record: Record, name: str, group: str = "activations", signals: Mapping[str, Any] | None = None
) -> Number:
    """Return a signal at the end, or in one record of signals; lists by layer in geometric mean."""
    signal = (final_signals(record) if signals is None else signals).get(group, {}).get(name)
    return geometric_mean(signal if isinstance(signal, list) else [signal])


def over_steps(
    series: Iterable[Mapping[str, Any]], function: Callable[[Mapping[str, Any]], Number]
) -> dict[float, float]:
    """Return a number of each record of a series by step, where it has that number."""
    values = ((entry["step"], function(entry)) for entry in series)
    return {step: value for step, value in values if value is not None}


def trained(record: Record, name: str) -> dict[float, float]:
    """Return what was logged in training by step, where it is a number: loss, lr or grad_norm."""
    points = zip(record.train.get("step", ()), record.train.get(name, ()), strict=True)
    return {step: value for step, value in points if math.isfinite(value)}


def held_out(record: Record) -> dict[float, float]:
    """Return the held-out loss by tokens."""
    schedule = Schedule.of_run(record.train_config)
    points = zip(record.held_out.get("step", ()), record.held_out.get("loss", ()), strict=True)
    return {schedule.tokens_before(int(step)): loss for step, loss in points}


def difference(curve: Curve, other: Curve) -> dict[float, float]:
    """Return a curve minus another, where both have a point."""
    return {x: y - other[x] for x, y in curve.items() if x in other}


def geometric_mean(values: Iterable[Number]) -> Number:
    """Return the geometric mean; None if there is nothing, or one is missing or not positive."""
    logs: list[float] = []
    for value in values:
        if value is None or not 0 < value < math.inf:
            return None
        logs.append(math.log(value))
    return math.exp(sum(logs) / len(logs)) if logs else None


def exponents(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Return a, b, ... of value = constant * x^a y^b ..., by least squares of the logarithms.

    None where the rows (x, y, ...) do not determine them.
    """
    if len(rows) != len(values) or not rows:
        return None
    design = np.column_stack([np.ones(len(rows)), np.log(np.asarray(rows, dtype=float))])
    coefficients, _, rank, _ = np.linalg.lstsq(
        design, np.log(np.asarray(values, dtype=float)), rcond=None
    )
    return coefficients[1:].tolist() if rank == design.shape[1] else None


def spread(values: Sequence[float]) -> Number:
    """Return the largest over the smallest; None without two positive numbers."""
    if len(values) < 2 or min(values) <= 0:
        return None
    return max(values) / min(values)

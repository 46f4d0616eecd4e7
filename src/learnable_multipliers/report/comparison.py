"""Numbers that need more than one record or more than one run; nothing here draws or writes.

A loss is compared only at the same number of tokens: two runs of different length, or one that
was stopped, are compared where both were evaluated.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from learnable_multipliers.report.records import Record, Run, number

# Where a run was written and how it was started, not what it did.
_NOT_SETTINGS = ("out", "resume", "dry_run")


class Gap(NamedTuple):
    """Loss of a run minus loss of the baseline, where both were evaluated."""

    tokens: list[float]
    differences: list[float]


class Spread(NamedTuple):
    """Smallest, median and largest of some numbers."""

    low: float
    middle: float
    high: float


def loss_gap(run: Run, baseline: Run) -> Gap:
    """Return the gap in validation loss to the baseline at every common number of tokens."""
    theirs = dict(zip(*baseline.series("eval", "loss"), strict=True))
    both = [(t, loss) for t, loss in zip(*run.series("eval", "loss"), strict=True) if t in theirs]
    return Gap([t for t, _ in both], [loss - theirs[t] for t, loss in both])


def tokens_seen(runs: Sequence[Run]) -> float:
    """Return the largest number of tokens in any record; nan without one."""
    kinds = ("train", "eval")
    found = [tokens for run in runs for kind in kinds for tokens in run.series(kind, "loss")[0]]
    return max(filter(math.isfinite, found), default=math.nan)


def tokens_per_second(run: Run) -> float:
    """Return the median speed, which start-up and evaluations do not move; nan without one."""
    speeds = [v for v in run.series("train", "tokens_per_second")[1] if math.isfinite(v)]
    return statistics.median(speeds) if speeds else math.nan


def spread(values: Iterable[float]) -> Spread | None:
    """Return the spread of the finite values, or None where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return Spread(min(finite), statistics.median(finite), max(finite)) if finite else None


def rms_pairs(record: Record | None) -> dict[str, tuple[float, float]]:
    """Return parameter name -> (predicted, measured) rms, where there is a prediction."""
    measured, predicted = positive(record, "raw_rms"), positive(record, "predicted_rms")
    return {name: (predicted[name], rms) for name, rms in measured.items() if name in predicted}


def positive(record: Record | None, key: str) -> dict[str, float]:
    """Return parameter name -> rms, measured or predicted, where a log axis can show it."""
    found = {name: number(value) for name, value in (record or {}).get(key, {}).items()}
    return {name: value for name, value in found.items() if math.isfinite(value) and value > 0}


def role_of(record: Record, name: str) -> str:
    """Return the recorded role of a parameter; the blocks of a fused SSM input are one role."""
    role = str(record.get("roles", {}).get(name, "unknown"))
    blocks = role.split("/")
    fused_ssm = len(blocks) > 1 and all(block.startswith("ssm-") for block in blocks)
    return "ssm-in" if fused_ssm else role


def multiplier_quantiles(record: Record | None) -> dict[tuple[str, str], list[list[float]]]:
    """Return (role, "row" | "col" | "scalar") -> the quantiles of each of its matrices."""
    groups: dict[tuple[str, str], list[list[float]]] = {}
    for name, axes in (record or {}).get("multipliers", {}).items():
        for axis, quantiles in axes.items():
            values = [number(value) for value in quantiles]
            if axis not in ("row", "col", "scalar") or len(values) != 7:
                raise ValueError(
                    f"multipliers of {name!r}: expected seven quantiles of row, col or scalar, "
                    f"got {len(values)} of {axis!r}"
                )
            if all(map(math.isfinite, values)):
                groups.setdefault((role_of(record or {}, name), axis), []).append(values)
    return groups


def pool_quantiles(matrices: Sequence[Sequence[float]]) -> list[float]:
    """Return quantiles for several matrices: the extremes of all, medians of those between."""
    columns = list(zip(*matrices, strict=True))
    inner = [statistics.median(column) for column in columns[1:-1]]
    return [min(columns[0]), *inner, max(columns[-1])]


def drifting(run: Run) -> list[str]:
    """Return the symmetries of a run in words, those it has drifted along most first."""
    last = run.last("health") or {}
    found = [key for key in last if key.startswith("drift/") and key != "drift/largest"]
    found.sort(key=lambda key: -number(last[key]))
    return [key.removeprefix("drift/") for key in found]


def alarms(run: Run) -> list[str]:
    """Return what the last record of a run's health warns of."""
    return [str(text) for text in (run.last("health") or {}).get("alarms", [])]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested config as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the dotted config keys, folders aside, whose values are not the same in all runs."""
    configs = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    # As JSON: True and 1 are different settings though they are equal.
    keys = [key for key in keys if key not in _NOT_SETTINGS]
    return [k for k in keys if len({json.dumps(config.get(k)) for config in configs}) > 1]


def by_setting(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in groups that differ by seed and name alone."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        setting = {
            key: value
            for key, value in flatten(run.config).items()
            if key not in ("name", *_NOT_SETTINGS) and key.rpartition(".")[2] != "seed"
        }
        groups.setdefault(json.dumps(setting, sort_keys=True), []).append(run)
    return list(groups.values())


def distinct_names(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with names that tell them apart: by seed if that does, else by number."""
    named: list[Run] = []
    for run in runs:
        taken = {other.name for other in named}
        name, count = run.name, 1
        if sum(other.name == name for other in runs) > 1:
            name = f"{run.name} s{run.setting('seed')}"
        while name in taken:
            count += 1
            name = f"{run.name} #{count}"
        named.append(replace(run, config={**run.config, "name": name}))
    return named

"""Numbers that need more than one record or more than one run; nothing here draws or writes.

A loss is compared only at the same number of tokens: two runs of different length, or one that
was stopped, are compared where both were evaluated.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from learnable_multipliers.report.records import Record, Run, number

# Where a run was written and how it was started, not what it did.
_NOT_SETTINGS = ("out", "resume", "dry_run")


def both_evaluated(run: Run, baseline: Run) -> list[tuple[float, float, float]]:
    """Return (tokens, loss, loss of the baseline) where both have a finite validation loss.

    Nothing for losses on other text, or in tokens of another tokenizer.
    """
    if read_other_data(run, baseline):
        return []
    theirs = dict(zip(*baseline.series("eval", "loss"), strict=True))
    own = zip(*run.series("eval", "loss"), strict=True)
    points = [(tokens, loss, theirs.get(tokens, math.nan)) for tokens, loss in own]
    return [(tokens, loss, base) for tokens, loss, base in points if math.isfinite(loss - base)]


def read_other_data(run: Run, other: Run) -> bool:
    """Return whether two runs have read different data."""
    return run.environment.get("data") != other.environment.get("data")


def final_losses(runs: Sequence[Run]) -> list[float]:
    """Return the last validation loss of every run that has a finite one."""
    return [loss for run in runs if math.isfinite(loss := run.final("eval", "loss"))]


def tokens_per_second(run: Run) -> float:
    """Return the median speed, which start-up and evaluations do not move; nan without one."""
    speeds = [v for v in run.series("train", "tokens_per_second")[1] if math.isfinite(v)]
    return statistics.median(speeds) if speeds else math.nan


def rms_pairs(record: Record) -> dict[str, tuple[float, float]]:
    """Return parameter name -> (predicted, measured) rms, where there is a prediction."""
    measured, predicted = positive(record, "raw_rms"), positive(record, "predicted_rms")
    return {name: (predicted[name], rms) for name, rms in measured.items() if name in predicted}


def rms_ratios(run: Run) -> list[float]:
    """Return measured over predicted rms of every matrix at the last record."""
    return [measured / predicted for predicted, measured in rms_pairs(run.last("weights")).values()]


def positive(record: Record, key: str) -> dict[str, float]:
    """Return parameter name -> rms, measured or predicted, where a log axis can show it."""
    values = {name: number(value) for name, value in record.get(key, {}).items()}
    return {name: value for name, value in values.items() if 0 < value < math.inf}


def role_of(record: Record, name: str) -> str:
    """Return the recorded role of a parameter; the blocks of a fused SSM input are one role."""
    role = str(record.get("roles", {}).get(name, "unknown"))
    fused_ssm = "/" in role and all(block.startswith("ssm-") for block in role.split("/"))
    return "ssm-in" if fused_ssm else role


def multiplier_quantiles(record: Record) -> list[tuple[str, str, list[float]]]:
    """Return (role, "row" | "col" | "scalar", quantiles) of all multipliers of a record."""
    rows: list[tuple[str, str, list[float]]] = []
    for name, axes in record.get("multipliers", {}).items():
        for axis, quantiles in axes.items():
            values = [number(value) for value in quantiles]
            if axis not in ("row", "col", "scalar") or len(values) != 7:
                raise ValueError(
                    f"multipliers of {name!r}: expected seven quantiles of row, col or scalar, "
                    f"got {len(values)} of {axis!r}"
                )
            if all(map(math.isfinite, values)):
                rows.append((role_of(record, name), axis, values))
    return rows


def pool_quantiles(matrices: Sequence[Sequence[float]]) -> list[float]:
    """Return quantiles for several matrices: the extremes of all, medians of those between."""
    lows, *inner, highs = zip(*matrices, strict=True)
    return [min(lows), *map(statistics.median, inner), max(highs)]


def drifting(run: Run) -> list[str]:
    """Return the symmetries of a run in words, those it has drifted along most first."""
    last = run.last("health")
    symmetries = [key for key in last if key.startswith("drift/") and key != "drift/largest"]
    symmetries.sort(key=lambda key: -number(last[key]))
    return [key.removeprefix("drift/") for key in symmetries]


def settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return each dotted key of the configs with its value in every run, as JSON; "-" without."""
    configs = [_flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    # As JSON: True and 1 are different settings though they are equal.
    return {k: [json.dumps(c[k]) if k in c else "-" for c in configs] for k in keys}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing_settings(runs: Sequence[Run], ignored: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the settings, folders aside, whose values are not the same in all runs.

    Args:
        ignored: Settings to leave out, by the last part of their key.
    """
    return {
        key: values
        for key, values in settings(runs).items()
        if len(set(values)) > 1
        and key not in _NOT_SETTINGS
        and key.rpartition(".")[2] not in ignored
    }


def by_setting(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in groups that differ by seed and name alone."""
    differing = differing_settings(runs, ignored=("name", "seed")).values()
    groups: dict[tuple[str, ...], list[Run]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(tuple(values[index] for values in differing), []).append(run)
    return list(groups.values())


def with_one_seed(groups: Sequence[Sequence[Run]]) -> list[Sequence[Run]]:
    """Return the groups whose runs all have the same seed."""
    return [group for group in groups if len({str(run.setting("seed")) for run in group}) == 1]


def environments(runs: Sequence[Run]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return each environment that runs were made in, with the names of the runs."""
    names: dict[str, list[str]] = {}
    for run in runs:
        # These have a place of their own on the page, or are a hash.
        elsewhere = ("command", "parameters", "multipliers", "data")
        rest = {key: value for key, value in run.environment.items() if key not in elsewhere}
        names.setdefault(json.dumps(rest, sort_keys=True), []).append(run.name)
    return [(json.loads(environment), each) for environment, each in names.items()]


def distinct_names(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with distinct names: by seed if that suffices, else by number."""
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

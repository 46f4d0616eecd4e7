"""Plots of the matrices inside one run: raw rms against its prediction, learned multipliers.

Roles share a colour by the part of the model they sit in, and differ by marker inside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from learnable_multipliers.report.comparison import (
    multiplier_quantiles,
    positive,
    rms_pairs,
    role_of,
)
from learnable_multipliers.report.style import COLOURS, count_axis, legend, log_axis, plot, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from learnable_multipliers.report.records import Record, Run

# Colour of a part of the model -> its roles; the first role present stands for it over time.
_PARTS = {
    "ochre": ("embedding", "tied-embedding", "position-embedding"),
    "blue": ("query", "attention-out", "value", "key", "query-latent", "kv-latent"),
    "teal": ("ssm-in", "ssm-x", "ssm-z", "ssm-out", "ssm-B", "ssm-C", "ssm-dt"),
    "rust": ("down", "gate", "up", "ungated-up"),
    "plum": ("head", "router"),
}
_LOOKS = {
    role: (COLOURS[colour], marker)
    for colour, roles in _PARTS.items()
    for role, marker in zip(roles, "os^Dv*P", strict=False)
}
_AXES = {
    "row": ("rows: one per output", COLOURS["blue"]),
    "col": ("columns: one per input", COLOURS["rust"]),
    "scalar": ("scalars: one per matrix", COLOURS["teal"]),
}


def rms_limits(records: Sequence[Record]) -> tuple[float, float]:
    """Return one range for the rms of many records, so that their plots can be compared."""
    kinds = ("raw_rms", "predicted_rms")
    values = [v for record in records for key in kinds for v in positive(record, key).values()]
    if not values:
        return 0.1, 10.0
    # At least a factor of four: or rounding would look like a difference.
    middle, half = math.sqrt(min(values) * max(values)), math.sqrt(max(values) / min(values))
    half = max(2.0, 1.15 * half)
    return middle / half, middle * half


def rms_scatter(run: Run, limits: tuple[float, float] | None = None) -> Figure:
    """Draw the measured rms of every matrix against its prediction, at the last record."""
    record = run.last("weights") or {}
    groups: dict[str, list[tuple[float, float]]] = {}
    for name, pair in rms_pairs(record).items():
        groups.setdefault(role_of(record, name), []).append(pair)
    with plot("measured rms of the raw weight", 370) as (figure, axes):
        low, high = limits or rms_limits([record])
        axes.plot([low, high], [low, high], color=COLOURS["muted"], lw=1.2, ls="dashed")
        for role in sorted(groups, key=_rank):
            colour, marker = _look(role)
            axes.plot(*zip(*groups[role], strict=True), ls="", color=colour, marker=marker, ms=6,
                      mew=0, alpha=0.8, label=short(role))  # fmt: skip
        axes.text(0.98, 0.7, "as predicted", transform=axes.transAxes, ha="right",
                  color=COLOURS["muted"], style="italic")  # fmt: skip
        axes.set_xlabel("rms if gradients were pure noise")
        log_axis(axes, "x", low, high)
        log_axis(axes, "y", low, high)
        legend(figure)
        return figure


def rms_over_steps(run: Run, limits: tuple[float, float] | None = None) -> Figure:
    """Draw the rms of one role of each part of the model over steps; dashed, its prediction."""
    records = run.of("weights")
    present = {role_of(record, name) for record in records for name in positive(record, "raw_rms")}
    roles: dict[str, str] = {}
    for role in sorted(present, key=_rank):
        roles.setdefault(_look(role)[0], role)
    steps = [int(record["step"]) for record in records]
    with plot("rms of the raw weight", 310) as (figure, axes):
        for colour, role in roles.items():
            measured = [_of_role(record, role, "raw_rms") for record in records]
            predicted = [_of_role(record, role, "predicted_rms") for record in records]
            axes.plot(steps, measured, color=colour, label=short(role))
            axes.plot(steps, predicted, color=colour, lw=1.3, ls="dashed")
        count_axis(axes, "step", max([1, *steps]))
        log_axis(axes, "y", *(limits or rms_limits(records)))
        legend(figure)
        return figure


def multiplier_limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Return one range for the positive multipliers of all runs, with 1 inside."""
    groups = [g for run in runs for g in multiplier_quantiles(run.last("weights")).values()]
    values = [v for group in groups for quantiles in group for v in quantiles if v > 0]
    # Five decades at most: a multiplier at 1e-9 is zero, and would squeeze the others.
    low = max(min([0.8, *values]), max([1.25, *values]) / 1e5)
    return low / 1.12, max([1.25, *values]) * 1.12


def multiplier_ranges(run: Run, limits: tuple[float, float] | None = None) -> Figure:
    """Draw how far the learned multipliers of each role spread, rows and columns apart."""
    groups = multiplier_quantiles(run.last("weights"))
    keys = sorted(groups, key=lambda key: (_rank(key[0]), list(_AXES).index(key[1])))
    low, high = limits or multiplier_limits([run])
    centres: dict[str, list[float]] = {}
    y = 0.0
    with plot("", 110 + 13 * (len(keys) + len({role for role, _ in keys}))) as (figure, axes):
        axes.axvline(1.0, color=COLOURS["ink"], lw=1.2)
        for role, axis in keys:
            y += 1 if role in centres or not centres else 2
            centres.setdefault(role, []).append(y)
            colour = _AXES[axis][1]
            quantiles = pool_quantiles(groups[role, axis])
            ends = [max(q, low) for q in quantiles]
            for outer, width in zip((0, 1, 2), (1.2, 3.2, 7.0), strict=True):
                axes.plot([ends[outer], ends[6 - outer]], [y, y], color=colour, lw=width)
            axes.plot(ends[3], y, marker="o", ms=5, mew=1.8, color=colour, mfc=COLOURS["page"])
            if quantiles[0] <= 0:
                axes.plot(low, y, marker="<", ms=7, color=colour, clip_on=False)
        axes.set(xlabel="multiplier", ylim=(y + 1, 0))
        axes.set_yticks([statistics.mean(c) for c in centres.values()], list(map(short, centres)))
        axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        log_axis(axes, "x", low, high)
        shown = {axis for _, axis in keys}
        looks = [look for axis, look in _AXES.items() if axis in shown]
        legend(figure, [Line2D([], [], color=colour, lw=5, label=text) for text, colour in looks])
        return figure


def pool_quantiles(matrices: Sequence[Sequence[float]]) -> list[float]:
    """Return quantiles for several matrices: the extremes of all, medians of those between."""
    columns = list(zip(*matrices, strict=True))
    inner = [statistics.median(column) for column in columns[1:-1]]
    return [min(columns[0]), *inner, max(columns[-1])]


def _of_role(record: Record, role: str, key: str) -> float:
    """Return an rms of a role: the geometric mean over its matrices, nan where there is none."""
    found = [rms for name, rms in positive(record, key).items() if role_of(record, name) == role]
    return statistics.geometric_mean(found) if found else math.nan


def _rank(role: str) -> tuple[int, str]:
    """Return the place of a role in legends, of the first of a fused one."""
    first = role.partition("/")[0]
    return (list(_LOOKS).index(first) if first in _LOOKS else len(_LOOKS)), role


def _look(role: str) -> tuple[str, str]:
    """Return the colour and the marker of a role, of the first of a fused one; else grey."""
    return _LOOKS.get(role.partition("/")[0], (COLOURS["muted"], "X"))

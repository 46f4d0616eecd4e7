"""Figures of the matrices inside one run: raw rms against its prediction, learned multipliers.

Roles share a colour by the part of the model they sit in, and differ by marker inside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from learnable_multipliers.report.comparison import (
    multiplier_quantiles,
    positive,
    rms_pairs,
    role_of,
)
from learnable_multipliers.report.theme import (
    LIGHT,
    canvas,
    compact,
    label_ends,
    plain_numbers,
    short,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from learnable_multipliers.report.records import Record, Run

# Part of the model -> its colour, its roles; the first role present stands for it over time.
_PARTS = {
    "ochre": ("embedding", "tied-embedding", "position-embedding"),
    "blue": ("query", "attention-out", "value", "key", "query-latent", "kv-latent"),
    "teal": ("ssm-in", "ssm-x", "ssm-z", "ssm-out", "ssm-B", "ssm-C", "ssm-dt"),
    "rust": ("down", "gate", "up", "ungated-up"),
    "plum": ("head", "router"),
}
_ORDER = tuple(role for roles in _PARTS.values() for role in roles)
_MARKERS = "os^Dv*P"
_ASIDE: dict[str, Any] = {"ha": "right", "color": LIGHT["muted"], "style": "italic"}
_AXES = {
    "row": ("rows: one per output", "blue"),
    "col": ("columns: one per input", "rust"),
    "scalar": ("scalars: one per matrix", "teal"),
}


def rms_limits(records: Sequence[Record]) -> tuple[float, float]:
    """Return one range for the rms of many records, so that their figures can be compared."""
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
    for name, pair in rms_pairs(run.last("weights")).items():
        groups.setdefault(role_of(record, name), []).append(pair)
    roles = sorted(groups, key=_rank)
    legend_lines = math.ceil(len(roles) / 3)
    bottom = 52 + 16 * legend_lines
    with canvas("measured rms of the raw weight", height=258 + bottom, bottom=bottom) as (
        figure,
        axes,
    ):
        low, high = limits or rms_limits(run.of("weights")[-1:])
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.plot([low, high], [low, high], color=LIGHT["muted"], lw=1.2, ls=(0, (4, 2)))
        axes.text(0.98, 0.7, "as predicted", transform=axes.transAxes, **_ASIDE)
        for role in roles:
            ink, marker = _look(role)
            predicted, measured = zip(*groups[role], strict=True)
            axes.scatter(
                predicted, measured, s=34, c=ink, marker=marker, alpha=0.8, lw=0, label=role
            )
        axes.set_xlabel("rms if gradients were pure noise")
        plain_numbers(axes, "x")
        plain_numbers(axes, "y")
        figure.legend(
            handles=[_handle(role) for role in roles],
            loc="lower center", ncols=3, columnspacing=1.2,
        )  # fmt: skip
        return figure


def rms_over_steps(run: Run, limits: tuple[float, float] | None = None) -> Figure:
    """Draw the rms of one role of each part of the model over steps; dashed, its prediction."""
    records = run.of("weights")
    present = {role_of(record, name) for record in records for name in positive(record, "raw_rms")}
    parts: dict[str, list[str]] = {}
    for role in sorted(present, key=_rank):
        parts.setdefault(_look(role)[0], []).append(role)
    roles = [found[0] for found in parts.values()]
    room = max((len(short(role)) for role in roles), default=0) + 3
    with canvas("rms of the raw weight", height=290, right=room) as (figure, axes):
        low, high = limits or rms_limits(run.of("weights"))
        steps = [int(record["step"]) for record in records]
        axes.set(yscale="log", ylim=(low, high), xlim=(0, max([1, *steps])))
        ends = []
        for role in roles:
            ink, _ = _look(role)
            measured = [_of_role(record, role, "raw_rms") for record in records]
            predicted = [_of_role(record, role, "predicted_rms") for record in records]
            axes.plot(steps, measured, color=ink, lw=2.0)
            axes.plot(steps, predicted, color=ink, lw=1.3, ls=(0, (4, 2)))
            ends += [(short(role), steps[-1], measured[-1], ink)]
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(compact))
        plain_numbers(axes, "y")
        label_ends(axes, [end for end in ends if math.isfinite(end[2])])
        return figure


def multiplier_limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Return one range for the positive multipliers of all runs, with 1 inside."""
    values = [
        value
        for run in runs
        for matrices in multiplier_quantiles(run.last("weights")).values()
        for quantiles in matrices
        for value in quantiles
        if value > 0
    ]
    # Five decades at most: a multiplier at 1e-9 is zero, and would squeeze the others.
    low = max(min([0.8, *values]), max([1.25, *values]) / 1e5)
    return low / 1.12, max([1.25, *values]) * 1.12


def multiplier_ranges(run: Run, limits: tuple[float, float] | None = None) -> Figure:
    """Draw how far the learned multipliers of each role spread, rows and columns apart."""
    groups = multiplier_quantiles(run.last("weights"))
    keys = sorted(groups, key=lambda key: (_rank(key[0]), list(_AXES).index(key[1])))
    roles = list(dict.fromkeys(role for role, _ in keys))
    height = 66 + 12 * max(1, len(roles)) + 13 * len(keys)
    left = 20 + 6.8 * max((len(short(role)) for role in roles), default=0)
    with canvas("", height=height + 18, left=left) as (figure, axes):
        low, high = limits or multiplier_limits([run])
        axes.axvline(1.0, color=LIGHT["ink"], lw=1.2)
        y, centres, previous = 0.0, {}, None
        for role, axis in keys:
            y += 12 / 13 + 1 if role != previous and previous is not None else 1
            previous = role
            centres.setdefault(role, []).append(y)
            ink = LIGHT[_AXES[axis][1]]
            quantiles = pool_quantiles(groups[role, axis])
            ends = [max(q, low) for q in quantiles]
            for (first, last), width in zip(((0, 6), (1, 5), (2, 4)), (1.2, 3.2, 7.0), strict=True):
                axes.plot(
                    [ends[first], ends[last]], [y, y], color=ink, lw=width, solid_capstyle="butt"
                )
            axes.plot(
                [ends[3]], [y], ls="", marker="o", ms=5, mew=1.8, color=ink, mfc=LIGHT["page"]
            )
            if quantiles[0] <= 0:
                axes.plot([low], [y], ls="", marker="<", ms=7, color=ink, clip_on=False)
        axes.set(xscale="log", xlim=(low, high), ylim=(y + 1, 0))
        axes.set_yticks([statistics.mean(c) for c in centres.values()], list(map(short, centres)))
        axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("multiplier")
        plain_numbers(axes, "x")
        keys_of_bars = [
            Line2D([], [], color=LIGHT[ink], lw=5, label=text)
            for axis, (text, ink) in _AXES.items()
            if any(axis == key[1] for key in keys)
        ]
        figure.legend(
            handles=keys_of_bars,
            loc="upper left",
            ncols=2,
            columnspacing=1.2,
            handlelength=1.2,
            borderaxespad=0.2,
        )
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
    first = role.partition("/")[0]
    return (_ORDER.index(first) if first in _ORDER else len(_ORDER)), role


def _look(role: str) -> tuple[str, str]:
    """Return the colour and the marker of a role, of the first of a fused one; else grey."""
    first = role.partition("/")[0]
    for name, roles in _PARTS.items():
        if first in roles:
            return LIGHT[name], _MARKERS[roles.index(first)]
    return LIGHT["muted"], "X"


def _handle(role: str) -> Line2D:
    ink, marker = _look(role)
    return Line2D([], [], ls="", color=ink, marker=marker, mew=0, ms=6.5, label=short(role, 18))

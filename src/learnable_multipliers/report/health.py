"""Figures of a run's health over its steps: noise, what is trapped, multipliers, drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from learnable_multipliers.report.comparison import multiplier_quantiles
from learnable_multipliers.report.matrices import pool_quantiles
from learnable_multipliers.report.records import number
from learnable_multipliers.report.theme import (
    LIGHT,
    canvas,
    compact,
    label_ends,
    plain_numbers,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from learnable_multipliers.report.records import Run

KINDS = {"matrices": "ink", "multipliers": "blue", "vectors": "rust"}
_DRIFT_COLOURS = ("blue", "rust", "teal", "plum", "ochre", "ink")
_DRIFT = "drift/"
_LARGEST = "drift/largest"
_LABEL = 64


def shares_over_steps(run: Run) -> Figure:
    """Draw how many tensors of each kind are trapped (solid) and free (dashed)."""
    with canvas("share of the tensors", height=250, right=max(map(len, KINDS)) + 3) as found:
        figure, axes = found
        ends = []
        for kind, ink in KINDS.items():
            steps, trapped = _series(run, f"trapped/{kind}")
            axes.plot(steps, trapped, color=LIGHT[ink], lw=2.0)
            axes.plot(*_series(run, f"free/{kind}"), color=LIGHT[ink], lw=1.3, ls=(0, (4, 2)))
            ends += [(kind, steps[-1], trapped[-1], LIGHT[ink])] if steps else []
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        _step_axis(axes, run)
        label_ends(axes, ends)
        return figure


def noise_over_steps(run: Run) -> Figure:
    """Draw the noise indicator of each kind of tensor, in the median; 1 is pure noise."""
    with canvas("noise indicator", height=250, right=max(map(len, KINDS)) + 3) as (figure, axes):
        axes.axhline(1.0, color=LIGHT["muted"], lw=1.2, ls=(0, (4, 2)))
        ends, shown = [], [0.5, 2.0]
        for kind, ink in KINDS.items():
            steps, values = _series(run, f"noise/{kind}")
            axes.plot(steps, values, color=LIGHT[ink], lw=2.0)
            ends += [(kind, steps[-1], values[-1], LIGHT[ink])] if steps else []
            shown += [value for value in values if value > 0]
        axes.set(yscale="log", ylim=(min(shown) / 1.2, max(shown) * 1.2))
        _step_axis(axes, run)
        plain_numbers(axes, "y")
        axes.text(0.02, 1.06, "pure noise", transform=axes.get_yaxis_transform(),
                  color=LIGHT["muted"], style="italic", va="bottom")  # fmt: skip
        label_ends(axes, ends)
        return figure


def multipliers_over_steps(run: Run) -> Figure:
    """Draw the range of all multipliers: the extremes, the middle 90%, the middle half."""
    steps, rows = [], []
    for record in run.of("weights"):
        matrices = [m for group in multiplier_quantiles(record).values() for m in group]
        if matrices:
            steps.append(int(record["step"]))
            rows.append(pool_quantiles(matrices))
    with canvas("multipliers", height=250) as (figure, axes):
        axes.axhline(1.0, color=LIGHT["ink"], lw=1.2)
        positive = [value for row in rows for value in row if value > 0]
        low, high = min([0.8, *positive]) / 1.1, max([1.25, *positive]) * 1.1
        low = max(low, high / 1e5)
        bands = [[max(row[i], low) for row in rows] for i in range(7)]
        for (first, last), alpha in zip(((0, 6), (1, 5), (2, 4)), (0.15, 0.25, 0.4), strict=True):
            axes.fill_between(
                steps, bands[first], bands[last], color=LIGHT["blue"], alpha=alpha, lw=0
            )
        axes.plot(steps, bands[3], color=LIGHT["blue"], lw=2.0)
        axes.set(yscale="log", ylim=(low, high))
        _step_axis(axes, run)
        plain_numbers(axes, "y")
        return figure


def drift_over_steps(run: Run) -> Figure:
    """Draw how far scales have drifted along each kind of symmetry, as a factor."""
    symmetries = drifting(run)
    # Those that drift most have a colour, the others share a grey.
    named = symmetries[: len(_DRIFT_COLOURS)]
    bottom = 50 + 16 * (len(named) + (len(symmetries) > len(named)))
    with canvas("drift, as a factor", height=230 + bottom, bottom=bottom) as (figure, axes):
        handles = []
        for index, words in enumerate(symmetries):
            ink = LIGHT[_DRIFT_COLOURS[index]] if words in named else LIGHT["muted"]
            steps, logs = _series(run, _DRIFT + words)
            width = 2.0 if words in named else 0.9
            axes.plot(steps, [math.exp(value) for value in logs], color=ink, lw=width)
            if words in named:
                # Without what kind it is.
                label = short(words.rpartition(" (")[0] or words, _LABEL)
                handles.append(Line2D([], [], color=ink, lw=3, label=label))
        if len(symmetries) > len(named):
            rest = f"{len(symmetries) - len(named)} others"
            handles.append(Line2D([], [], color=LIGHT["muted"], lw=1.5, label=rest))
        axes.set_ylim(bottom=1.0)
        if axes.get_ylim()[1] < 1.1:
            axes.set_ylim(1.0, 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        _step_axis(axes, run)
        figure.legend(handles=handles, loc="lower left", ncols=1, labelspacing=0.25)
        return figure


def drifting(run: Run) -> list[str]:
    """Return the symmetries of a run in words, those it has drifted along most first."""
    last = run.last("health") or {}
    found = [key for key in last if key.startswith(_DRIFT) and key != _LARGEST]
    found.sort(key=lambda key: -number(last[key]))
    return [key.removeprefix(_DRIFT) for key in found]


def alarms(run: Run) -> list[str]:
    """Return what the last look at a run warned of."""
    return [str(text) for text in (run.last("health") or {}).get("alarms", [])]


def _series(run: Run, key: str) -> tuple[list[float], list[float]]:
    """Return the steps at which a number was recorded, and the number."""
    found = zip(*run.series("health", key, by="step"), strict=True)
    pairs = [(step, value) for step, value in found if math.isfinite(value)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _step_axis(axes: Axes, run: Run) -> None:
    steps: Sequence[float] = [int(record["step"]) for record in run.of("health")]
    axes.set_xlim(0, max([1, *steps]))
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(compact))

"""Plots of a run's health over its steps: noise, what is trapped, multipliers, drift."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from learnable_multipliers import _formats
from learnable_multipliers.report.comparison import multiplier_quantiles
from learnable_multipliers.report.matrices import pool_quantiles
from learnable_multipliers.report.records import number
from learnable_multipliers.report.style import (
    COLOURS,
    RUN_COLOURS,
    count_axis,
    legend,
    log_axis,
    plot,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from learnable_multipliers.report.records import Run

_KINDS = {"matrices": "ink", "multipliers": "blue", "vectors": "rust"}
_DRIFT_COLOURS = [*RUN_COLOURS[1:], RUN_COLOURS[0]]


def shares_over_steps(run: Run) -> Figure:
    """Draw how many tensors of each kind are trapped (solid) and free (dashed)."""
    with plot("share of the tensors") as (figure, axes):
        for kind, name in _KINDS.items():
            axes.plot(*_series(run, f"trapped/{kind}"), color=COLOURS[name], label=kind)
            axes.plot(*_series(run, f"free/{kind}"), color=COLOURS[name], lw=1.3, ls="dashed")
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        _step_axis(axes, run)
        legend(figure)
        return figure


def noise_over_steps(run: Run) -> Figure:
    """Draw the noise indicator of each kind of tensor, in the median; 1 is pure noise."""
    with plot("noise indicator") as (figure, axes):
        axes.axhline(1.0, color=COLOURS["muted"], lw=1.2, ls="dashed")
        shown = [0.5, 2.0]
        for kind, name in _KINDS.items():
            steps, values = _series(run, f"noise/{kind}")
            axes.plot(steps, values, color=COLOURS[name], label=kind)
            shown += [value for value in values if value > 0]
        axes.text(0.02, 1.06, "pure noise", transform=axes.get_yaxis_transform(),
                  color=COLOURS["muted"], style="italic", va="bottom")  # fmt: skip
        _step_axis(axes, run)
        log_axis(axes, "y", min(shown) / 1.2, max(shown) * 1.2)
        legend(figure)
        return figure


def multipliers_over_steps(run: Run) -> Figure:
    """Draw the range of all multipliers: the extremes, the middle 90%, the middle half."""
    pooled: dict[int, list[float]] = {}
    for record in run.of("weights"):
        matrices = [m for group in multiplier_quantiles(record).values() for m in group]
        if matrices:
            pooled[int(record["step"])] = pool_quantiles(matrices)
    values = [value for row in pooled.values() for value in row if value > 0]
    high = max([1.25, *values]) * 1.1
    low = max(min([0.8, *values]) / 1.1, high / 1e5)
    steps, bands = list(pooled), np.maximum(list(pooled.values()), low).T
    with plot("multipliers", 250) as (figure, axes):
        axes.axhline(1.0, color=COLOURS["ink"], lw=1.2)
        for outer, alpha in enumerate((0.15, 0.25, 0.4)):
            axes.fill_between(steps, bands[outer], bands[6 - outer], color=COLOURS["blue"],
                              alpha=alpha, lw=0)  # fmt: skip
        axes.plot(steps, bands[3], color=COLOURS["blue"])
        _step_axis(axes, run)
        log_axis(axes, "y", low, high)
        return figure


def drift_over_steps(run: Run) -> Figure:
    """Draw how far scales have drifted along each kind of symmetry, as a factor."""
    symmetries = drifting(run)
    # Those that drift most have a colour, the others share a grey.
    named = len(_DRIFT_COLOURS)
    with plot("drift, as a factor", 270 + 16 * min(len(symmetries), named + 1)) as (figure, axes):
        for index, words in enumerate(symmetries):
            steps, logs = _series(run, f"drift/{words}")
            factors = [math.exp(value) for value in logs]
            if index < named:
                # Without what kind it is.
                label = short(words.rpartition(" (")[0] or words, 60)
                axes.plot(steps, factors, color=_DRIFT_COLOURS[index], label=label)
            else:
                label = f"{len(symmetries) - named} others" if index == named else None
                axes.plot(steps, factors, color=COLOURS["muted"], lw=0.9, label=label)
        axes.set_ylim(1.0, max(1.1, axes.get_ylim()[1]))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _formats.number(value)))
        _step_axis(axes, run)
        legend(figure)
        return figure


def drifting(run: Run) -> list[str]:
    """Return the symmetries of a run in words, those it has drifted along most first."""
    last = run.last("health") or {}
    found = [key for key in last if key.startswith("drift/") and key != "drift/largest"]
    found.sort(key=lambda key: -number(last[key]))
    return [key.removeprefix("drift/") for key in found]


def alarms(run: Run) -> list[str]:
    """Return what the last record of a run's health warns of."""
    return [str(text) for text in (run.last("health") or {}).get("alarms", [])]


def _series(run: Run, key: str) -> tuple[list[float], list[float]]:
    """Return the steps at which a number was recorded, and the number."""
    found = zip(*run.series("health", key, by="step"), strict=True)
    pairs = [(step, value) for step, value in found if math.isfinite(value)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _step_axis(axes: Axes, run: Run) -> None:
    count_axis(axes, "step", max([1, *(int(record["step"]) for record in run.of("health"))]))

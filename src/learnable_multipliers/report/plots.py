"""Plots of runs side by side: loss, gap to the baseline, learning rate.

Every run keeps its colour through all of them; the first is the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, MaxNLocator

from learnable_multipliers import _formats
from learnable_multipliers.report.comparison import loss_gap, tokens_seen
from learnable_multipliers.report.style import (
    COLOURS,
    count_axis,
    legend,
    plot,
    run_look,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from learnable_multipliers.report.records import Run

MAX_POINTS = 200
"""A longer training curve is drawn as this many means of neighbouring records."""

EARLY = 0.2
"""Part of the tokens, at the start, that does not widen the axis of losses."""


def loss_curves(runs: Sequence[Run]) -> Figure:
    """Draw validation loss (bold) and training loss (thin) over tokens."""
    with plot("loss, nats per token", 290) as (figure, axes):
        # Many noisy curves would hide the ones that matter.
        alpha = 0.45 if len(runs) <= 3 else 0.2
        for index, run in enumerate(runs):
            colour, line = run_look(index)
            train = thin_out(*run.series("train", "loss"))
            # Before any evaluation, the name goes to the training loss.
            name, thin_name = short(run.name), None
            if not run.of("eval"):
                name, thin_name = None, name
            axes.plot(*train, color=colour, lw=0.9, alpha=alpha, label=thin_name)
            axes.plot(*run.series("eval", "loss"), color=colour, ls=line, label=name)
        _fit(axes, runs)
        legend(figure)
        return figure


def gap_curves(runs: Sequence[Run]) -> Figure:
    """Draw validation loss minus that of the first run, where both were evaluated."""
    with plot(f"loss minus loss of {short(runs[0].name)}", 290) as (figure, axes):
        axes.axhline(0.0, color=COLOURS["ink"], lw=1.2)
        for index, run in enumerate(runs[1:], start=1):
            colour, line = run_look(index)
            gap = loss_gap(run, runs[0])
            axes.plot(*gap, color=colour, ls=line, marker="o", ms=3, label=short(run.name))
        _fit(axes, runs, margin=0.22, also=[0.0])
        signed = FuncFormatter(lambda value, _: f"{value:+.4g}" if value else "0")
        axes.yaxis.set_major_formatter(signed)
        for text, height, align in (("higher loss", 0.98, "top"), ("lower loss", 0.02, "bottom")):
            axes.text(0.98, height, text, transform=axes.transAxes, ha="right", va=align,
                      color=COLOURS["muted"], style="italic")  # fmt: skip
        legend(figure)
        return figure


def learning_rates(runs: Sequence[Run]) -> Figure:
    """Draw the learning rate over tokens; runs with the same schedule share a line."""
    schedules: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    for index, run in enumerate(runs):
        schedules.setdefault(tuple(map(tuple, run.series("train", "lr"))), []).append(index)
    with plot("learning rate", 210) as (figure, axes):
        for series, sharing in schedules.items():
            name = short(runs[sharing[0]].name)
            if len(sharing) > 1:
                name = "all runs" if len(sharing) == len(runs) else f"{name} +{len(sharing) - 1}"
            colour, line = run_look(sharing[0])
            axes.plot(*series, color=colour, ls=line, label=name)
        _token_axis(axes, runs)
        axes.set_ylim(0.0, 1.08 * axes.get_ylim()[1])
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 4, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _formats.number(value)))
        legend(figure)
        return figure


def thin_out(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most MAX_POINTS points: the means of as many groups of neighbours."""
    size = math.ceil(len(x) / MAX_POINTS) or 1
    pieces = [slice(start, start + size) for start in range(0, len(x), size)]
    return [_mean(x[piece]) for piece in pieces], [_mean(y[piece]) for piece in pieces]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _token_axis(axes: Axes, runs: Sequence[Run]) -> float:
    """Show all tokens, and return the last one."""
    last = tokens_seen(runs)
    last = last if last > 0 else 1.0
    count_axis(axes, "tokens seen", last)
    return last


def _fit(axes: Axes, runs: Sequence[Run], margin: float = 0.06, also: Sequence[float] = ()) -> None:
    """Show all tokens, and of the losses those after the first, steep part."""
    last = _token_axis(axes, runs)
    points = [(x, y) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)]
    shown = [float(y) for x, y in points if x >= EARLY * last and math.isfinite(y)]
    shown += also
    if shown:
        pad = margin * (max(shown) - min(shown)) or 0.01 * abs(shown[0]) or 0.01
        axes.set_ylim(min(shown) - pad, max(shown) + pad)

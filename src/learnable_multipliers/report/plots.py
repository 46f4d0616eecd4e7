"""Figures of runs side by side: loss, gap to the baseline, learning rate.

Pure functions from runs to figures: no pyplot, nothing saved, nothing trained. Every run keeps
its colour through all of them; the first is the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, MaxNLocator

from learnable_multipliers.report.comparison import loss_gap
from learnable_multipliers.report.theme import (
    LIGHT,
    canvas,
    colour,
    compact,
    dashes,
    label_ends,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from learnable_multipliers.report.records import Run

MAX_POINTS = 200
"""A longer training curve is drawn as this many means of neighbouring records."""

EARLY = 0.2
"""Part of the tokens, at the start, that does not widen the axis of losses."""


def loss_curves(runs: Sequence[Run], reference: tuple[str, float] | None = None) -> Figure:
    """Draw validation loss (bold) and training loss (thin) over tokens, and a reference level."""
    names = [short(run.name) for run in runs]
    with canvas("loss, nats per token", right=_room(names)) as (figure, axes):
        # Many noisy curves would hide the ones that matter.
        alpha = 0.45 if len(runs) <= 3 else 0.2
        for index, run in enumerate(runs):
            axes.plot(
                *thin_out(*run.series("train", "loss")), color=colour(index), lw=0.9, alpha=alpha
            )
            axes.plot(*run.series("eval", "loss"), color=colour(index), lw=2.0, ls=dashes(index))
        shown = [value for line in axes.lines for value in _after_start(line, runs)]
        if reference is not None:
            axes.axhline(reference[1], color=LIGHT["muted"], lw=1.2, ls=(0, (2, 2)))
            shown.append(reference[1])
        _token_axis(axes, runs)
        _fit(axes, shown)
        if reference is not None:
            # On the left, under the steep start of the curves, the figure is empty.
            low, high = axes.get_ylim()
            above = reference[1] < low + 0.25 * (high - low)
            axes.annotate(
                short(reference[0], 24),
                xy=(0, reference[1]),
                xytext=(4, 4 if above else -4),
                textcoords="offset points",
                va="bottom" if above else "top",
                color=LIGHT["muted"],
            )
        label_ends(axes, _run_ends(runs, [_labelled(run) for run in runs]))
        return figure


def gap_curves(runs: Sequence[Run]) -> Figure:
    """Draw validation loss minus that of the first run, where both were evaluated."""
    baseline, others = runs[0], runs[1:]
    names = [short(run.name) for run in others]
    heading = f"loss minus loss of {short(baseline.name)}"
    with canvas(heading, left=58, right=_room(names)) as (figure, axes):
        axes.axhline(0.0, color=LIGHT["ink"], lw=1.2)
        gaps = [loss_gap(run, baseline) for run in others]
        for index, gap in enumerate(gaps, start=1):
            axes.plot(*gap, color=colour(index), lw=2.0, ls=dashes(index), marker="o", ms=3)
        _token_axis(axes, runs)
        shown = [value for line in axes.lines[1:] for value in _after_start(line, runs)]
        _fit(axes, [*shown, 0.0], margin=0.22)
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:+.4g}" if value else "0")
        )
        for text, height, align in (("higher loss", 0.98, "top"), ("lower loss", 0.02, "bottom")):
            axes.text(0.98, height, text, transform=axes.transAxes, ha="right", va=align,
                      color=LIGHT["muted"], style="italic")  # fmt: skip
        label_ends(axes, _run_ends(others, gaps, first=1))
        return figure


def learning_rates(runs: Sequence[Run]) -> Figure:
    """Draw the learning rate over tokens; runs with the same schedule share a line."""
    schedules: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    for index, run in enumerate(runs):
        series = run.series("train", "lr")
        schedules.setdefault(tuple(map(tuple, series)), []).append(index)
    labels = [
        "all runs" if len(sharing) == len(runs) > 1 else short(runs[sharing[0]].name)
        for sharing in schedules.values()
    ]
    with canvas("learning rate", height=180, left=64, right=_room(labels)) as (figure, axes):
        ends = []
        for label, (series, sharing) in zip(labels, schedules.items(), strict=True):
            ink, (x, y) = colour(sharing[0]), series
            axes.plot(x, y, color=ink, lw=2.0, ls=dashes(sharing[0]))
            more = f" +{len(sharing) - 1}" if 1 < len(sharing) < len(runs) else ""
            ends += [(label + more, x[-1], y[-1], ink)] if x else []
        _token_axis(axes, runs)
        axes.set_ylim(0.0, 1.08 * axes.get_ylim()[1])
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 4, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        label_ends(axes, ends)
        return figure


def thin_out(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most MAX_POINTS points: the means of as many runs of neighbours."""
    size = math.ceil(len(x) / MAX_POINTS) or 1
    pieces = [slice(start, start + size) for start in range(0, len(x), size)]
    return [_mean(x[piece]) for piece in pieces], [_mean(y[piece]) for piece in pieces]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _room(names: Sequence[str]) -> int:
    """Return the number of characters to keep free for labels beside the axes."""
    return max((len(name) for name in names), default=0) + 3


def _run_ends(
    runs: Sequence[Run], series: Sequence[tuple[list[float], list[float]]], first: int = 0
) -> list[tuple[str, float, float, str]]:
    """Return the label of each run at the last finite point of its series."""
    ends = []
    for index, (run, (x, y)) in enumerate(zip(runs, series, strict=True), start=first):
        finite = [point for point in zip(x, y, strict=True) if math.isfinite(point[1])]
        ends += [(short(run.name), *finite[-1], colour(index))] if finite else []
    return ends


def _labelled(run: Run) -> tuple[list[float], list[float]]:
    """Return the curve that bears the name of a run: that of training before any evaluation."""
    return run.series("eval" if run.of("eval") else "train", "loss")


def _last_token(runs: Sequence[Run]) -> float:
    tokens = [t for run in runs for kind in ("train", "eval") for t in run.series(kind, "loss")[0]]
    return max(filter(math.isfinite, tokens), default=1.0) or 1.0


def _token_axis(axes: Axes, runs: Sequence[Run]) -> None:
    axes.set_xlim(0.0, _last_token(runs))
    axes.set_xlabel("tokens seen")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(compact))


def _after_start(line: Line2D, runs: Sequence[Run]) -> list[float]:
    """Return what a line shows once the first, steep part is over."""
    start = EARLY * _last_token(runs)
    return [float(y) for x, y in line.get_xydata() if x >= start]  # type: ignore[union-attr]


def _fit(axes: Axes, shown: Sequence[float], margin: float = 0.06) -> None:
    finite = [value for value in shown if math.isfinite(value)]
    if finite:
        pad = margin * (max(finite) - min(finite)) or 0.01 * abs(finite[0]) or 0.01
        axes.set_ylim(min(finite) - pad, max(finite) + pad)

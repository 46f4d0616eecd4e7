"""Plots of experiments: what a page shows of one, and the drawings that experiments share.

A line or mark is the mean over seeds; the band or bar around it goes from the lowest seed to the
highest. A run that diverged is marked where it ended, or at the edge, never left out.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Any, Literal

from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from learnable_multipliers import _formats
from learnable_multipliers.experiments import readings
from learnable_multipliers.experiments.readings import Curve
from learnable_multipliers.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = 0.18
"""Opacity of the spread between seeds."""


@dataclass(frozen=True)
class Plot:
    """A figure with what a reader must know of it."""

    title: str
    """A few words, without a full stop."""
    caption: str
    """What is drawn, and what the paper expects to see; plain text."""
    figure: Figure

    def __post_init__(self) -> None:
        for axes in self.figure.axes:
            if not axes.get_xlabel() or not (axes.get_ylabel() or self.figure.get_suptitle()):
                raise ValueError(
                    f"plot {self.title!r} has an axis without a label: draw it in `canvas`, or set "
                    "both labels"
                )

    @property
    def is_empty(self) -> bool:
        """Whether the records so far gave nothing to draw; levels to compare with do not count."""
        return not any(math.isfinite(axes.dataLim.x0) for axes in self.figure.axes)

    def svg(self, name: str) -> str:
        """Return the figure as an SVG element; equal figures and names give equal bytes."""
        return style.svg(self.figure, name)


@dataclass(frozen=True)
class Table:
    """Numbers with what a reader must know of them."""

    title: str
    caption: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    says: tuple[str, ...] = ()
    """What follows from the numbers, as sentences above them."""

    def markdown(self) -> list[str]:
        """Return the lines of a Markdown table."""
        rows = [self.header, ("---",) * len(self.header), *self.rows]
        return [f"| {' | '.join(row)} |" for row in rows]


@contextmanager
def canvas(
    plots: list[Plot], title: str, caption: str, *, x: str, y: str, height: float = 270.0
) -> Iterator[Axes]:
    """Yield axes to draw on, then add the legend and append the plot; labels carry the unit."""
    with style.plot(y, height) as (figure, axes):
        axes.set_xlabel(x)
        yield axes
    plots.append(Plot(title, caption, figure))


def curves(
    axes: Axes, arms: Mapping[str, Sequence[Curve]], *, early: float = 0.0, first: int = 0
) -> None:
    """Draw a curve for each arm over steps or tokens: the mean of its seeds inside their range.

    A seed that ends before the others, as one that diverged does, has a cross at its end.

    Args:
        arms: Name in the legend -> the curve of each seed.
        early: Part of the x axis, at the start, that does not widen the y axis.
        first: Index of the first arm's colour, for arms drawn in several calls.
    """
    late: list[float] = []
    last = max((x for seeds in arms.values() for seed in seeds for x in seed), default=0.0)
    for index, (name, seeds) in enumerate(arms.items(), first):
        colour, line = style.run_look(index)
        finite = [{x: y for x, y in seed.items() if math.isfinite(y)} for seed in seeds]
        at = _pooled(finite)
        if not at:
            continue
        means = [fmean(ys) for ys in at.values()]
        axes.plot(list(at), means, color=colour, linestyle=line, label=name)
        if len(seeds) > 1:
            lows, highs = [min(ys) for ys in at.values()], [max(ys) for ys in at.values()]
            axes.fill_between(list(at), lows, highs, color=colour, alpha=BAND, linewidth=0)
        for seed in finite:
            if seed and max(seed) < max(at):
                axes.plot(max(seed), seed[max(seed)], "x", color=colour, markersize=8)
        late += [y for x, ys in at.items() if x >= early * last for y in ys]
    axes.set_xlim(0, style.last_drawn(axes))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: _formats.count(value))
    if early and late:
        margin = 0.08 * (max(late) - min(late)) or 0.05 * abs(max(late)) or 1.0
        axes.set_ylim(min(late) - margin, max(late) + margin)


def scan(
    axes: Axes,
    arms: Mapping[str, Mapping[float, Sequence[float]]],
    *,
    log_y: bool = False,
    first: int = 0,
) -> None:
    """Draw a statistic against a swept positive number, a scale or a width, on a log axis.

    Args:
        arms: Name in the legend -> swept number -> the value of each seed.
        first: Index of the first arm's colour, for arms drawn in several calls.
    """
    for index, (name, points) in enumerate(arms.items(), first):
        colour, line = style.run_look(index)
        _marks(axes, dict(sorted(points.items())), colour, label=name, linestyle=line, markersize=5)
    log_limits(axes, "xy" if log_y else "x")
    _tick_at(axes, {x for points in arms.values() for x in points})


def categories(axes: Axes, arms: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw a statistic of named settings, with the arms of a setting side by side.

    Args:
        arms: Name in the legend -> setting -> the value of each seed.
    """
    names = list(dict.fromkeys(name for settings in arms.values() for name in settings))
    for index, (arm, settings) in enumerate(arms.items()):
        colour, _ = style.run_look(index)
        shift = 0.16 * (index - (len(arms) - 1) / 2)
        at = {names.index(name) + shift: values for name, values in settings.items()}
        _marks(axes, at, colour, label=arm, linestyle="", markersize=6)
    room = 56 // max(1, len(names))
    lines = (textwrap.wrap(name, max(6, room), break_long_words=False) for name in names)
    axes.set_xticks(range(len(names)), ["\n".join(words) for words in lines])
    axes.set_xlim(-0.5, max(1, len(names)) - 0.5)


def power_laws(axes: Axes, arms: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw points (x, y) of each arm on log axes, with the power law fitted to them.

    The exponent is written in the legend. Points that are not positive cannot be drawn.
    """
    for index, (name, points) in enumerate(arms.items()):
        colour, line = style.run_look(index)
        points = [(x, y) for x, y in points if 0 < x < math.inf and 0 < y < math.inf]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), "o", markersize=5, color=colour, alpha=0.6)
        exponents = readings.exponents([(x,) for x, _ in points], [y for _, y in points])
        if exponents is None:
            axes.lines[-1].set_label(name)
            continue
        # The line goes through the mean of the logarithms.
        middle = [geometric_mean(values) for values in zip(*points, strict=True)]
        ends = [min(x for x, _ in points), max(x for x, _ in points)]
        fitted = [middle[1] * (x / middle[0]) ** exponents[0] for x in ends]
        axes.plot(ends, fitted, color=colour, linestyle=line, label=f"{name}: {exponents[0]:+.2f}")
    log_limits(axes, "xy")
    _tick_at(axes, {x for points in arms.values() for x, _ in points})


def log_limits(axes: Axes, which: Literal["x", "y", "xy"]) -> None:
    """Make axes logarithmic around all that was drawn on them, with plain numbers."""
    drawn = axes.dataLim
    ends: dict[Literal["x", "y"], tuple[float, float]] = {
        "x": (float(drawn.x0), float(drawn.x1)),
        "y": (float(drawn.y0), float(drawn.y1)),
    }
    for axis, (low, high) in ends.items():
        if axis in which and 0 < low <= high < math.inf:
            margin = max(1.05, (high / low) ** 0.06)
            style.log_axis(axes, axis, low / margin, high * margin)


def show_zero(axes: Axes) -> None:
    """Extend the y axis a little beyond zero, on the side where nothing is drawn."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.1 * high), max(high, -0.1 * low))


def level(axes: Axes, y: float, text: str) -> None:
    """Draw a dashed horizontal line at a number that the reader compares with, and name it."""
    axes.axhline(y, color=style.COLOURS["muted"], linewidth=1.2, linestyle=(0, (4, 3)))
    style.note(axes, 0.99, y, text, transform=axes.get_yaxis_transform(), ha="right", va="bottom")


def ratio(value: float) -> str:
    """Return a number as a scale is written: 8, 1/64, 0.7."""
    inverse = Fraction(1 / value).limit_denominator(1000) if 0 < value < 1 else Fraction(1, 2)
    return f"1/{inverse}" if inverse.denominator == 1 else f"{value:g}"


def _marks(axes: Axes, points: Mapping[float, Sequence[float]], colour: str, **look: Any) -> None:
    """Draw the mean of the seeds at each x, with a bar from the lowest to the highest.

    Where a seed is infinite the run diverged: a triangle at the top edge.
    """
    finite = {
        x: kept
        for x, values in points.items()
        if (kept := [value for value in values if math.isfinite(value)])
    }
    means = [fmean(values) for values in finite.values()]
    axes.plot(list(finite), means, marker="o", color=colour, **look)
    lows, highs = [min(v) for v in finite.values()], [max(v) for v in finite.values()]
    axes.vlines(list(finite), lows, highs, color=colour, linewidth=1.5, alpha=0.6)
    for x in (x for x, values in points.items() if not all(map(math.isfinite, values))):
        # In parts of the axes' height: just inside the top, whatever the limits.
        axes.plot(x, 0.98, "^", color=colour, markersize=8, transform=axes.get_xaxis_transform())


def _tick_at(axes: Axes, swept: set[float]) -> None:
    """Label the x axis at the numbers that were swept, if they are few."""
    if 1 < len(swept) <= 9:
        axes.xaxis.set_major_locator(FixedLocator(sorted(swept)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: ratio(value))


def _pooled(seeds: Sequence[Curve]) -> dict[float, list[float]]:
    """Return the values of all seeds at each x, in order."""
    return {
        x: [seed[x] for seed in seeds if x in seed]
        for x in sorted({x for seed in seeds for x in seed})
    }

"""Coordinate descent on a grid: which settings to try next, given the losses so far.

The next trial is a function of the trials before it, so a search that was stopped resumes where it
was, and every arm of a comparison is tuned by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Point = tuple[int, ...]
"""A place on the grid: steps from the start along each axis."""
MIN_GAIN = 5e-4
"""Nats by which a trial must be better to be continued from: about what runs of Muon differ by when
they are repeated. Without it a search follows noise along one axis until its trials are used up."""


@dataclass(frozen=True)
class Axis:
    """One setting: values start, start * ratio, start / ratio and so on."""

    name: str
    start: float
    ratio: float
    minimum: float = 0.0
    maximum: float = math.inf
    """Values below or above are never tried."""

    def value(self, offset: int) -> float:
        """Return the value so many steps from the start, to three digits."""
        return float(f"{self.start * self.ratio**offset:.3g}")


@dataclass(frozen=True)
class Search:
    """Up to `trials` points, each a neighbour of the best before it."""

    axes: tuple[Axis, ...]
    trials: int

    def values(self, point: Point) -> dict[str, float]:
        """Return the settings at a point."""
        return {
            axis.name: axis.value(offset) for axis, offset in zip(self.axes, point, strict=True)
        }

    def next(self, losses: Mapping[Point, float]) -> Point | None:
        """Return the point to try after these, in the order of trials; None at the end.

        Neighbours of the best point are tried axis by axis, up then down; a better one is the best
        from then on. It ends where no neighbour is better.
        """
        if not losses:
            return (0,) * len(self.axes)
        if len(losses) >= self.trials:
            return None
        untried = (p for p in neighbours(best(losses)) if p not in losses)
        return next((p for p in untried if self._is_allowed(p)), None)

    def _is_allowed(self, point: Point) -> bool:
        pairs = zip(self.axes, point, strict=True)
        return all(axis.minimum <= axis.value(offset) <= axis.maximum for axis, offset in pairs)


def best(losses: Mapping[Point, float]) -> Point:
    """Return the best point of trials in their order, each better than the one before it."""
    points = iter(losses)
    best_point = next(points)
    for point in points:
        # A diverged run is infinite or NaN.
        if math.isfinite(losses[point]) and not losses[best_point] - MIN_GAIN <= losses[point]:
            best_point = point
    return best_point


def neighbours(point: Point) -> list[Point]:
    """Return the points one step away, axis by axis."""
    return [moved(point, index, step) for index in range(len(point)) for step in (1, -1)]


def moved(point: Point, index: int, step: int) -> Point:
    """Return a point some steps along an axis."""
    return (*point[:index], point[index] + step, *point[index + 1 :])

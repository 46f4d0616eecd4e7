"""Powers of the width in what a coordinate check measured, beside those a recipe expects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learnable_multipliers.equilibrium import SETTLED
from learnable_multipliers.mup._coordinates import QUANTITIES, Coordinates, Run
from learnable_multipliers.mup._recipes import Recipe


@dataclass(frozen=True)
class Exponent:
    """A least-squares slope in log-log."""

    value: float
    error: float
    """Standard error from the residuals; it takes them for independent."""


@dataclass(frozen=True)
class Comparison:
    """One quantity of one layer: what a recipe expects and what was measured."""

    label: str
    quantity: str
    expected: float
    measured: Exponent

    @property
    def deviation(self) -> float:
        """Measured minus expected."""
        return self.measured.value - self.expected

    def differs(self, tolerance: float = 0.15) -> bool:
        """Return whether it is off by more than `tolerance` and by more than two errors."""
        return abs(self.deviation) > max(tolerance, 2 * self.measured.error)


def fit_exponent(widths: Sequence[float], values: Sequence[float]) -> Exponent:
    """Fit values ~ width^exponent."""
    if len(widths) != len(values) or len(set(widths)) < 2:
        raise ValueError(
            f"a slope needs a value for each of at least two widths, got {len(values)} values for "
            f"widths {list(widths)}"
        )
    x, y = ([math.log(number) for number in numbers] for numbers in (widths, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residual = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    # Two points lie on a line: there are no residuals to estimate an error from.
    error = math.sqrt(residual / (len(x) - 2) / spread) if len(x) > 2 else math.inf
    return Exponent(slope, error)


def exponents(runs: Sequence[Run]) -> dict[str, dict[str, Exponent]]:
    """Return layer -> quantity -> exponent over all runs.

    Slopes of products add up: output = multiplier + fan_in + alignment + weight + input, and
    relative_update = update + update_alignment - weight - alignment.
    """
    widths = [run.width for run in runs]
    result = {}
    for label, rows in _by_label(runs).items():
        if len(rows) != len(runs):
            raise ValueError(
                f"{label} was watched in {len(rows)} of {len(runs)} runs: watch it in all"
            )
        names = ("fan_in", *QUANTITIES)
        result[label] = {
            name: fit_exponent(widths, [getattr(row, name) for row in rows]) for name in names
        }
    return result


def compare(runs: Sequence[Run], recipe: Recipe) -> list[Comparison]:
    """Return every quantity of every layer beside what a recipe expects."""
    expected = recipe.expected
    return [
        Comparison(label, name, expected[name], fits[name])
        for label, fits in exponents(runs).items()
        for name in QUANTITIES
    ]


_HEADINGS = {
    "multiplier": "s",
    "input": "|x|",
    "weight": "|W|",
    "update": "|dW|",
    "output": "|y|",
    "relative_update": "|dy|/|y|",
    "alignment": "alpha",
    "update_alignment": "alpha dy",
}


def table(runs: Sequence[Run], recipe: Recipe, tolerance: float = 0.15) -> str:
    """Return the comparison as text: a row for each layer, `*` where it differs from the recipe.

    -0.36(9) is -0.36 with a standard error of 0.09.
    """
    lines = [("power of width", *(_HEADINGS[name] for name in QUANTITIES))]
    lines.append(("expected", *(f"{recipe.expected[name]:+.2f}" for name in QUANTITIES)))
    comparisons = compare(runs, recipe)
    for start in range(0, len(comparisons), len(QUANTITIES)):
        row = comparisons[start : start + len(QUANTITIES)]
        lines.append((row[0].label, *(_cell(comparison, tolerance) for comparison in row)))
    wide = max(len(line[0]) for line in lines)
    text = [f"{first:{wide}}" + "".join(f" {cell:10}" for cell in cells) for first, *cells in lines]
    early = [
        f"{row.label} at width {run.width} ({row.relaxations:.1f})"
        for run in runs
        for row in run.coordinates
        if row.relaxations < SETTLED
    ]
    if early:
        more = f" and {len(early) - 4} more" if len(early) > 4 else ""
        text.append(
            f"not yet in equilibrium, 2 wd sum(lr) < {SETTLED:g}: {', '.join(early[:4])}{more}"
        )
    losses = ", ".join(f"{run.loss:.3f} ({run.width})" for run in runs)
    return "\n".join([*(line.rstrip() for line in text), f"loss (width): {losses}"])


def _cell(comparison: Comparison, tolerance: float) -> str:
    value, error = comparison.measured.value, comparison.measured.error
    digits = f"{100 * error:.0f}" if math.isfinite(error) else "?"
    # No negative zero.
    shown = f"{round(value, 2) + 0.0:+.2f}({digits})"
    return f"{shown}{'*' if comparison.differs(tolerance) else ''}"


def _by_label(runs: Sequence[Run]) -> dict[str, list[Coordinates]]:
    rows: dict[str, list[Coordinates]] = {}
    for run in runs:
        for row in run.coordinates:
            rows.setdefault(row.label, []).append(row)
    return rows

"""One HTML file about a diagnosis: which tensors noise and decay hold, and how noisy gradients are.

From the plain data that `lrm diagnose --json` prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from learnable_multipliers._atomic import write_output
from learnable_multipliers.report import figures, style
from learnable_multipliers.report.page import TEMPLATES
from learnable_multipliers.report.records import Record
from learnable_multipliers.report.style import COLOURS, legend, log_axis, note, plot, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_diagnosis(
    path: Path, title: str, said: Sequence[str], table: Sequence[Sequence[str]], diagnosis: Record
) -> None:
    """Write the page.

    Args:
        said: The summary in a line, then notes and assumptions.
        table: Headings, then the cells of each line.
        diagnosis: Readings as plain data.
    """
    readings = diagnosis["readings"]
    drawn = {
        "ratios": (rms_by_role(readings), "RMS over the rms that noise gives"),
        "noise": (noise_by_role(readings), "Noise indicators"),
    }
    plots = {key: (style.svg(figure, key), name) for key, (figure, name) in drawn.items()}
    text = TEMPLATES.get_template("diagnosis.html.j2").render(
        title=title, said=said, table=table, plots=plots
    )
    write_output(path, text.encode("utf-8", errors="replace"))


def rms_by_role(readings: Sequence[Record]) -> Figure:
    """Draw measured over predicted rms of every tensor, a line for each role."""
    ratios: dict[str, list[tuple[float, str]]] = {}
    for reading in readings:
        if reading["log_ratio"] is not None:
            pair = math.exp(reading["log_ratio"]), reading["verdict"]
            ratios.setdefault(reading["role"], []).append(pair)
    values = [ratio for pairs in ratios.values() for ratio, _ in pairs]
    with plot("", 110 + 22 * max(len(ratios), 1)) as (figure, axes):
        low, high = math.exp(-figures.WITHIN), math.exp(figures.WITHIN)
        axes.axvspan(low, high, color=COLOURS["blue"], alpha=0.1, lw=0)
        axes.axvline(1.0, color=COLOURS["muted"], lw=1.2, ls="dashed")
        for y, pairs in enumerate(ratios.values()):
            for ratio, verdict in pairs:
                fill = figures.VERDICTS[verdict]
                axes.plot(ratio, y, marker="o", color=COLOURS["ink"], fillstyle=fill, alpha=0.8)
        _roles(axes, list(ratios))
        axes.set_xlabel("rms over the rms that noise gives")
        log_axis(axes, "x", min([0.5, *values]) / 1.15, max([2.0, *values]) * 1.15)
        if not ratios:
            note(axes, 0.5, 0.5, "no tensor has a prediction", ha="center")
        legend(figure, figures.verdict_handles())
        return figure


def noise_by_role(readings: Sequence[Record]) -> Figure:
    """Draw the noise indicator of every tensor, a line for each role."""
    indicators: dict[str, list[float]] = {}
    for reading in readings:
        if reading["indicator"]:
            indicators.setdefault(reading["role"], []).append(reading["indicator"])
    every = [value for values in indicators.values() for value in values]
    with plot("", 110 + 22 * max(len(indicators), 1)) as (figure, axes):
        axes.axvline(1.0, color=COLOURS["muted"], lw=1.2, ls="dashed")
        for y, values in enumerate(indicators.values()):
            axes.plot(values, [y] * len(values), "o", color=COLOURS["ink"], alpha=0.8)
        _roles(axes, list(indicators))
        axes.set_xlabel("noise indicator")
        log_axis(axes, "x", min([0.5, *every]) / 1.2, max([2.0, *every]) * 1.2)
        return figure


def _roles(axes: Axes, roles: Sequence[str]) -> None:
    axes.set_yticks(range(len(roles)), [short(role, 24) for role in roles])
    axes.set_ylim(len(roles) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)

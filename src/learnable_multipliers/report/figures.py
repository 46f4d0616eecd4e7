"""Figures that commands write to a file: a random walk, a diagnosis, the symmetries of a model.

From the plain data that the commands print as JSON.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from matplotlib.lines import Line2D

from learnable_multipliers._atomic import write_output
from learnable_multipliers.report.style import COLOURS, legend, log_axis, look, plot, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from learnable_multipliers.report.records import Record

_FORMATS = (".svg", ".png", ".pdf")
_KINDS = {
    "matrix": ("matrices", COLOURS["ink"], "o"),
    "multiplier": ("multipliers", COLOURS["blue"], "s"),
    "vector": ("vectors", COLOURS["rust"], "^"),
}
VERDICTS: dict[str, Literal["full", "none", "left"]] = {
    "trapped": "full",
    "free": "none",
    "open": "left",
}
WITHIN = 0.2
"""|log ratio| that counts as the rms of noise, as in the verdicts."""


def random_walk(title: str, steps: Sequence[Mapping[str, float | None]]) -> Figure:
    """Draw the rms of a weight in training on noise: simulated, expected, and the equilibrium."""
    looks = {
        "simulated": ("ink", 2.0, "solid"),
        "expected": ("blue", 1.6, "solid"),
        "equilibrium": ("rust", 1.3, "dashed"),
    }
    with plot(f"rms, {title}", 300, x="step") as (figure, axes):
        x = [float(row["step"] or 0) for row in steps]
        for name, (colour, width, line) in looks.items():
            y = [math.nan if (value := row[name]) is None else value for row in steps]
            axes.plot(x, y, color=COLOURS[colour], lw=width, ls=line, label=name)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        return figure


def diagnosis(title: str, readings: Sequence[Record]) -> Figure:
    """Draw each tensor by its rms over that of noise, and by how noisy its gradients are."""
    shown = [r for r in readings if r["log_ratio"] is not None and r["indicator"] is not None]
    across = [math.exp(r["log_ratio"]) for r in shown]
    up = [r["indicator"] for r in shown if r["indicator"] > 0]
    with plot(f"noise indicator, {title}", 350) as (figure, axes):
        axes.axvline(1.0, color=COLOURS["muted"], lw=1.2, ls="dashed")
        axes.axhline(1.0, color=COLOURS["muted"], lw=1.2, ls="dashed")
        for reading, x in zip(shown, across, strict=True):
            _, colour, marker = _KINDS[reading["kind"]]
            y, fill = reading["indicator"], VERDICTS[reading["verdict"]]
            axes.plot(x, y, marker=marker, color=colour, fillstyle=fill, alpha=0.85)
        axes.set_xlabel("rms over the rms that noise gives")
        log_axis(axes, "x", min([0.5, *across]) / 1.15, max([2.0, *across]) * 1.15)
        log_axis(axes, "y", min([0.5, *up]) / 1.3, max([2.0, *up]) * 1.3)
        present = {r["kind"] for r in shown}
        handles = [
            Line2D([], [], ls="", color=colour, marker=marker, label=name)
            for kind, (name, colour, marker) in _KINDS.items()
            if kind in present
        ]
        handles += verdict_handles()
        legend(figure, handles)
        return figure


def verdict_handles() -> list[Line2D]:
    """Return what a legend shows for each verdict."""
    return [
        Line2D([], [], ls="", color=COLOURS["muted"], marker="o", fillstyle=fill, label=verdict)
        for verdict, fill in VERDICTS.items()
    ]


def symmetry_map(title: str, lines: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the axes of each kind of symmetry as squares with their powers.

    Args:
        lines: For each kind of symmetry in words, the power of each axis in words.
    """
    rows = list(dict.fromkeys(axis for powers in lines.values() for axis in powers))
    names = [f"{number}" for number in range(1, len(lines) + 1)]
    with plot(short(title, 60), 60 + 22 * len(rows) + 18 * len(lines)) as (figure, axes):
        for column, powers in enumerate(lines.values()):
            for axis, power in powers.items():
                y = rows.index(axis)
                colour = COLOURS["blue" if power > 0 else "rust"]
                alpha = 0.2 + 0.3 * min(abs(power), 2.0)
                axes.bar(column, 0.84, 0.84, y - 0.42, color=colour, alpha=alpha)
                axes.text(column, y, f"{power:+g}", ha="center", va="center", fontsize=9)
        axes.set(xlim=(-0.5, len(lines) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axes.set_xticks(range(len(lines)), names)
        axes.set_yticks(range(len(rows)), [short(axis, 44) for axis in rows])
        axes.tick_params(length=0, labelcolor=COLOURS["ink"])
        axes.grid(visible=False)
        # The squares show the axes; the labels add the kind and what it applies to.
        labels = [
            f"{n}  {words.rpartition(', ')[2]}" for n, words in zip(names, lines, strict=True)
        ]
        figure.supxlabel("\n".join(labels), x=0.02, ha="left", fontsize=9, linespacing=1.5)
        return figure


def check_format(path: Path | None) -> None:
    """Raise a ValueError for a file that no figure can be written to, before any work is done."""
    if path is not None and path.suffix.lower() not in _FORMATS:
        raise ValueError(
            f"a figure is written as {', '.join(_FORMATS)}, by the ending of its name; got {path}"
        )


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file."""
    buffer = io.BytesIO()
    with look():
        figure.savefig(buffer, format=path.suffix[1:].lower(), dpi=160)
    write_output(path, buffer.getvalue())

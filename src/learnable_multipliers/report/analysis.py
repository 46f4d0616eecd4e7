"""Figures of what commands print: a walk on noise, a diagnosis, the symmetries of a model.

From the plain data that the commands print as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from learnable_multipliers.report.theme import (
    LIGHT,
    canvas,
    compact,
    label_ends,
    plain_numbers,
    settings,
    short,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from learnable_multipliers.report.records import Record

FORMATS = (".svg", ".png", ".pdf")
_KINDS = {
    "matrix": ("matrices", "ink", "o"),
    "multiplier": ("multipliers", "blue", "s"),
    "vector": ("vectors", "rust", "^"),
}
_VERDICTS: dict[str, Literal["full", "none", "left"]] = {
    "trapped": "full",
    "free": "none",
    "open": "left",
}
_CELL = 22.0


def refuse_format(path: Path) -> None:
    """Raise a ValueError for a file that no figure can be written to, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(
            f"a figure is written as {', '.join(FORMATS)}, by the ending of its name; got {path}"
        )


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file of its own, on the light page."""
    refuse_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Figures of a page have none of their own.
    figure.patch.set_visible(True)
    with settings():
        figure.savefig(path, dpi=160, facecolor=LIGHT["page"])


def walk_on_noise(title: str, steps: Sequence[Mapping[str, float | None]]) -> Figure:
    """Draw the rms of a weight in training on noise: simulated, expected, and the equilibrium."""
    curves = {
        "simulated": ("ink", 2.0, "solid"),
        "expected": ("blue", 1.6, "solid"),
        "equilibrium": ("rust", 1.3, "dashed"),
    }
    with canvas(f"rms, {title}", height=290, left=64, right=14) as (figure, axes):
        x = [float(row["step"] or 0) for row in steps]
        ends = []
        for name, (ink, width, dashes) in curves.items():
            y = [math.nan if (v := row[name]) is None else v for row in steps]
            axes.plot(x, y, color=LIGHT[ink], lw=width, ls=dashes)
            if math.isfinite(y[-1]):
                ends.append((name, x[-1], y[-1], LIGHT[ink]))
        axes.set_xlim(0, x[-1])
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(compact))
        label_ends(axes, ends)
        return figure


def diagnosis(title: str, readings: Sequence[Record]) -> Figure:
    """Draw each tensor by its rms over that of noise, and by how noisy its gradients are."""
    with canvas(f"noise indicator, {title}", height=350, bottom=84) as (figure, axes):
        found = [r for r in readings if r["log_ratio"] is not None and r["indicator"] is not None]
        across = [math.exp(r["log_ratio"]) for r in found]
        up = [r["indicator"] for r in found if r["indicator"] > 0]
        axes.axvline(1.0, color=LIGHT["muted"], lw=1.2, ls=(0, (4, 2)))
        axes.axhline(1.0, color=LIGHT["muted"], lw=1.2, ls=(0, (4, 2)))
        for reading, x in zip(found, across, strict=True):
            _, ink, marker = _KINDS[reading["kind"]]
            axes.plot(
                [x], [reading["indicator"]], ls="", marker=marker, ms=6, mew=1.3,
                color=LIGHT[ink], fillstyle=_VERDICTS[reading["verdict"]], alpha=0.85,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="rms over the rms that noise gives")
        axes.set_xlim(min([0.5, *across]) / 1.15, max([2.0, *across]) * 1.15)
        axes.set_ylim(min([0.5, *up]) / 1.3, max([2.0, *up]) * 1.3)
        plain_numbers(axes, "x")
        plain_numbers(axes, "y")
        present = {r["kind"] for r in found}
        handles = [
            Line2D([], [], ls="", color=LIGHT[ink], marker=marker, ms=6, label=name)
            for kind, (name, ink, marker) in _KINDS.items()
            if kind in present
        ]
        handles += [
            Line2D([], [], ls="", color=LIGHT["muted"], marker="o", ms=6, mew=1.3, fillstyle=style,
                   label=verdict)
            for verdict, style in _VERDICTS.items()
        ]  # fmt: skip
        figure.legend(handles=handles, loc="lower center", ncols=3, columnspacing=1.4)
        return figure


def symmetry_map(title: str, lines: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw which axes take part in each kind of symmetry: a square with its power.

    Args:
        lines: For each kind of symmetry in words, the power of each axis in words.
    """
    axes_named = list(dict.fromkeys(axis for powers in lines.values() for axis in powers))
    left = 12 + 6.3 * max((len(short(axis, 44)) for axis in axes_named), default=8)
    names = [f"{number}" for number in range(1, len(lines) + 1)]
    legend = 16.0 * len(lines) + 20
    height = 40 + _CELL * len(axes_named) + legend
    with canvas(short(title, 60), height=height, left=left, bottom=legend) as (figure, axes):
        for column, powers in enumerate(lines.values()):
            for axis, power in powers.items():
                row = axes_named.index(axis)
                ink = LIGHT["blue"] if power > 0 else LIGHT["rust"]
                axes.add_patch(_square(column, row, LIGHT["page"], 1.0))
                axes.add_patch(_square(column, row, ink, 0.2 + 0.3 * min(abs(power), 2.0)))
                axes.text(column, row, f"{power:+g}", ha="center", va="center", fontsize=9)
        axes.set(xlim=(-0.5, len(lines) - 0.5), ylim=(len(axes_named) - 0.5, -0.5))
        axes.set_xticks(range(len(lines)), names)
        axes.set_yticks(range(len(axes_named)), [short(axis, 44) for axis in axes_named])
        axes.tick_params(length=0, labelcolor=LIGHT["ink"])
        axes.grid(visible=False, axis="x")
        # The axes are told by the squares; what is left to say is per what, and which kind.
        told = [f"{n}  {words.rpartition(', ')[2]}" for n, words in zip(names, lines, strict=True)]
        figure.text(0.02, 6 / height, "\n".join(told), va="bottom", fontsize=9, linespacing=1.5)
        return figure


def _square(column: int, row: int, ink: str, alpha: float) -> Rectangle:
    return Rectangle((column - 0.42, row - 0.42), 0.84, 0.84, facecolor=ink, alpha=alpha, lw=0)

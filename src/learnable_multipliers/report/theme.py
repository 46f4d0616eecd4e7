"""How figures look: one palette with a light and a dark face, one canvas, one way to label.

Figures are drawn in the light colours. In the SVG each of them becomes a CSS variable, so a page
recolours its figures by the reader's preference. All six series colours stay apart under the
three common kinds of colour blindness and have a contrast of 4.5 to both pages, so that text may
be set in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIGHT = {
    "page": "#fdfdfc",
    "ink": "#33383f",
    "muted": "#626a73",
    "rule": "#dcdfe3",
    "blue": "#216ee7",
    "rust": "#852d02",
    "teal": "#056d5d",
    "plum": "#943199",
    "ochre": "#8f7001",
}
DARK = {
    "page": "#14171b",
    "ink": "#d5dae0",
    "muted": "#98a1ab",
    "rule": "#333940",
    "blue": "#6ba5f2",
    "rust": "#f55f12",
    "teal": "#0fe090",
    "plum": "#c461ab",
    "ochre": "#eab60f",
}
SERIES = ("ink", "blue", "rust", "teal", "plum", "ochre")
"""Colours of runs, in order; the first run, the baseline, is neutral."""

# In points, which are the units of the SVG: half a desktop page, all of a phone's.
_WIDTH, _FONT = 400.0, 12.0
_CHARACTER = 0.56 * _FONT

_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "learnable-multipliers",
    # A run may be called "$x": names are text, not formulas.
    "text.parse_math": False,
    "font.size": _FONT,
    "axes.edgecolor": LIGHT["rule"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["muted"],
    "axes.titlesize": _FONT,
    "axes.labelsize": _FONT,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.7,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["rule"],
    "ytick.color": LIGHT["rule"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "legend.frameon": False,
    "legend.fontsize": _FONT - 1,
    "legend.labelcolor": LIGHT["ink"],
    "legend.handletextpad": 0.5,
    "lines.solid_capstyle": "round",
}


@contextmanager
def settings() -> Iterator[None]:
    """Set matplotlib as every figure of this package is drawn and saved."""
    # From the defaults: a reader's own matplotlibrc must not change the bytes.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


@contextmanager
def canvas(
    heading: str, *, height: float = 270.0, left: float = 52.0, right: int = 0, bottom: float = 46.0
) -> Iterator[tuple[Figure, Axes]]:
    """Draw on a new figure; `right` is the number of characters kept free beside the axes."""
    with settings():
        figure = Figure(figsize=(_WIDTH / 72, height / 72))
        figure.patch.set_visible(False)
        axes = figure.add_axes(
            (
                left / _WIDTH,
                bottom / height,
                (_WIDTH - left - 14 - right * _CHARACTER) / _WIDTH,
                (height - bottom - 30) / height,
            )
        )
        axes.patch.set_visible(False)
        axes.tick_params(length=3)
        # Over the axes and level: an upright label is hard to read on a phone.
        axes.set_title(heading, loc="left", x=(8 - left) / (_WIDTH * axes.get_position().width))
        yield figure, axes


def colour(index: int) -> str:
    """Return the colour of the run with this index; they repeat after six."""
    return LIGHT[SERIES[index % len(SERIES)]]


def dashes(index: int) -> str | tuple[float, tuple[float, ...]]:
    """Return the line style of the run with this index: what tells the seventh from the first."""
    styles = ("-", (0.0, (5.0, 2.0)), (0.0, (1.5, 1.5)))
    return styles[index // len(SERIES) % len(styles)]


def short(text: str, length: int = 18) -> str:
    """Return a name on one line that fits beside a plot."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split()) or "unnamed"
    return text if len(text) <= length else text[: length - 3].rstrip(" -_.") + "..."


def compact(value: float, _position: object = None) -> str:
    """Return a count as people say it: 1500000 -> 1.5M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:g}"


def plain_numbers(axes: Axes, which: str) -> None:
    """Label a log axis with a few plain numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    decades = math.log10(axis.get_view_interval()[1] / axis.get_view_interval()[0])
    subs = (1.0, 2.0, 5.0) if decades < 1.6 else (1.0, 3.0) if decades < 2.6 else (1.0,)
    if decades < 0.8:
        subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    # Over less than a factor of three the axis is all but linear, and so are its numbers.
    narrow = decades < math.log10(3)
    linear = MaxNLocator(6, steps=[1, 2, 5, 10])
    axis.set_major_locator(linear if narrow else LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def label_ends(axes: Axes, ends: list[tuple[str, float, float, str]]) -> None:
    """Write (text, x, y, colour) beside the axes at their heights, moved apart where they meet."""
    heights = [
        float(axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1])
        for _, x, y, _ in ends
    ]
    figure = axes.get_figure(root=True)
    assert figure is not None
    line = 1.2 * _FONT / (72 * figure.get_figheight() * axes.get_position().height)
    for (text, x, y, ink), height in zip(ends, move_apart(heights, line), strict=True):
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.05, height),
            textcoords="axes fraction",
            va="center",
            color=ink,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": ink,
                "lw": 0.7,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0.0, 0.5),
            },
        )


def move_apart(heights: list[float], distance: float) -> list[float]:
    """Return heights in [0, 1] at least `distance` apart, as near the given ones as can be."""
    order = sorted(range(len(heights)), key=lambda i: (heights[i], i))
    # Least squares under "each at least `distance` above the last": pool the ones that violate it.
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([min(max(heights[i], 0.0), 1.0) - rank * distance])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    levels = [_mean(pool) for pool in pools for _ in pool]
    moved = [0.0] * len(heights)
    for rank, i in enumerate(order):
        moved[i] = levels[rank] + rank * distance
    return moved


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

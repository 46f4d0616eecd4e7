"""The one style of all plots: colours, axes, legends, and how a figure becomes SVG.

The six colours of runs have a contrast of at least 4.5 to the page, so that text may use them, and
differ under the three common kinds of colour blindness.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from learnable_multipliers import _formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

COLOURS = {
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
RUN_COLOURS = [COLOURS[name] for name in ("ink", "blue", "rust", "teal", "plum", "ochre")]
TEMPLATE_FOLDER = Path(__file__).parent / "templates"

# In points, which are the units of the SVG: half a desktop page, all of a phone's.
_WIDTH = 400.0


def look(**more: Any) -> AbstractContextManager[None]:
    """Set matplotlib to the style of this package, with more settings, for a while."""
    # From the defaults: a reader's own matplotlibrc must not change the bytes.
    return style.context([TEMPLATE_FOLDER / "plots.mplstyle", more], after_reset=True)


@contextmanager
def plot(heading: str, height: float = 270.0, x: str = "") -> Iterator[tuple[Figure, Axes]]:
    """Yield a new figure and its axes to draw on; a legend is added to what was drawn.

    Args:
        x: What the x axis counts, from zero to the last one drawn, if it is one of steps or tokens.
    """
    with look():
        figure = Figure(figsize=(_WIDTH / 72, height / 72))
        # Above the axes and level: an upright label is hard to read on a phone.
        figure.suptitle(heading, x=0.02, ha="left", fontsize=12, color=COLOURS["muted"])
        axes = figure.add_subplot()
        yield figure, axes
        if x:
            axes.set(xlim=(0, last_drawn(axes)), xlabel=x)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.xaxis.set_major_formatter(lambda value, _: _formats.count(value))
        if not figure.legends:
            legend(figure)


def last_drawn(axes: Axes) -> float:
    """Return the largest x of what was drawn; 1 without any above zero."""
    return float(axes.dataLim.x1) if axes.dataLim.x1 > 0 else 1.0


def note(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """Write a remark into the plot, at a place in parts of the axes."""
    more = {"transform": axes.transAxes, "color": COLOURS["muted"], "style": "italic"} | more
    # Above all curves: what crosses a word leaves it readable.
    box = {"facecolor": COLOURS["page"], "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    axes.text(x, y, text, zorder=10, bbox=box, **more)


def run_look(index: int) -> tuple[str, str]:
    """Return the colour and the line style of a run: a combination of its own for 18 runs."""
    rounds, index = divmod(index, len(RUN_COLOURS))
    return RUN_COLOURS[index], ("solid", "dashed", "dotted")[rounds % 3]


def short(text: str, length: int = 18) -> str:
    """Return a name on one line that fits beside a plot."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split()) or "unnamed"
    return text if len(text) <= length else text[: length - 3].rstrip(" -_.") + "..."


def log_axis(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """Make an axis logarithmic, labelled with a few plain numbers."""
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    decades = math.log10(high / low)
    steps = {0.8: (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), 1.6: (1.0, 2.0, 5.0), 2.6: (1.0, 3.0)}
    subs = next((subs for most, subs in steps.items() if decades < most), (1.0,))
    # Over less than a factor of three the axis is all but linear, and so are its numbers.
    linear = MaxNLocator(6, steps=[1, 2, 5, 10])
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(linear if decades < 0.48 else LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter("{x:.6g}")
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def legend(figure: Figure, handles: Sequence[Line2D] = ()) -> None:
    """Put a legend under the axes: of the handles, or else of the lines that have a label."""
    named = [line for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")]
    # A run that has diverged has a name but no line.
    handles = handles or [line for line in named if np.isfinite(line.get_ydata()).any()]
    if handles:
        # As many columns as the longest label leaves room for.
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, min(4, int(_WIDTH / (6.5 * longest + 45))))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element for a page that has no other of this name.

    Equal figures give equal bytes.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with look(**{"svg.hashsalt": name}), warnings.catch_warnings():
        # The reader's browser sets the text, and it has more letters than the font at hand.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format="svg", metadata=nothing)
    # Without the ids that every figure has; the others are hashes with the name.
    text = buffer.getvalue()
    text = re.sub('<g id="[^"]*"', "<g", text[text.index("<svg") :])
    # Coordinates to a hundredth of a point, finer than any screen, and steps of a path on one line.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    return re.sub(r" \n(?=[LMCQz])", " ", text)

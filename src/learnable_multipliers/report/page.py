"""One HTML file about some runs: readable anywhere, with nothing to load and nothing to run.

The text, with a caption that explains each plot, is in `templates/`; this module hands it the
numbers and plots. All that comes from records is escaped, and a content policy forbids scripts and
requests, so a page made of a stranger's run is safe to open. The same records give the same bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from learnable_multipliers._atomic import write_output
from learnable_multipliers._formats import count, duration
from learnable_multipliers.report import comparison, plots, style
from learnable_multipliers.report.records import Run, number
from learnable_multipliers.report.scores import benchmark_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Heading -> the value of a run, a number or text, and how a number is written.
_COLUMNS: dict[str, tuple[Callable[[Run], object], Callable[[float], str]]] = {
    "placement": (lambda run: run.placement, str),
    "validation loss": (lambda run: run.final("eval", "loss"), "{:.4f}".format),
    "bits per byte": (lambda run: run.final("eval", "bits_per_byte"), "{:.4f}".format),
    "training loss": (lambda run: run.final("train", "loss"), "{:.4f}".format),
    "optimizer": (lambda run: run.setting("kind"), str),
    "learning rate": (lambda run: run.setting("lr"), "{:g}".format),
    "weight decay": (lambda run: run.setting("weight_decay"), "{:g}".format),
    "seed": (lambda run: run.setting("seed"), "{:g}".format),
    "parameters": (lambda run: run.environment.get("parameters"), count),
    "multipliers": (lambda run: run.environment.get("multipliers"), count),
    "tokens": (lambda run: max(run.final("train", "tokens"), run.final("eval", "tokens")), count),
    "tokens/s": (comparison.tokens_per_second, "{:,.0f}".format),
    "MFU": (lambda run: run.final("train", "mfu"), "{:.1%}".format),
    "time": (lambda run: run.final("end" if run.of("end") else "train", "seconds"), duration),
}

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(style.TEMPLATE_FOLDER),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
TEMPLATES.filters |= {"count": count, "median": statistics.median}
TEMPLATES.globals |= {"comparison": comparison, "style": style}


def write_page(path: str | Path, runs: Sequence[Run], *, title: str) -> Path:
    """Write the page about `runs` and return its path."""
    path = Path(path)
    write_output(path, render(runs, title=title))
    return path


def render(runs: Sequence[Run], *, title: str, note: str = "") -> bytes:
    """Return the page about `runs`; the first run is the baseline.

    Args:
        note: A paragraph of plain text to print under the summary.
    """
    if not runs:
        raise ValueError("a page needs at least one run: load some with Run.load(folder)")
    runs = comparison.distinct_names(runs)
    text = TEMPLATES.get_template("page.html.j2").render(
        title=title,
        note=note,
        runs=runs,
        columns=_columns(runs),
        benchmarks=benchmark_rows(runs),
        plots=_plots(runs),
    )
    # A record may hold half a surrogate pair, which is no character at all.
    return text.encode("utf-8", errors="replace")


def _plots(runs: Sequence[Run]) -> dict[str, list[tuple[str, str]]]:
    """Return the SVGs of each plot: one without a name, or one for each run that has the data."""
    weighed = [run for run in runs if comparison.rms_pairs(run.last("weights"))]
    multiplied = [run for run in runs if comparison.multiplier_quantiles(run.last("weights"))]
    checked = [run for run in runs if run.of("health")]
    at_end = plots.rms_limits([run.last("weights") for run in weighed])
    all_along = plots.rms_limits([record for run in weighed for record in run.of("weights")])
    limits = plots.multiplier_limits([run.last("weights") for run in multiplied])
    compared = any(comparison.both_evaluated(run, runs[0]) for run in runs[1:])
    drawn: dict[str, list[tuple[str, Figure]]] = {
        "loss": [("", plots.loss_curves(runs))],
        "gap": [("", plots.gap_curves(runs))] if compared else [],
        "scatter": [(run.name, plots.rms_scatter(run, at_end)) for run in weighed],
        "rms": [(run.name, plots.rms_over_steps(run, all_along)) for run in weighed],
        "multipliers": [(run.name, plots.multiplier_ranges(run, limits)) for run in multiplied],
        "shares": [(run.name, plots.shares_over_steps(run)) for run in checked],
        "noise": [(run.name, plots.noise_over_steps(run)) for run in checked],
        "ranges": [(r.name, plots.multipliers_over_steps(r)) for r in multiplied if r in checked],
        "drift": [(r.name, plots.drift_over_steps(r)) for r in runs if comparison.drifting(r)],
        "lr": [("", plots.learning_rates(runs))],
    }
    return {
        key: [(name, style.svg(figure, f"{key}-{i}")) for i, (name, figure) in enumerate(panels)]
        for key, panels in drawn.items()
    }


def _columns(runs: Sequence[Run]) -> dict[str, list[str | tuple[object, str] | None]]:
    """Return the cells of each column; one that no run has a value for is left out.

    A cell is a text, a pair of a number and how it is written, or None.
    """
    columns = {
        heading: [_cell(value_of(run), show) for run in runs]
        for heading, (value_of, show) in _COLUMNS.items()
    }
    return {heading: cells for heading, cells in columns.items() if any(cells)}


def _cell(value: object, show: Callable[[float], str]) -> str | tuple[object, str] | None:
    if isinstance(value, str):
        return value
    return None if math.isnan(number(value)) else (value, show(number(value)))

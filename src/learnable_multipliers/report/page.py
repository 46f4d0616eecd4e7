"""One HTML file about some runs: readable anywhere, with nothing to load and nothing to run.

The text, with a caption that explains each plot, is in `templates/page.html.j2`; this module hands
it the numbers, plots and tables. All that comes from records is escaped, and a content policy
forbids scripts and requests, so a page made of a stranger's run is safe to open. The same records
give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from learnable_multipliers._formats import count, duration
from learnable_multipliers.report import comparison, plots, style
from learnable_multipliers.report.records import Run, number
from learnable_multipliers.report.summary import describe_multipliers, describe_rms, summarize

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
    "tokens": (lambda run: comparison.tokens_seen([run]), count),
    "tokens/s": (comparison.tokens_per_second, "{:,.0f}".format),
    "MFU": (lambda run: run.final("train", "mfu"), "{:.1%}".format),
    "time": (lambda run: run.final("end" if run.of("end") else "train", "seconds"), duration),
}
# Of the environment, what has a place of its own on the page.
_NOT_A_PLACE = ("command", "parameters", "multipliers")


def write_page(
    path: str | Path, runs: Sequence[Run], *, title: str, notes: Sequence[str] = ()
) -> Path:
    """Write the page about `runs` and return its path; the first run is the baseline.

    Args:
        notes: Paragraphs of plain text to print under the summary.
    """
    if not runs:
        raise ValueError("a page needs at least one run: load some with Run.load(folder)")
    if isinstance(notes, str):
        raise ValueError("notes is a sequence of paragraphs: write notes=[...] around a single one")
    runs = comparison.distinct_names(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(style.TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    text = environment.get_template("page.html.j2").render(
        title=title,
        runs=runs,
        colours=style.COLOURS,
        summary=summarize(runs),
        notes=notes,
        table=_runs_table(runs),
        plots=_plots(runs),
        rms=[text for text in map(describe_rms, runs) if text],
        multipliers=[text for text in map(describe_multipliers, runs) if text],
        alarms=[(run.name, text) for run in runs for text in comparison.alarms(run)],
        samples=_samples(runs),
        places=_places(runs),
        settings=_settings_table(runs),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A record may hold half a surrogate pair, which is no character at all.
    path.write_bytes(text.encode("utf-8", errors="replace"))
    return path


def _plots(runs: Sequence[Run]) -> dict[str, list[tuple[str, Markup]]]:
    """Return the SVGs of each plot: one without a name, or one for each run that has the data."""
    weighed = [run for run in runs if comparison.rms_pairs(run.last("weights"))]
    multiplied = [run for run in runs if comparison.multiplier_quantiles(run.last("weights"))]
    checked = [run for run in runs if run.of("health")]
    at_end = plots.rms_limits([run.of("weights")[-1] for run in weighed])
    all_along = plots.rms_limits([record for run in weighed for record in run.of("weights")])
    compared = any(comparison.loss_gap(run, runs[0]).tokens for run in runs[1:])
    limits = plots.multiplier_limits(multiplied)
    drawn: dict[str, list[tuple[str, Figure]]] = {
        "loss": [("", plots.loss_curves(runs))],
        "gap": [("", plots.gap_curves(runs))] if compared else [],
        "scatter": [(run.name, plots.rms_scatter(run, at_end)) for run in weighed],
        "rms": [(run.name, plots.rms_over_steps(run, all_along)) for run in weighed],
        "multipliers": [(run.name, plots.multiplier_ranges(run, limits)) for run in multiplied],
        "shares": [(run.name, plots.shares_over_steps(run)) for run in checked],
        "noise": [(run.name, plots.noise_over_steps(run)) for run in checked],
        "ranges": [(r.name, plots.multipliers_over_steps(r)) for r in multiplied if r.of("health")],
        "drift": [(r.name, plots.drift_over_steps(r)) for r in runs if comparison.drifting(r)],
        "lr": [("", plots.learning_rates(runs))],
    }
    return {
        key: [
            (run, Markup(style.svg(figure, f"{key}-{i}"))) for i, (run, figure) in enumerate(each)
        ]
        for key, each in drawn.items()
    }


def _runs_table(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return headings, and a row for each run; a column that no run has a value for is left out.

    A cell is a text, a pair of a number and how it is written, or None.
    """
    cells = {
        heading: [_cell(value_of(run), show) for run in runs]
        for heading, (value_of, show) in _COLUMNS.items()
    }
    columns = {heading: column for heading, column in cells.items() if any(column)}
    return {
        "headings": [(h, any(isinstance(c, str) for c in cells)) for h, cells in columns.items()],
        "rows": [
            (run.name, *style.run_look(index), [column[index] for column in columns.values()])
            for index, run in enumerate(runs)
        ],
    }


def _cell(value: object, show: Callable[[float], str]) -> str | tuple[object, str] | None:
    if isinstance(value, str):
        return value
    return None if math.isnan(number(value)) else (value, show(number(value)))


def _settings_table(runs: Sequence[Run]) -> list[tuple[str, bool, list[str]]]:
    """Return each setting, whether it differs between runs, and its value in every run."""
    differing = set(comparison.differing_settings(runs))
    configs = [comparison.flatten(run.config) for run in runs]
    return [
        (key, key in differing, [json.dumps(c[key]) if key in c else "-" for c in configs])
        for key in dict.fromkeys(key for config in configs for key in config)
    ]


def _samples(runs: Sequence[Run]) -> list[tuple[str, Any]]:
    """Return the samples of the last record of each run, with its name."""
    return [
        (run.name, sample)
        for run in runs
        for sample in run.of("sample")
        if sample["step"] == run.of("sample")[-1]["step"]
    ]


def _places(runs: Sequence[Run]) -> list[tuple[str, dict[str, str]]]:
    """Return each environment that runs were made in, with the names of the runs."""
    places: dict[str, list[str]] = {}
    for run in runs:
        rest = {k: v for k, v in run.environment.items() if k not in _NOT_A_PLACE}
        places.setdefault(json.dumps(rest, sort_keys=True), []).append(run.name)
    return [
        (
            "All runs" if len(names) == len(runs) > 1 else ", ".join(names),
            {name: _in_words(value) for name, value in json.loads(key).items()},
        )
        for key, names in places.items()
    ]


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "not recorded" if value is None else str(value)

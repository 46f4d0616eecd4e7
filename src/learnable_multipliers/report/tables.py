"""The tables of a page: the runs with their losses, and every setting of every run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from learnable_multipliers.report.comparison import (
    differing_settings,
    final,
    final_training_loss,
    flatten,
    seconds,
    tokens_per_second,
)
from learnable_multipliers.report.records import Run, number
from learnable_multipliers.report.theme import SERIES, compact


class _Column(NamedTuple):
    heading: str
    value: Callable[[Run], object]
    """A number, or text."""

    show: Callable[[float], str] = "{:g}".format


def _last_tokens(run: Run) -> float:
    return max(
        (number(r["tokens"]) for k in ("train", "eval") for r in run.of(k)), default=math.nan
    )


def _mfu(run: Run) -> float:
    return number((run.last("train") or {}).get("mfu"))


_COLUMNS = (
    _Column("placement", lambda run: run.placement),
    _Column("validation loss", lambda run: final(run, "loss"), "{:.4f}".format),
    _Column("bits per byte", lambda run: final(run, "bits_per_byte"), "{:.4f}".format),
    _Column("training loss", final_training_loss, "{:.4f}".format),
    _Column("optimizer", lambda run: run.setting("kind")),
    _Column("learning rate", lambda run: run.setting("lr")),
    _Column("weight decay", lambda run: run.setting("weight_decay")),
    _Column("seed", lambda run: run.setting("seed")),
    _Column("parameters", lambda run: run.environment.get("parameters"), compact),
    _Column("multipliers", lambda run: run.environment.get("multipliers"), compact),
    _Column("tokens", _last_tokens, compact),
    _Column("tokens/s", tokens_per_second, "{:,.0f}".format),
    _Column("MFU", _mfu, "{:.1%}".format),
    _Column("time", seconds, lambda value: duration(value)),
)


def duration(value: float) -> str:
    """Return a time as people say it."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def runs_table(runs: Sequence[Run]) -> str:
    """Return a row for each run; a column that no run has a value for is left out."""
    columns = [c for c in _COLUMNS if any(_cell(c, run) for run in runs)]
    head = "".join(
        f'<th scope="col"{_text_class(c, runs)}>{escape(c.heading)}</th>' for c in columns
    )
    rows = ""
    for index, run in enumerate(runs):
        colour = SERIES[index % len(SERIES)]
        line = ("solid", "dashed", "dotted")[index // len(SERIES) % 3]
        swatch = f'<span class="swatch" style="border-top: 4px {line} var(--{colour})"></span>'
        cells = "".join(_cell(c, run) or "<td>-</td>" for c in columns)
        rows += f'<tr><th scope="row">{swatch}{escape(run.name)}</th>{cells}</tr>\n'
    return _scrolling(
        "The runs",
        f'<thead>\n<tr><th scope="col" class="text">run</th>{head}</tr>\n</thead>\n'
        f"<tbody>\n{rows}</tbody>",
    ) + (
        '<p class="muted">Losses are those of the last record, in nats per token; tokens/s is the '
        "median over the run. A dash: not recorded, or not a number.</p>\n"
    )


def settings_table(runs: Sequence[Run]) -> str:
    """Return a row for each setting; those that differ between runs are set in bold."""
    differing = set(differing_settings(runs))
    configs = [flatten(run.config) for run in runs]
    rows = ""
    for key in dict.fromkeys(key for config in configs for key in config):
        kind = "text differs" if key in differing else "text"
        cells = (json.dumps(config[key]) if key in config else "-" for config in configs)
        rows += f'<tr><th scope="row">{escape(key)}</th>' + "".join(
            f'<td class="{kind}">{escape(cell)}</td>' for cell in cells
        )
        rows += "</tr>\n"
    names = "".join(f'<th scope="col" class="text">{escape(run.name)}</th>' for run in runs)
    return _scrolling(
        "All settings",
        f'<thead>\n<tr><th scope="col" class="text">setting</th>{names}</tr>\n</thead>\n'
        f"<tbody>\n{rows}</tbody>",
    )


def _cell(column: _Column, run: Run) -> str:
    """Return a table cell, or nothing where there is nothing to show; numbers keep all digits."""
    value = column.value(run)
    if isinstance(value, str):
        return f'<td class="text">{escape(value)}</td>'
    if math.isnan(number(value)):
        return ""
    exact = escape(repr(value))
    return f'<td><data value="{exact}">{escape(column.show(number(value)))}</data></td>'


def _text_class(column: _Column, runs: Sequence[Run]) -> str:
    return ' class="text"' if any(isinstance(column.value(run), str) for run in runs) else ""


def _scrolling(label: str, table: str) -> str:
    return (
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">\n'
        f"<table>\n{table}\n</table>\n</div>\n"
    )

"""One HTML file about some runs: readable anywhere, with nothing to load and nothing to run.

All that comes from records is escaped, and a content policy forbids scripts and requests, so a
page made of a stranger's run is safe to open. The same records give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from learnable_multipliers.report.comparison import distinct_names, multiplier_quantiles, rms_pairs
from learnable_multipliers.report.gallery import (
    Plate,
    health_plates,
    loss_plates,
    multiplier_plates,
    rms_plates,
    schedule_plate,
)
from learnable_multipliers.report.health import alarms
from learnable_multipliers.report.records import Run
from learnable_multipliers.report.stylesheet import stylesheet
from learnable_multipliers.report.summary import (
    Reference,
    describe_multipliers,
    describe_rms,
    summarize,
)
from learnable_multipliers.report.tables import runs_table, settings_table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


# Of the environment, what has a place of its own on the page.
_NOT_A_PLACE = ("command", "parameters", "multipliers")


def write_page(
    path: str | Path,
    runs: Sequence[Run],
    *,
    title: str,
    notes: Sequence[str] = (),
    reference: Reference | None = None,
) -> Path:
    """Write the page about `runs` and return its path; the first run is the baseline.

    Args:
        notes: paragraphs of plain text to print under the summary.
        reference: a name and a loss in nats per token, drawn as a level in the loss figure.
    """
    if not runs:
        raise ValueError("a page needs at least one run: load some with Run.load(folder)")
    if isinstance(notes, str):
        raise ValueError("notes is a sequence of paragraphs: write notes=[...] around a single one")
    if reference is not None and not math.isfinite(reference[1]):
        raise ValueError(f"the reference {reference[0]!r} has no finite loss: {reference[1]}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _page(distinct_names(runs), title, notes, reference)
    # A record may hold half a surrogate pair, which is no character at all.
    path.write_bytes(text.encode("utf-8", errors="replace"))
    return path


def _page(
    runs: Sequence[Run], title: str, notes: Sequence[str], reference: Reference | None
) -> str:
    sections = [
        _summary(runs, notes, reference),
        _section("runs", "The runs", runs_table(runs)),
        _section("loss", "Loss", _side_by_side(loss_plates(runs, reference))),
        _weights(runs),
        _multipliers(runs),
        _health(runs),
        _section("learning-rate", "Learning rate", _plate(schedule_plate(runs))),
        _samples(runs),
        _section("making", "How it was made", _making(runs)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{stylesheet()}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{''.join(sections)}"
        '<p class="muted">Made from the records of the runs; nothing was trained for this page.</p>'
        "\n</main>\n</body>\n</html>\n"
    )


def _section(anchor: str, heading: str, body: str) -> str:
    return f'<section id="{anchor}">\n<h2>{escape(heading)}</h2>\n{body}</section>\n'


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>\n" for text in texts)


def _summary(runs: Sequence[Run], notes: Sequence[str], reference: Reference | None) -> str:
    told = f'<div class="summary">\n{_paragraphs(summarize(runs, reference))}</div>\n'
    extra = f"<h3>Notes</h3>\n{_paragraphs(notes)}" if notes else ""
    return f'<section id="summary" aria-label="Summary">\n{told}{extra}</section>\n'


def _plate(plate: Plate) -> str:
    panels = "".join(
        f"<div>{f'<h3>{escape(name)}</h3>' if name else ''}{picture}</div>\n"
        for name, picture in plate.panels
    )
    kind = "panels" if len(plate.panels) == 1 else "several"
    caption = f"<strong>{escape(plate.title)}.</strong> {escape(plate.caption)}"
    return (
        f'<figure class="{kind}">\n<div class="panels">\n{panels}</div>\n'
        f"<figcaption>{caption}</figcaption>\n</figure>\n"
    )


def _side_by_side(plates: Sequence[Plate]) -> str:
    return f'<div class="panels">\n{"".join(map(_plate, plates))}</div>\n'


def _weights(runs: Sequence[Run]) -> str:
    if not any(rms_pairs(run.last("weights")) for run in runs):
        return ""
    told = _paragraphs([text for text in map(describe_rms, runs) if text])
    body = told + "".join(map(_plate, rms_plates(runs)))
    return _section("weights", "Weights against the noise prediction", body)


def _multipliers(runs: Sequence[Run]) -> str:
    if not any(multiplier_quantiles(run.last("weights")) for run in runs):
        return ""
    told = _paragraphs([text for text in map(describe_multipliers, runs) if text])
    body = told + "".join(map(_plate, multiplier_plates(runs)))
    return _section("multipliers", "Multipliers", body)


def _health(runs: Sequence[Run]) -> str:
    if not any(run.of("health") for run in runs):
        return ""
    told = [f"Run {run.name} warns: {text}." for run in runs for text in alarms(run)]
    body = _paragraphs(told) + "".join(_plate(p) for p in health_plates(runs) if p.panels)
    return _section("health", "Health", body)


def _samples(runs: Sequence[Run]) -> str:
    body = ""
    for run in runs:
        last = run.last("sample")
        for sample in (s for s in run.of("sample") if last and s["step"] == last["step"]):
            body += (
                f"<h3>{escape(run.name)}, step {escape(str(sample['step']))}</h3>\n"
                f"<pre><mark>{escape(str(sample['prompt']))}</mark>"
                f"{escape(str(sample['text']))}</pre>\n"
            )
    intro = "<p>Prompts in colour, then what the model wrote after its last record.</p>\n"
    return _section("samples", "What the models write", intro + body) if body else ""


def _making(runs: Sequence[Run]) -> str:
    commands = "".join(
        f"<h3>{escape(run.name)}</h3>\n"
        f"<pre>{escape(str(run.environment.get('command', 'not recorded')))}</pre>\n"
        for run in runs
    )
    places: dict[str, list[Run]] = {}
    for run in runs:
        rest = {k: v for k, v in run.environment.items() if k not in _NOT_A_PLACE}
        places.setdefault(json.dumps(rest, sort_keys=True), []).append(run)
    for key, sharing in places.items():
        names = "All runs" if len(sharing) == len(runs) > 1 else ", ".join(r.name for r in sharing)
        rows = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(_in_words(value))}</dd>\n"
            for name, value in json.loads(key).items()
        )
        commands += f"<h3>{escape(names)}</h3>\n<dl>\n{rows}</dl>\n"
    return (
        f"{commands}<details>\n<summary>All settings of all runs</summary>\n"
        f"{settings_table(runs)}</details>\n"
    )


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "not recorded" if value is None else str(value)

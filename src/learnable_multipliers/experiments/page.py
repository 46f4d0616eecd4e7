"""What is published of the experiments: a page, the ledger as JSON and as a table, and the plots.

All of it is made from records; nothing is trained. The same records give the same bytes. The page
is one file with nothing to load and nothing to run.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from learnable_multipliers._atomic import write_output
from learnable_multipliers._formats import count, duration
from learnable_multipliers.experiments import catalogue, ledger, presets
from learnable_multipliers.experiments.claim import MIN_SEEDS, Judged, Verdict
from learnable_multipliers.experiments.drawing import Plot, Table
from learnable_multipliers.experiments.ledger import Entry
from learnable_multipliers.experiments.record import Labelled, Record, read_records
from learnable_multipliers.experiments.run import Preset, in_words
from learnable_multipliers.report.page import TEMPLATES

PAGE = "claims.html"
PLOTS = "plots"
"""Folder of the plots, beside the page."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the page says of one experiment."""

    name: str
    title: str
    figure: str
    """Figure or table of the paper."""
    entries: list[Entry]
    tables: list[Table]
    plots: list[tuple[Plot, str]]
    """Each with its SVG."""
    protocol: list[str]
    """How the runs were made, as sentences."""
    command: str


def write_report(folder: Path, preset: Preset, ledger_folder: Path | None = None) -> list[Path]:
    """Write page, plots, claims.json and README.md from the records in a folder.

    Args:
        ledger_folder: Where claims.json and README.md go; `folder` by default.
    """
    ledger_folder = ledger_folder or folder
    sections, elsewhere = report(read_records(folder), preset)
    entries = [entry for section in sections for entry in section.entries] + elsewhere
    entries.sort(key=lambda entry: ledger.IDS.index(entry.claim.id))
    svgs = {
        folder / PLOTS / f"{section.name}-{index}.svg": svg + "\n"
        for section in sections
        for index, (_, svg) in enumerate(section.plots)
    }
    beside = Path(os.path.relpath(folder, ledger_folder))
    files = {
        folder / PAGE: render(sections, elsewhere, preset),
        **svgs,
        ledger_folder / "claims.json": ledger.to_json(entries, preset),
        ledger_folder / "README.md": readme(sections, entries, preset, beside),
    }
    for path, text in files.items():
        write_output(path, text.encode("utf-8"))
    for path in (folder / PLOTS).glob("*.svg"):
        # Of an experiment that once had more plots.
        if path not in files and path.stem.rpartition("-")[0] in catalogue.every():
            path.unlink()
    return list(files)


def report(records: dict[str, Record], preset: Preset) -> tuple[list[Section], list[Entry]]:
    """Return all experiments with their claims, and the claims that belong to none.

    Args:
        records: By key, as `read_records` returns them.
    """
    by_name = {
        name: catalogue.labelled_records(name, preset, records) for name in catalogue.every()
    }
    entries = ledger.verdicts(by_name)
    sections = []
    for name, of_experiment in by_name.items():
        experiment = catalogue.load(name)
        keys = {run.key for run in catalogue.runs_of(name, preset, records)}
        keys |= {each.record.key for each in of_experiment}
        drawn = [
            plot
            for plot in (experiment.plot(of_experiment) if of_experiment else [])
            if not plot.is_empty
        ]
        tables = getattr(experiment, "tables", None)
        sections.append(
            Section(
                name=name,
                title=experiment.TITLE,
                figure=experiment.FIGURE,
                entries=[entry for entry in entries if entry.experiment == name],
                tables=tables(of_experiment) if of_experiment and tables else [],
                plots=[(plot, plot.svg(f"{name}-{i}")) for i, plot in enumerate(drawn)],
                protocol=protocol(of_experiment, len(keys), catalogue.is_adaptive(name)),
                command=ledger.command(name, preset),
            )
        )
    return sections, [entry for entry in entries if not entry.experiment]


def protocol(records: Sequence[Labelled], num_runs: int, is_adaptive: bool = False) -> list[str]:
    """Return how runs were made, as sentences: number, seeds, tokens, settling, device, code.

    Args:
        is_adaptive: Whether more runs may follow from the records.
    """
    if not records:
        return [f"None of the {num_runs} runs has a record."]
    kept = [each.record for each in records]
    seeds = sorted({int(each.labels["seed"]) for each in records})
    settled = [presets.settling(record.train_config) for record in kept]
    devices = sorted({record.device for record in kept})
    versions = sorted({record.torch for record in kept})
    texts = {record.data for record in kept}
    trees = Counter(_short(record.commit) for record in kept)
    named = ", ".join(f"{name} ({number})" for name, number in sorted(trees.items()))
    more = ", and more follow from them" if is_adaptive and len(kept) < num_runs else ""
    lost = [in_words(each.labels) for each in records if each.record.outcome == "diverged"]
    return [
        f"{len(kept)} of {num_runs} runs have a record"
        f" ({'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}){more}.",
        f"Each saw {_range([record.tokens for record in kept], count)} tokens, with "
        f"2 wd sum(lr) = {_range(settled, '{:.1f}'.format)}: matrices have settled from 4 on.",
        f"On {', '.join(devices)} with torch {', '.join(versions)}, "
        f"{duration(sum(record.seconds for record in kept))} in all.",
        *([f"Of more than one source tree, by commit: {named}."] * (len(trees) > 1)),
        *(["The runs read different texts: their losses do not compare."] * (len(texts) > 1)),
        *([f"Diverged: {'; '.join(lost)}."] if lost else []),
    ]


def _short(commit: str | None) -> str:
    name, *changed = (commit or "unknown").partition("-")
    return "".join((name[:7], *changed))


def render(sections: Sequence[Section], elsewhere: Sequence[Entry], preset: Preset) -> str:
    """Return the page."""
    entries = [entry for section in sections for entry in section.entries] + list(elsewhere)
    return TEMPLATES.get_template("claims.html.j2").render(
        sections=sections,
        elsewhere=elsewhere,
        entries=sorted(entries, key=lambda entry: ledger.IDS.index(entry.claim.id)),
        preset=preset,
        tally=tally(entries),
        numbers=numbers,
        anchor=lambda verdict: re.sub(r"\W", "-", verdict),
        min_seeds=MIN_SEEDS,
    )


def tally(entries: Sequence[Entry]) -> dict[Verdict, int]:
    """Return how many claims have each verdict, of those that any has."""
    counts = Counter(entry.verdict for entry in entries)
    return {verdict: counts[verdict] for verdict in get_args(Verdict) if counts[verdict]}


def readme(
    sections: Sequence[Section], entries: Sequence[Entry], preset: Preset, folder: Path
) -> str:
    """Return the ledger as a page of Markdown.

    Args:
        folder: Of the records and plots, as seen from where this text will be.
    """
    tallied = ", ".join(f"{number} {verdict}" for verdict, number in tally(entries).items())
    lines = [
        "# Claims of the paper, judged by our runs",
        "",
        f"{len(entries)} claims: {tallied}. The number is that of the test that decides: mean over "
        "seeds and its 95% interval.",
        "",
        "| claim | the paper says | verdict | number | must be | seeds | experiment |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        judged = entry.deciding
        cells = [
            entry.claim.id,
            f"{entry.claim.statement} ({entry.claim.where})",
            f"**{entry.verdict}**",
            f"{judged.test.what}: {numbers(judged)}" if judged else " ".join(entry.notes),
            f"{judged.test.side} {judged.test.bound:.3g}" if judged else "-",
            str(judged.n) if judged else "-",
            f"`{entry.experiment}`" if entry.experiment else "-",
        ]
        escaped = (cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| {' | '.join(escaped)} |")
    lines += [
        "",
        "Every number, also those of the tests that do not decide: `claims.json`. With all plots "
        f"and notes: [`{PAGE}`]({(folder / PAGE).as_posix()}).",
        "",
        "```sh",
        f"lrm experiment NAME --preset {preset} --data DATA --out {folder.as_posix()}  # the runs",
        f"lrm experiment report --preset {preset} --out {folder.as_posix()} --ledger .",
        "```",
    ]
    for section in sections:
        if section.plots or section.tables:
            lines += ["", f"## {section.title} ({section.figure})", ""]
            lines += [f"{' '.join(section.protocol)} `{section.command}`", ""]
        for table in section.tables:
            if table.says:
                lines += [*(f"- {sentence}" for sentence in table.says), ""]
            lines += [*table.markdown(), "", f"{table.title}. {table.caption}", ""]
        for index, (plot, _) in enumerate(section.plots):
            path = folder / PLOTS / f"{section.name}-{index}.svg"
            lines += [
                f"![{plot.title}]({path.as_posix()})",
                "",
                f"{plot.title}. {plot.caption}",
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def numbers(judged: Judged) -> str:
    """Return mean and interval with as many digits as the interval deserves."""
    if not judged.n:
        return "-"
    if math.isinf(judged.low):
        values = ", ".join(f"{value:.3g}" for value in judged.by_seed.values())
        return f"{values} (no interval)"
    half = (judged.high - judged.low) / 2
    decimals = max(0, 1 - math.floor(math.log10(half))) if half else 4
    show = f"{{:.{decimals}f}}" if decimals <= 6 else "{:.3g}"
    # Without the sign of what rounds to zero.
    mean, low, high = (
        show.format(value).replace("-", "" if not float(show.format(value)) else "-", 1)
        for value in (judged.mean, judged.low, judged.high)
    )
    return f"{mean} [{low}, {high}]"


def _range(values: Sequence[float], show: Callable[[float], str]) -> str:
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"

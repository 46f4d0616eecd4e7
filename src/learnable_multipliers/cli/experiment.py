"""`lrm experiment`."""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console

from learnable_multipliers._formats import aligned
from learnable_multipliers.cli.arguments import closest, command, usage_error
from learnable_multipliers.experiments import catalogue, page, runner
from learnable_multipliers.experiments.command import command_of
from learnable_multipliers.experiments.progress import Display, in_words
from learnable_multipliers.experiments.record import Record, read_records
from learnable_multipliers.experiments.run import Preset
from learnable_multipliers.experiments.scores import check_requests
from learnable_multipliers.experiments.worker import Job
from learnable_multipliers.pretrain.data.training_data import default_corpus
from learnable_multipliers.pretrain.trainer.run_folder import commit

_RANKS = 8
"""Of the paper's runs: one node."""
_CPU_VOCABULARY = 1024
"""A quarter of what `lrm train` takes: a small model spends half of its time on the rest."""


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """What to run, and where its records are."""

    what: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="list|all|report|NAME ...", help_behavior_hint="(required)"),
    ]
    """list: the experiments; all, or names: run them; report: judge the claims from the records."""
    preset: Preset = "cpu"
    """Size of the runs: cpu and gpu take seconds each; paper prints the commands of the paper's own
    runs."""
    data: Path | None = None
    """Folder that lrm data prepare wrote. The preset cpu may do without: it then takes the
    sources of the Python standard library."""
    requests: Path | None = None
    """File of lrm evaluate --requests-only, made from the data: runs that an experiment compares on
    benchmarks (headline) are scored on it when they are trained."""
    out: Path = Path("experiments")
    """Folder of the records, one file for each experiment, and of the report."""
    ledger: Path | None = None
    """Folder of the report's claims.json and README.md, if not the one of the records."""
    jobs: int = 0
    """Parallel runs; 0 is one per CPU core, or three on a GPU (one for headline)."""
    seconds: float = 0.0
    """Time limit in seconds: do not start a run that would exceed it; 0 is no limit."""
    again: bool = False
    """Repeat runs whose claims have been redefined since."""


@command(ExperimentConfig)
def experiment(config: ExperimentConfig) -> None:
    """Run the experiments of the paper, one for each figure and table, and judge its claims.

    A run is trained once and kept as one record. The same command, given again, continues where it
    was stopped.
    """
    match config.what:
        case ("list",):
            _list(config)
        case ("report",):
            _report(config)
        case ("all",):
            _run(config, list(catalogue.MODULES))
        case _:
            _run(config, _names(config.what))


def _names(words: Sequence[str]) -> list[str]:
    if not words:
        usage_error("lrm experiment: name experiments, or all; lrm experiment list shows them")
    for word in words:
        if word in ("list", "all", "report"):
            usage_error(f"lrm experiment: {word} stands alone: lrm experiment {word}")
        if word not in catalogue.every():
            near = closest(word, catalogue.every())
            hint = f"did you mean {near}? " if near else ""
            usage_error(
                f"lrm experiment: there is no experiment {word!r}; {hint}lrm experiment list shows "
                "them"
            )
    return list(dict.fromkeys(words))


# -- list --------------------------------------------------------------------------------------


def _list(config: ExperimentConfig) -> None:
    records = read_records(config.out)
    rows = [("experiment", "figure", "claims", "records of runs", "")]
    for name in catalogue.every():
        module = catalogue.load(name)
        keys = {run.key for run in catalogue.runs_of(name, config.preset, records)}
        claims = ", ".join(claim.id for claim in module.CLAIMS) or "-"
        done = f"{len(keys & records.keys())} of {len(keys)}"
        rows.append((name, module.FIGURE, claims, done, module.TITLE))
    print("\n".join(aligned(rows, left=range(len(rows[0])))))
    print(f"\nRecords in {config.out}; others with --out.")


# -- report ------------------------------------------------------------------------------------


def _report(config: ExperimentConfig) -> None:
    if not config.out.is_dir():
        raise ValueError(
            f"there is no folder {config.out} with records of runs: --out names it, and "
            "lrm experiment all makes them"
        )
    for path in page.write_report(config.out, config.preset, config.ledger):
        print(path)


# -- run ---------------------------------------------------------------------------------------


def _run(config: ExperimentConfig, names: Sequence[str]) -> None:
    if config.preset == "paper":
        _print_commands(names)
        return
    _check(config, names)
    with runner.locked(config.out):
        records = read_records(config.out)
        _train(config, names, records)


def _check(config: ExperimentConfig, names: Sequence[str]) -> None:
    """Raise a ValueError for what cannot be done on this machine, or not by these experiments."""
    if config.jobs < 0 or not config.seconds >= 0:
        raise ValueError("--jobs and --seconds must not be negative")
    if config.requests is not None and not catalogue.benchmarks_of(names):
        able = ", ".join(name for name in catalogue.every() if catalogue.benchmarks_of([name]))
        raise ValueError(
            "none of these experiments scores its runs on benchmarks: leave out --requests (it is "
            f"for {able})"
        )
    if config.preset != "gpu":
        return
    if config.data is None:
        raise ValueError(
            "the preset gpu needs text of its own: give the folder that lrm data prepare wrote "
            "with --data"
        )
    if config.requests is None and (tasks := catalogue.benchmarks_of(names)):
        raise ValueError(
            f"runs of {', '.join(names)} are scored on benchmarks when they are trained, and at no "
            f"other time: make the requests with lrm evaluate {config.data} --eval-data FOLDER "
            f"--tasks {' '.join(tasks)} --requests-only FILE, and give them with --requests"
        )
    if not torch.cuda.is_available():
        raise ValueError("the preset gpu needs a CUDA device, and there is none: --preset cpu")


def _train(config: ExperimentConfig, names: Sequence[str], records: dict[str, Record]) -> None:
    console = Console()
    with console.status("reading the data"):
        data = config.data or default_corpus(_CPU_VOCABULARY)
        tasks = catalogue.benchmarks_of(names)
        if config.requests is not None:
            check_requests(config.requests, tasks, data, records.values())
        jobs = runner.missing(
            names, config.preset, data, records, requests=config.requests, again=config.again
        )
        asked = {
            run.key for name in names for run in catalogue.runs_of(name, config.preset, records)
        }
        runner.check_data(jobs, asked, records)
    _say(console, f"{len(asked):,} runs, {len(asked) - len(jobs):,} of them have a record")
    if not config.again:
        _report_outdated(config, names, records, console)
    if not jobs:
        return
    if tasks and config.requests is None:
        _say(console, f"without --requests no run is scored on {', '.join(tasks)}")
    if config.preset == "gpu" and (commit() or "").endswith("-changed"):
        _say(
            console,
            "the package has changes that are not committed: records will name its commit with "
            "-changed, and nobody can repeat these runs",
        )
    num_workers = config.jobs or runner.default_jobs(config.preset, names)
    adaptive = [name for name in names if catalogue.is_adaptive(name)]

    def follow_up(new: Sequence[Record], failed: Container[str]) -> list[Job]:
        known = records | {record.key: record for record in new}
        return runner.missing(
            adaptive, config.preset, data, known, requests=config.requests, failed=failed
        )

    with Display(len(jobs), console) as display:
        result = runner.train_missing(
            jobs,
            config.out,
            display,
            num_workers=num_workers,
            num_threads=runner.default_threads(config.preset, num_workers),
            seconds=config.seconds,
            known=[records[key] for key in sorted(asked & records.keys())],
            follow_up=follow_up if adaptive else None,
        )
    if result.num_left:
        again = "the same command continues with them"
        _say(console, f"{len(result.records):,} runs trained, {result.num_left:,} left: {again}")
    if result.stopped_by is not None:
        sys.exit(128 + result.stopped_by)
    if result.failures:
        listed = "; ".join(f"{in_words(job)} ({why.text})" for job, why in result.failures)
        number = len(result.failures)
        raise ValueError(f"{number} {'run' if number == 1 else 'runs'} failed: {listed}")


def _report_outdated(
    config: ExperimentConfig,
    names: Sequence[str],
    records: dict[str, Record],
    console: Console,
) -> None:
    """Say which records do not judge their claims."""
    for name in names:
        used = [
            records[run.key]
            for run in catalogue.runs_of(name, config.preset, records)
            if run.key in records
        ]
        old = [changed for record in used if (changed := runner.outdated(record, name))]
        if old:
            claims = ", ".join(dict.fromkeys(claim for changed in old for claim in changed))
            _say(
                console,
                f"{name}: {len(old):,} records are from before {claims} was defined as it is now, "
                "and do not judge it; --again repeats these runs",
            )


def _print_commands(names: Sequence[str]) -> None:
    """Print how each run of the paper is trained; nothing on this machine could."""
    print("# DATA is the folder that lrm data prepare wrote.")
    for name in names:
        module = catalogue.load(name)
        print(f"\n# {name}: {module.TITLE} ({module.FIGURE})")
        for run in module.runs("paper"):
            folder = re.sub(r"[^\w.=+-]+", "-", run.in_words)
            print(command_of(replace(run.config, out=Path("runs") / name / folder), _RANKS))


def _say(console: Console, text: str) -> None:
    # One line in a log file; terminals wrap by themselves.
    console.print(text, highlight=False, markup=False, soft_wrap=True)

"""`lrm evaluate`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from learnable_multipliers.cli.arguments import command, usage_error
from learnable_multipliers.evaluate import evaluation, models, requests, results, scoring
from learnable_multipliers.evaluate.evaluation import Evaluation
from learnable_multipliers.evaluate.results import Estimate, Result
from learnable_multipliers.evaluate.tasks import TASKS, Task, check_folder, named
from learnable_multipliers.pretrain.config import RuntimeConfig
from learnable_multipliers.pretrain.data.shards import is_dataset
from learnable_multipliers.pretrain.trainer.device import choose_device

_METRICS = ("accuracy", "by group", "normalized", "flexible", "bits per byte")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What to evaluate, and on what."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a run, of a checkpoint, of a Hugging Face model, or of earlier results; of prepared
    data for --requests-only."""
    eval_data: Path | None = None
    """Folder of the evaluation sets, one folder for each; nothing is downloaded."""
    tasks: tuple[str, ...] = ()
    """Names of tasks: hellaswag, arc_challenge, arc_easy, mmlu, mmlu_cloze, mmlu_pro,
    mmlu_pro_cloze, sciq, piqa, openbookqa, winogrande, blimp, lambada, bbh, gsm8k, math500; or
    quick (by log-likelihood, without examples), paper (the paper's seven), all. Without: those of
    quick whose files are there."""
    num_fewshot: int | None = None
    """Few-shot examples per prompt (default: the task's; docs/evaluate.md)."""
    max_new_tokens: int = 0
    """Maximum generated tokens per answer; 0 is each task's own number."""
    limit: int = 0
    """Maximum items per task, spaced evenly over its file; 0 is all."""
    against: Path | None = None
    """Second model or folder of results: also print the differences, paired by item."""
    last: int = 1
    """Average scores over this many of the newest checkpoints of a run."""
    requests_only: Path | None = None
    """Write the requests as tokens to this file, and score nothing."""
    requests: Path | None = None
    """File of requests to score instead of reading evaluation sets."""
    out: Path | None = None
    """Folder of the results (default: evaluations, in the model's or run's folder)."""
    device: str = "auto"
    """cuda, mps or cpu; auto is the first available."""
    dtype: models.Dtype = "float32"
    """Dtype of weights and arithmetic; log-likelihoods are summed in float64."""
    max_length: int = 0
    """Maximum tokens of context and answer; 0 is the model's maximum length."""
    batch_tokens: int = scoring.BATCH_TOKENS
    """Maximum tokens per batch; larger generates faster if memory allows."""


@command(EvaluateConfig)
def evaluate(config: EvaluateConfig) -> None:
    """Score a model on benchmarks in local files: accuracy, bits per byte, standard errors.

    Prompts are lm-eval's. Results are saved with the score of each item, so that two models can be
    compared item by item, and with the text of generated answers.
    """
    _check(config)
    # Prepared data have a tokenizer, which is all that requests need.
    if config.requests_only is None or not is_dataset(config.model):
        _check_model(config.model)
    if config.eval_data is not None and (missing := _chosen(config, config.eval_data)[1]):
        left_out = _with_files(missing)
        print(f"lrm evaluate: left out, not in {config.eval_data}: {left_out}", file=sys.stderr)
    if config.requests_only is not None:
        built = _build(config, config.model)
        requests.write_requests(config.requests_only, built)
        count = len(built.requests) + len(built.prompts)
        print(f"{config.requests_only}: {count:,} requests")
        return
    if config.against is not None:
        # Before scoring the first one, which may take hours.
        _check_model(config.against)
    first = _results_of(config, config.model)
    _print(first)
    if config.against is not None:
        other = replace(config, model=config.against, out=None)
        _print_difference(first, _results_of(other, config.against))


def _check(config: EvaluateConfig) -> None:
    named(config.tasks)
    least = min(config.limit, config.max_length, config.max_new_tokens, config.num_fewshot or 0)
    if least < 0 or min(config.last, config.batch_tokens) < 1:
        usage_error(
            "lrm evaluate: --limit, --max-length, --max-new-tokens and --num-fewshot are at least "
            "0, --last and --batch-tokens at least 1"
        )
    if config.max_new_tokens and not any(t.generation for t in named(config.tasks or ("quick",))):
        usage_error("lrm evaluate: --max-new-tokens needs a generation task: name one with --tasks")
    built = config.eval_data or config.limit or config.requests_only or config.max_new_tokens
    if config.requests is not None and (built or config.num_fewshot is not None):
        usage_error(
            "lrm evaluate: --requests cannot be combined with --eval-data, --limit, --num-fewshot, "
            "--max-new-tokens or --requests-only"
        )


def _check_model(source: Path) -> None:
    """Raise a ValueError unless a folder is a model or holds results."""
    if not results.read_results(source):
        models.check_model_folder(source)


def _results_of(config: EvaluateConfig, source: Path) -> dict[str, Result]:
    """Return the results of a model, by task: those in a folder of results, or new ones."""
    earlier = results.read_results(source)
    if earlier:
        named(tuple(earlier))
        names = [task.name for task in named(config.tasks or tuple(earlier))]
        wanted = [name for name in names if name not in earlier]
        if wanted:
            raise ValueError(f"{source} holds no results of {', '.join(wanted)}")
        return {name: earlier[name] for name in names}
    asked = _build(config, source) if config.requests is None else _read(config)
    evaluations: list[Evaluation] = []
    steps: list[int] = []
    device = choose_device(RuntimeConfig(device=config.device)).device
    for loaded in models.load_models(source, last=config.last, device=device, dtype=config.dtype):
        for note in loaded.notes:
            print(f"lrm evaluate: {note}", file=sys.stderr)
        steps += [] if loaded.step is None else [loaded.step]
        evaluations.append(_score(config, asked, loaded, source, str(device)))
    folder = config.out or models.results_folder(
        source,
        steps,
        shots=config.num_fewshot,
        tokens=config.max_new_tokens or None,
        limit=config.limit or None,
        length=config.max_length or None,
        dtype=None if config.dtype == "float32" else config.dtype,
    )
    averages = {
        name: results.averaged([each.results[name] for each in evaluations])
        for name in asked.checksums
    }
    for name, result in averages.items():
        results.write_result(folder, result)
        if name in evaluations[0].answers:
            answers = [answer for each in evaluations for answer in each.answers[name]]
            results.write_answers(folder, name, answers)
    print(f"Results: {folder}", file=sys.stderr)
    return averages


def _build(config: EvaluateConfig, source: Path) -> requests.RequestSet:
    if config.eval_data is None:
        usage_error("lrm evaluate: name the folder of the evaluation sets: --eval-data DIR")
    encoder, tokenizer = models.load_encoder(source)
    chosen, _ = _chosen(config, config.eval_data)
    read = {
        task.name: task.items(
            config.eval_data,
            shots=config.num_fewshot,
            limit=config.limit,
            max_new_tokens=config.max_new_tokens,
        )
        for task in chosen
    }
    asked = config.num_fewshot
    shots = {task.name: task.shots if asked is None else asked for task in chosen}
    with Console(stderr=True).status("encoding"):
        return requests.build_set(read, encoder, tokenizer, shots)


def _chosen(config: EvaluateConfig, folder: Path) -> tuple[list[Task], dict[str, str]]:
    """Return the tasks to evaluate, and the missing file of each task that is left out.

    Without --tasks, tasks whose files are missing are left out.
    """
    check_folder(folder)
    wanted = named(config.tasks or ("quick",))
    missing = _missing(wanted, config, folder)
    if missing and config.tasks:
        every = list(TASKS.values())
        there = [task.name for task in every if task.name not in _missing(every, config, folder)]
        raise ValueError(
            f"{folder} holds no files of {_with_files(missing)}: unpack them there, or leave "
            f"{'it' if len(missing) == 1 else 'them'} out of --tasks (there are the files of "
            f"{', '.join(there) or 'no task'})"
        )
    if len(missing) == len(wanted):
        raise ValueError(
            f"{folder} holds the files of no task: looked for {', '.join(missing.values())} "
            "(docs/evaluate.md lists them)"
        )
    return [task for task in wanted if task.name not in missing], missing


def _missing(tasks: list[Task], config: EvaluateConfig, folder: Path) -> dict[str, str]:
    files = {task.name: task.missing_file(folder, config.num_fewshot) for task in tasks}
    return {name: file for name, file in files.items() if file is not None}


def _with_files(missing: dict[str, str]) -> str:
    return ", ".join(f"{name} ({file})" for name, file in missing.items())


def _read(config: EvaluateConfig) -> requests.RequestSet:
    """Return the requests of a file for the chosen tasks."""
    assert config.requests is not None
    request_set = requests.read_requests(config.requests)
    named(tuple(request_set.checksums))
    names = [task.name for task in named(config.tasks or tuple(request_set.checksums))]
    missing = [name for name in names if name not in request_set.checksums]
    if missing:
        raise ValueError(f"{config.requests} holds no requests of {', '.join(missing)}")
    return replace(
        request_set,
        checksums={name: request_set.checksums[name] for name in names},
        requests=tuple(r for r in request_set.requests if r.task in names),
        prompts=tuple(p for p in request_set.prompts if p.task in names),
    )


def _score(
    config: EvaluateConfig,
    asked: requests.RequestSet,
    loaded: models.Loaded,
    source: Path,
    device: str,
) -> Evaluation:
    """Return the results of one model."""
    evaluation.check(asked, loaded, str(source))
    longest = config.max_length or loaded.max_length
    cut = evaluation.num_truncated(asked, longest)
    if cut:
        print(
            f"lrm evaluate: {cut:,} of {len(asked.requests) + len(asked.prompts):,} requests are "
            f"longer than the model's maximum of {longest:,} tokens: they lose their first tokens",
            file=sys.stderr,
        )
    return evaluation.evaluate(
        loaded,
        asked,
        source=str(source),
        device=device,
        max_length=longest,
        batch_tokens=config.batch_tokens,
        progress=_progress,
    )


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    # In a log file it would leave an empty line for each task.
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.advance(task, done)


# -- tables ------------------------------------------------------------------------------------


def _print(by_task: dict[str, Result]) -> None:
    first = next(iter(by_task.values()))
    steps = f", steps {', '.join(f'{step:,}' for step in first.steps)}" if first.steps else ""
    shown = _shown(by_task[name].metrics for name in by_task)
    table = _table("task", "form", "shots", "items", *shown, "chance")
    for name, result in by_task.items():
        cells = [_cell(result.metrics.get(metric)) for metric in shown]
        chance = "-" if result.chance is None else f"{result.chance:.3f}"
        counts = f"{result.shots}", f"{len(result.accuracy):,}"
        table.add_row(name, TASKS[name].form, *counts, *cells, chance)
    _show(f"{first.model}{steps}", table)
    notes = [f"{name}: {TASKS[name].note}" for name in by_task if TASKS[name].note]
    if len(first.steps) > 1:
        notes.append(
            "+- is the standard error over items of each item's mean over the checkpoints; it does "
            "not include the variation between runs"
        )
    if notes:
        print("\n" + "\n".join(notes))


def _print_difference(first: dict[str, Result], second: dict[str, Result]) -> None:
    shared = [name for name in first if name in second]
    if not shared:
        raise ValueError("the two models have no task in common")
    differences = {name: results.difference(first[name], second[name]) for name in shared}
    shown = _shown(differences.values())
    table = _table("task", "items", *shown)
    for name, metrics in differences.items():
        cells = [_cell(metrics.get(metric), "+") for metric in shown]
        table.add_row(name, f"{len(first[name].accuracy):,}", *cells)
    one, two = first[shared[0]].model, second[shared[0]].model
    _show(f"{one} minus {two}, paired by item", table)


def _shown(every: Iterable[dict[str, Estimate]]) -> list[str]:
    """Return the metrics that any of the tasks has."""
    names = {name for metrics in every for name in metrics}
    return [name for name in _METRICS if name in names]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table


def _cell(estimate: Estimate | None, sign: str = "") -> str:
    if estimate is None:
        return "-"
    error = "" if math.isnan(estimate.error) else f" +- {estimate.error:.3f}"
    return f"{estimate.value:{sign}.3f}{error}"


def _show(title: str, table: Table) -> None:
    # In a file, use the width of the table.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"\n{title}\n", markup=False, soft_wrap=True)
    console.print(table)

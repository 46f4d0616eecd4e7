"""`lrm evaluate`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from learnable_multipliers.cli.arguments import command, usage_error
from learnable_multipliers.evaluate import models, requests, results, scoring
from learnable_multipliers.evaluate.items import evenly
from learnable_multipliers.evaluate.results import Estimate, Result
from learnable_multipliers.evaluate.tasks import TASKS, named
from learnable_multipliers.pretrain.config import RuntimeConfig
from learnable_multipliers.pretrain.trainer.device import choose_device

_METRICS = ("accuracy", "normalized", "bits per byte")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What to evaluate, and on what."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a run, of a checkpoint, of a Hugging Face model, or of earlier results."""
    eval_data: Path | None = None
    """Folder of the evaluation sets, one folder for each; nothing is downloaded."""
    tasks: tuple[str, ...] = ()
    """Names of tasks (default: all): hellaswag, arc_challenge, arc_easy, mmlu, mmlu_pro, sciq,
    piqa, openbookqa, winogrande, blimp, lambada."""
    limit: int = 0
    """Items of each task, taken evenly from all over its file; 0 is all."""
    against: Path | None = None
    """Second model or folder of results: also print the differences, paired by item."""
    last: int = 1
    """Average the scores of this many last checkpoints of a run."""
    requests_only: Path | None = None
    """Write the requests as tokens to this file, and score nothing."""
    requests: Path | None = None
    """File of requests to score instead of reading evaluation sets."""
    out: Path | None = None
    """Folder of the results (default: evaluations, in the model's or run's folder)."""
    device: str = "auto"
    """cuda, mps, cpu, or auto for the first of them there is."""
    dtype: models.Dtype = "float32"
    """Dtype of weights and arithmetic; log-likelihoods are summed in float64."""
    max_length: int = 0
    """Tokens read at once, context and answer; 0 is what the model was made for."""
    batch_tokens: int = scoring.BATCH_TOKENS
    """Most tokens in a batch."""


@command(EvaluateConfig)
def evaluate(config: EvaluateConfig) -> None:
    """Score a model on benchmarks in local files: accuracy, bits per byte, standard errors.

    Prompts are lm-eval's, in cloze form and without examples. Results are written with the score of
    each item, so that two models can be compared item by item.
    """
    _check(config)
    if config.requests_only is not None:
        built = _build(config, config.model)
        requests.write_requests(config.requests_only, built)
        print(f"{config.requests_only}: {len(built.requests):,} requests")
        return
    first = _results_of(config, config.model)
    _print(first)
    if config.against is not None:
        other = replace(config, model=config.against, out=None)
        _print_difference(first, _results_of(other, config.against))


def _check(config: EvaluateConfig) -> None:
    named(config.tasks)
    if min(config.limit, config.max_length) < 0 or min(config.last, config.batch_tokens) < 1:
        usage_error(
            "lrm evaluate: --limit and --max-length are at least 0, --last and --batch-tokens at "
            "least 1"
        )
    if config.requests is not None and (config.eval_data or config.limit or config.requests_only):
        usage_error(
            "lrm evaluate: --requests are complete: --eval-data, --limit and --requests-only do "
            "not go with them"
        )


def _results_of(config: EvaluateConfig, source: Path) -> dict[str, Result]:
    """Return the results of a model, by task: those in a folder of results, or new ones."""
    earlier = results.read_results(source)
    if earlier:
        named(tuple(earlier))
        wanted = [name for name in config.tasks if name not in earlier]
        if wanted:
            raise ValueError(f"{source} holds no results of {', '.join(wanted)}")
        return {name: earlier[name] for name in config.tasks or earlier}
    asked = _build(config, source) if config.requests is None else _read(config)
    by_step: list[dict[str, Result]] = []
    steps: list[int] = []
    device = choose_device(RuntimeConfig(device=config.device)).device
    for loaded in models.load_models(source, last=config.last, device=device, dtype=config.dtype):
        for note in loaded.notes:
            print(f"lrm evaluate: {note}", file=sys.stderr)
        steps += [] if loaded.step is None else [loaded.step]
        by_step.append(_score(config, asked, loaded, source, str(device)))
    found = {name: results.averaged([by[name] for by in by_step]) for name in asked.items}
    folder = config.out or models.results_folder(source, steps, config.limit)
    for result in found.values():
        results.write_result(folder, result)
    print(f"Results: {folder}", file=sys.stderr)
    return found


def _build(config: EvaluateConfig, source: Path) -> requests.RequestSet:
    if config.eval_data is None:
        usage_error("lrm evaluate: name the folder of the evaluation sets: --eval-data DIR")
    encoder, tokenizer = models.load_encoder(source)
    read = {}
    for task in named(config.tasks or tuple(TASKS)):
        items = task.items(config.eval_data)
        read[task.name] = evenly(items, config.limit) if config.limit else items
    with Console(stderr=True).status("encoding"):
        return requests.build_set(read, encoder, tokenizer)


def _read(config: EvaluateConfig) -> requests.RequestSet:
    """Return the requests of a file, for the tasks asked for."""
    assert config.requests is not None
    found = requests.read_requests(config.requests)
    named(tuple(found.items))
    missing = [name for name in config.tasks if name not in found.items]
    if missing:
        raise ValueError(f"{config.requests} holds no requests of {', '.join(missing)}")
    kept = {name: found.items[name] for name in config.tasks or found.items}
    return replace(found, items=kept, requests=tuple(r for r in found.requests if r.task in kept))


def _score(
    config: EvaluateConfig,
    asked: requests.RequestSet,
    loaded: models.Loaded,
    source: Path,
    device: str,
) -> dict[str, Result]:
    """Return the results of one model, by task."""
    if None not in (asked.tokenizer, loaded.tokenizer) and asked.tokenizer != loaded.tokenizer:
        raise ValueError(
            f"{source} was trained with another tokenizer than made the requests: build them from "
            "this model"
        )
    scoring.check_ids(asked.requests, loaded.vocab_size)
    longest = config.max_length or loaded.max_length
    cut = scoring.num_truncated(asked.requests, longest)
    if cut:
        print(
            f"lrm evaluate: {cut:,} of {len(asked.requests):,} requests are longer than the "
            f"{longest:,} tokens that the model reads: they lose their first tokens",
            file=sys.stderr,
        )
    found = {}
    for name, items in asked.items.items():
        chosen = [request for request in asked.requests if request.task == name]
        with _progress(name, len(chosen)) as advance:
            scores = scoring.score(
                loaded.model,
                chosen,
                device=device,
                max_length=longest,
                batch_tokens=config.batch_tokens,
                progress=advance,
            )
        found[name] = results.summarize(
            chosen,
            scores,
            items=items,
            normalized=TASKS[name].normalized,
            model=str(source),
            steps=() if loaded.step is None else (loaded.step,),
        )
    return found


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    # In a log file it would leave an empty line for each task.
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.advance(task, done)


# -- tables ------------------------------------------------------------------------------------


def _print(found: dict[str, Result]) -> None:
    first = next(iter(found.values()))
    steps = f", steps {', '.join(f'{step:,}' for step in first.steps)}" if first.steps else ""
    table = _table("task", "form", "items", *_METRICS, "chance")
    for name, result in found.items():
        cells = [_cell(result.metrics.get(metric)) for metric in _METRICS]
        chance = "-" if result.chance is None else f"{result.chance:.3f}"
        table.add_row(name, TASKS[name].form, f"{len(result.bytes):,}", *cells, chance)
    _show(f"{first.model}{steps}", table)
    notes = [f"{name}: {TASKS[name].note}" for name in found if TASKS[name].note]
    if notes:
        print("\n" + "\n".join(notes))


def _print_difference(first: dict[str, Result], second: dict[str, Result]) -> None:
    shared = [name for name in first if name in second]
    if not shared:
        raise ValueError("the two models have no task in common")
    table = _table("task", "items", *_METRICS)
    for name in shared:
        found = results.difference(first[name], second[name])
        cells = [_cell(found.get(metric), "+") for metric in _METRICS]
        table.add_row(name, f"{len(first[name].bytes):,}", *cells)
    one, two = first[shared[0]].model, second[shared[0]].model
    _show(f"{one} minus {two}, paired by item", table)


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
    # In a file, as wide as the table is.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(f"\n{title}\n", markup=False, soft_wrap=True)
    console.print(table)

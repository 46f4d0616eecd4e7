"""Accuracies, bits per byte and their errors from scores; paired differences of two results."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from learnable_multipliers._atomic import write_output
from learnable_multipliers._serialization import from_dict
from learnable_multipliers.evaluate.requests import Prompt, Request
from learnable_multipliers.evaluate.scoring import Score

FORMAT = 1
_SCORES = ("accuracy", "normalized", "flexible", "bits")
"""Lists of numbers that depend on the model."""


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error over items."""

    value: float
    error: float
    """NaN for a single item."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A task's scores, one number for each item in every list."""

    task: str
    model: str
    items: str
    """Checksum of the items; only results on the same items can be compared."""
    steps: tuple[int, ...] = ()
    """Checkpoints whose scores are averaged."""
    accuracy: tuple[float, ...]
    """1 or 0; between them if averaged over checkpoints or shared by equal likelihoods."""
    normalized: tuple[float, ...] | None = None
    """Accuracy with likelihoods divided by the characters of the answer; None if not defined."""
    flexible: tuple[float, ...] | None = None
    """Accuracy with less strict extraction of the answer; None if not defined."""
    bits: tuple[float, ...] | None = None
    """Bits of the right answer; None for generation tasks."""
    bytes: tuple[int, ...] | None = None
    """Bytes of the right answer."""
    chance: float | None
    """Accuracy of random guessing; None without choices."""
    shots: int = 0
    """Examples in each prompt."""
    groups: tuple[str, ...] = ()
    """Subject of each item, where a task has several."""

    @property
    def metrics(self) -> dict[str, Estimate]:
        """Return all metrics over the items."""
        return _metrics(self.accuracy, self.groups, self.normalized, self.flexible) | (
            {} if self.bits is None else {"bits per byte": ratio(self.bits, self.bytes or ())}
        )


def _metrics(
    accuracy: Sequence[float],
    groups: Sequence[str],
    normalized: Sequence[float] | None,
    flexible: Sequence[float] | None,
) -> dict[str, Estimate]:
    metrics = {"accuracy": mean(accuracy)}
    if len(set(groups)) > 1:
        metrics["by group"] = mean_of_groups(accuracy, groups)
    if normalized is not None:
        metrics["normalized"] = mean(normalized)
    return metrics if flexible is None else metrics | {"flexible": mean(flexible)}


@dataclass(frozen=True)
class Answer:
    """The generated answer to one item."""

    item: int
    step: int | None
    """Step of the checkpoint, for a run."""
    right: str
    read: dict[str, str | None]
    """Metric -> the answer found in the text."""
    scores: dict[str, float]
    """Metric -> 1 or 0."""
    text: str


# -- statistics --------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> Estimate:
    """Return a mean and its standard error."""
    return ratio(values, [1] * len(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return sum(x) / sum(y) and its standard error over items, to first order.

    r = sum x / sum y;  se = sqrt(n / (n - 1) sum (x - r y)^2) / sum y. With y = 1 it is the mean.
    """
    count, total = len(numerators), math.fsum(denominators)
    value = math.fsum(numerators) / total
    if count < 2:
        return Estimate(value, math.nan)
    rest = (x - value * y for x, y in zip(numerators, denominators, strict=True))
    squares = math.fsum(r * r for r in rest)
    return Estimate(value, math.sqrt(count / (count - 1) * squares) / total)


def mean_of_groups(values: Sequence[float], groups: Sequence[str]) -> Estimate:
    """Return the mean of the groups' means, whatever their sizes, and its standard error."""
    by_group: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        by_group.setdefault(group, []).append(value)
    means = [mean(each) for each in by_group.values()]
    error = math.sqrt(math.fsum(each.error**2 for each in means)) / len(means)
    return Estimate(math.fsum(each.value for each in means) / len(means), error)


def tie_aware_accuracy(values: Sequence[float], right: int) -> float:
    """Return 1 if the right choice has the largest value, 1/n if n choices tie, else 0."""
    best = [place for place, value in enumerate(values) if value == max(values)]
    return 1 / len(best) if right in best else 0.0


def difference(first: Result, second: Result) -> dict[str, Estimate]:
    """Return first - second in every metric, paired by item."""
    if (first.task, first.items) != (second.task, second.items):
        raise ValueError(
            f"{first.model} and {second.model} were evaluated on different items of {first.task}: "
            "evaluate both on the same files with the same --limit"
        )
    metrics = _metrics(
        _minus(first.accuracy, second.accuracy),
        first.groups,
        _both(first.normalized, second.normalized),
        _both(first.flexible, second.flexible),
    )
    bits = _both(first.bits, second.bits)
    return metrics if bits is None else metrics | {"bits per byte": ratio(bits, first.bytes or ())}


def _both(first: Sequence[float] | None, second: Sequence[float] | None) -> Sequence[float] | None:
    return None if first is None or second is None else _minus(first, second)


def _minus(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(first, second, strict=True)]


# -- from scores -------------------------------------------------------------------------------


def summarize(
    requests: Sequence[Request],
    scores: Sequence[Score],
    *,
    items: str,
    normalized: bool,
    model: str = "",
    steps: tuple[int, ...] = (),
    shots: int = 0,
) -> Result:
    """Return the result of one task from the scores of its requests."""
    accuracy, by_length, bits, sizes, chances, groups = [], [], [], [], [], []
    pairs = zip(requests, scores, strict=True)
    for _, group in groupby(pairs, key=lambda pair: pair[0].item):
        asked, group_scores = zip(*group, strict=True)
        right = [request.right for request in asked].index(True)
        values = [score.log_likelihood for score in group_scores]
        if len(asked) == 1:
            accuracy.append(float(group_scores[0].greedy))
        else:
            accuracy.append(tie_aware_accuracy(values, right))
            chances.append(1 / len(asked))
        per_character = [v / r.characters for v, r in zip(values, asked, strict=True)]
        by_length.append(tie_aware_accuracy(per_character, right))
        bits.append(-values[right] / math.log(2))
        sizes.append(asked[right].bytes)
        groups.append(asked[right].group)
    return Result(
        task=requests[0].task,
        model=model,
        items=items,
        steps=steps,
        accuracy=tuple(accuracy),
        normalized=tuple(by_length) if normalized else None,
        bits=tuple(bits),
        bytes=tuple(sizes),
        chance=sum(chances) / len(chances) if chances else None,
        shots=shots,
        groups=tuple(groups) if any(groups) else (),
    )


def summarize_generated(
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    *,
    items: str,
    model: str = "",
    steps: tuple[int, ...] = (),
    shots: int = 0,
) -> Result:
    """Return the result of one generation task from its answers."""
    scores: dict[str, Any] = {
        name: tuple(a.scores[name] for a in answers) for name in answers[0].scores
    }
    groups = tuple(prompt.group for prompt in prompts)
    chances = [1 / prompt.num_choices for prompt in prompts if prompt.num_choices]
    return Result(
        task=prompts[0].task,
        model=model,
        items=items,
        steps=steps,
        **scores,
        chance=sum(chances) / len(chances) if len(chances) == len(prompts) else None,
        shots=shots,
        groups=groups if any(groups) else (),
    )


def averaged(results: Sequence[Result]) -> Result:
    """Return the scores of several checkpoints of a run, averaged item by item."""
    lists: dict[str, Any] = {}
    for name in _SCORES:
        rows = [row for result in results if (row := getattr(result, name)) is not None]
        lists[name] = _average(rows) if rows else None
    steps = tuple(step for result in results for step in result.steps)
    return replace(results[0], steps=steps, **lists)


def _average(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(math.fsum(column) / len(rows) for column in zip(*rows, strict=True))


# -- files -------------------------------------------------------------------------------------


def write_result(folder: Path, result: Result) -> None:
    """Write a task's result into a folder, replacing an older one."""
    summary = {
        name: {"value": e.value, "error": None if math.isnan(e.error) else e.error}
        for name, e in result.metrics.items()
    }
    lists = asdict(result)
    # Exact to seven digits, as float32 is, and a third of the size.
    lists["bits"] = result.bits and [float(f"{value:.7g}") for value in result.bits]
    for name in ("accuracy", "normalized", "flexible"):
        lists[name] = lists[name] and _short(lists[name])
    data = {"format": FORMAT, "metrics": summary, **lists}
    text = json.dumps(data, separators=(",", ":")) + "\n"
    write_output(folder / f"{result.task}.json", text.encode())


def write_answers(folder: Path, task: str, answers: Sequence[Answer]) -> None:
    """Write the generated answers, one line per item."""
    lines = (json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers)
    write_output(folder / f"{task}.answers.jsonl", "".join(lines).encode(errors="replace"))


def _short(values: Sequence[float]) -> list[float | int]:
    return [int(value) if value in (0, 1) else value for value in values]


def read_results(folder: Path) -> dict[str, Result]:
    """Return the results in a folder by task; empty if there are none."""
    if not folder.is_dir():
        return {}
    results = [_read(path) for path in sorted(folder.glob("*.json")) if _is_result(path)]
    return {result.task: result for result in results}


def _is_result(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(32).startswith(b'{"format":%d,"metrics":' % FORMAT)


def _read(path: Path) -> Result:
    names = {field.name for field in fields(Result)}
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        values = {name: value for name, value in data.items() if name in names}
        result: Result = from_dict(Result, values, "it")
        count = len(result.accuracy)
        rows = [row for name in (*_SCORES, "bytes") if (row := getattr(result, name)) is not None]
        if not count or any(len(row) != count for row in rows):
            raise ValueError("its lists have different lengths")
        if (result.bits is None) != (result.bytes is None) or len(result.groups) not in (0, count):
            raise ValueError("its lists do not belong together")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): evaluate again") from error
    return result

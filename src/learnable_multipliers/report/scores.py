"""Scores on benchmarks that `lrm evaluate` wrote into the folders of runs, side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from learnable_multipliers.report.records import Run, number

_FOLDER = re.compile(r"step-(\d+)(?:-(.+))?")
_START = b'{"format":1,"metrics":'


@dataclass(frozen=True)
class Score:
    """Accuracy on one task."""

    value: float
    error: float
    """Standard error over items; nan for a single item."""
    step: int


def benchmark_rows(runs: Sequence[Run]) -> list[tuple[str, str, list[Score | None]]]:
    """Return task, settings and the score of each run at its last evaluated step.

    Settings are what the name of a folder says beside the step: `last-3`, `limit-500`.
    """
    by_run = [_scores(run.folder / "evaluations") for run in runs]
    keys = sorted({key for scores in by_run for key in scores}, key=lambda key: (key[1], key[0]))
    return [(task, about, [s.get((task, about)) for s in by_run]) for task, about in keys]


def _scores(folder: Path) -> dict[tuple[str, str], Score]:
    """Return the scores in a folder of evaluations, by task and settings; later steps win."""
    latest: dict[tuple[str, str], Score] = {}
    for path in sorted(folder.glob("step-*")):
        name = _FOLDER.fullmatch(path.name)
        for file in sorted(path.glob("*.json")) if name else ():
            assert name is not None
            step, key = int(name[1]), (file.stem, name[2] or "")
            score = _score(file, step)
            if score is not None and (key not in latest or latest[key].step < step):
                latest[key] = score
    return latest


def _score(path: Path, step: int) -> Score | None:
    """Return the score in a file; None for a file of another kind."""
    data = path.read_bytes()
    if not data.startswith(_START):
        return None
    try:
        accuracy = json.loads(data)["metrics"]["accuracy"]
        if not isinstance(accuracy, Mapping):
            raise ValueError("accuracy is not an object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): evaluate again") from error
    return Score(number(accuracy.get("value")), number(accuracy.get("error")), step)

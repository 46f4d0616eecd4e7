"""Benchmark scores of the runs that an experiment reports, taken when the model is trained.

The requests are a file of `lrm evaluate --requests-only`. A module that reads the scores names its
tasks in `BENCHMARKS`, and marks the runs to be scored (`Run.scored`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from learnable_multipliers.evaluate import evaluation
from learnable_multipliers.evaluate.models import from_model
from learnable_multipliers.evaluate.requests import RequestSet, read_requests
from learnable_multipliers.evaluate.scoring import BATCH_TOKENS
from learnable_multipliers.experiments.record import Record
from learnable_multipliers.pretrain.data.shards import Manifest
from learnable_multipliers.pretrain.trainer.trainer import Trainer

_BATCH_TOKENS = {"cuda": 1 << 16}
"""By type of device, where there is memory for the logits of more than usual."""

requests_of = cache(read_requests)
"""The requests in a file, which workers read once."""


def check_requests(path: Path, tasks: Sequence[str], data: Path, records: Iterable[Record]) -> None:
    """Raise a ValueError unless a file holds the requests of these tasks, in tokens of the data.

    They must be those that earlier records were scored on: others cannot be compared.
    """
    requests = read_requests(path)
    if missing := [task for task in tasks if task not in requests.checksums]:
        raise ValueError(
            f"{path} holds no requests of {', '.join(missing)}: make it with lrm evaluate {data} "
            f"--eval-data FOLDER --tasks {' '.join(tasks)} --requests-only {path}"
        )
    if requests.tokenizer != Manifest.load(data).tokenizer_sha256:
        raise ValueError(
            f"{path} was made with another tokenizer than that of {data}: make it with "
            f"lrm evaluate {data} --eval-data FOLDER --requests-only {path}"
        )
    before = {(task, its["items"]) for each in records for task, its in each.benchmarks.items()}
    if others := {task for task, items in before if requests.checksums.get(task, items) != items}:
        raise ValueError(
            f"{path} asks other questions of {', '.join(sorted(others))} than earlier records were "
            "scored on, and their scores would not compare: give the file that was used for those "
            "(--requests), or choose another folder (--out)"
        )


def scores(trainer: Trainer, requests: RequestSet) -> dict[str, dict[str, Any]]:
    """Return what the model of a run scores on each task: its metrics, and which items it had.

    Weights and precision are those of the training.
    """
    model, device = trainer.model, trainer.device
    loaded = from_model(model, trainer.data.manifest.tokenizer_sha256)
    evaluation.check(requests, loaded, "the run")
    was_training = model.training
    model.eval()
    # Not compiled: most batches have a length of their own.
    with torch.compiler.set_stance("force_eager"), device.autocast():
        evaluated = evaluation.evaluate(
            loaded,
            requests,
            device=device.device,
            max_length=loaded.max_length,
            batch_tokens=_BATCH_TOKENS.get(device.device.type, BATCH_TOKENS),
        )
    model.train(was_training)
    return {
        name: {"items": result.items}
        | {metric: estimate.value for metric, estimate in result.metrics.items()}
        for name, result in evaluated.results.items()
    }

"""Check that a killed and resumed run equals an uninterrupted run bit for bit.

Runs are compared by their tensors, their counters and their metrics.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.store import Checkpoint
from learnable_multipliers.pretrain.config import CheckpointConfig, TrainConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.trainer.schedule import Schedule
from learnable_multipliers.pretrain.trainer.spikes import DivergenceError
from learnable_multipliers.pretrain.trainer.trainer import Trainer

MEASURED = frozenset({"seconds", "tokens_per_second", "mfu", "memory"})
"""Wall-clock and device metrics, excluded from the comparison."""
# Settings of folder and logging, which do not change what a run computes.
_NOT_COMPUTED = MEASURED | {"config"}


@dataclass(frozen=True)
class Comparison:
    """Number of compared values, and the differences."""

    what: str
    compared: int
    differences: tuple[str, ...]


def check_resume(
    config: TrainConfig, half: int, report: Callable[[str], None] = lambda part: None
) -> list[Comparison]:
    """Train the first steps of a run twice, once killed and resumed, and compare the results.

    A checkpoint is saved after `half` steps. The process is killed some steps later, so that there
    are lines in the log which resuming must remove. `report` is called with the progress.
    """
    config.check()
    planned = Schedule.of_run(config)
    if not 1 <= half <= len(planned) // 2:
        raise ValueError(
            f"the run has {len(planned):,} steps: --steps, half of what is trained, must lie "
            f"between 1 and {len(planned) // 2:,}, got {half:,}"
        )
    # Other loggers would record these test runs.
    log = replace(config.log, tensorboard=False, wandb="", trackio="", drift=False)
    config = replace(config, name=config.name or "run", log=log)
    whole = replace(
        config, out=config.out / "in-one-go", checkpoint=CheckpointConfig(every=0), resume=False
    )
    parted = replace(
        whole, out=config.out / "resumed", checkpoint=CheckpointConfig(every=half, keep=2)
    )
    report(f"{2 * half} steps in one go")
    reason = _train(whole, 2 * half)
    if reason is not None:
        raise DivergenceError(
            f"the run has diverged after {2 * half:,} steps: {reason}. Two such runs may be equal "
            "and prove nothing: check a run that trains"
        )
    killed_at = half + half // 2
    report(f"{killed_at} steps, then SIGKILL")
    _train(parted, killed_at, killed=True)
    report(f"resuming from step {half}")
    _train(replace(parted, resume=True), 2 * half)
    kept = [checkpoints.load_newest(run.out / "checkpoints")[0] for run in (whole, parted)]
    return [*compare_checkpoints(*kept), compare_metrics(whole.out, parted.out)]


def _train(config: TrainConfig, until: int, *, killed: bool = False) -> str | None:
    """Train in a new process; return why it has diverged, if so. Re-raise its errors."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_train_here, config, until, killed).result()
        except BrokenProcessPool as error:
            if not killed:
                raise ValueError(f"a training process ended without a message: {error}") from error
            return None


def _train_here(config: TrainConfig, until: int, killed: bool) -> str | None:
    trainer, reason = Trainer(config), None
    for step in trainer.steps():
        if step == until:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.save()
            reason = trainer.divergence()
            break
    trainer.close()
    return reason


# -- comparison -------------------------------------------------------------------------------


def compare_checkpoints(first: Checkpoint, second: Checkpoint) -> list[Comparison]:
    """Compare the tensors of each file, then the plain data; wall-clock metrics are left out."""
    comparisons = []
    for file in sorted({*first.tensors, *second.tensors}):
        one, other = first.tensors.get(file, {}), second.tensors.get(file, {})
        comparisons.append(compare("weights" if file == "model" else file, one, other))
    return [*comparisons, compare("counters", _counters(first), _counters(second))]


def compare_metrics(first: Path, second: Path) -> Comparison:
    """Compare the records of two folders, one by one and in their order."""
    one, other = (dict(enumerate(without_clock(folder), 1)) for folder in (first, second))
    return compare("metrics", one, other)


def without_clock(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run, without wall-clock and device metrics."""
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_metrics(folder)
    ]


def _counters(kept: Checkpoint) -> dict[str, Any]:
    computed = {key: value for key, value in kept.state.items() if key not in _NOT_COMPUTED}
    return {"step": kept.step, **computed}


def compare(what: str, one: Mapping[Any, Any], other: Mapping[Any, Any]) -> Comparison:
    """Compare tensors, or plain data, by name; every bit counts, and NaN equals itself."""
    names = list(dict.fromkeys((*one, *other)))
    differences = []
    for name in names:
        if name not in one or name not in other:
            differences.append(f"{name} is only in the {'second' if name in other else 'first'}")
        elif difference := _difference(one[name], other[name]):
            differences.append(f"{name}: {difference}")
    return Comparison(what, len(names), tuple(differences))


def _difference(one: Any, other: Any) -> str | None:
    if isinstance(one, Tensor):
        return _tensor_difference(one.detach().cpu(), other.detach().cpu())
    # As text, because NaN equals NaN here.
    texts = repr(one), repr(other)
    if texts[0] == texts[1]:
        return None
    return " and ".join(text if len(text) <= 60 else f"{text[:57]}..." for text in texts)


def _tensor_difference(one: Tensor, other: Tensor) -> str | None:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    # Bytes, because NaN equals NaN here, and 0 does not equal -0.
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    if torch.equal(*bits):
        return None
    distance = (one.double() - other.double()).abs().max().item()
    return f"up to {distance:.1e} apart"

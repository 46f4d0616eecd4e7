"""From a checkpoint to what its tensors show of the equilibrium of noise and decay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from learnable_multipliers.equilibrium import Diagnosis, diagnose
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer.optimizer import make_optimizer
from learnable_multipliers.pretrain.trainer.run_folder import load_checkpoint
from learnable_multipliers.pretrain.trainer.run_state import (
    check_model,
    parse_state,
    restore_,
    state_of,
)
from learnable_multipliers.pretrain.trainer.schedule import steps


@dataclass(frozen=True)
class RunDiagnosis:
    """What a checkpoint shows."""

    name: str
    """Of the run."""
    step: int
    diagnosis: Diagnosis
    notes: tuple[str, ...] = ()
    """What a reader should know: a damaged checkpoint passed over, steps that were skipped."""


def diagnose_run(source: Path) -> RunDiagnosis:
    """Read every tensor of a checkpoint, or of a run's newest good one.

    The seed of the run gives its initial weights, and its schedule the rate of every step.
    """
    checkpoint, notes = load_checkpoint(source)
    state = state_of(checkpoint)
    config: TrainConfig = parse_state(checkpoint, TrainConfig, state.config, "config")
    check_model(config.model, checkpoint)
    model = build(config.model, config.seed)
    optimizer, _ = make_optimizer(model, config.optimizer)
    start = diagnose(optimizer)
    restore_(model, optimizer, checkpoint)
    planned = steps(config.schedule, config.data.batch_sequences, config.data.sequence_length)
    lrs = [config.optimizer.lr * step.lr_factor for step in planned[: checkpoint.step]]
    if state.skipped_steps:
        lrs = _thinned(lrs, state.skipped_steps)
        notes.append(
            f"{state.skipped_steps:,} of {checkpoint.step:,} steps were skipped for bad gradients, "
            "and a checkpoint does not tell which: predictions leave out as many, evenly over the "
            "run"
        )
    return RunDiagnosis(
        config.name, checkpoint.step, diagnose(optimizer, lrs=lrs, start=start), tuple(notes)
    )


def _thinned(lrs: list[float], count: int) -> list[float]:
    """Return the rates without `count` of them, taken out at equal distances."""
    out = {(2 * part + 1) * len(lrs) // (2 * count) for part in range(count)}
    return [lr for step, lr in enumerate(lrs) if step not in out]

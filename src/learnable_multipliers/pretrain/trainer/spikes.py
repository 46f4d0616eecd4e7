"""Detect loss spikes, and choose the checkpoint to roll back to.

Detection uses the mean losses that a run logs anyway, so it adds no device synchronization. Pure
functions of a small state, which is part of checkpoints.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from learnable_multipliers.pretrain.config import SpikeConfig

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


_FAR = 1.0
"""Nats above a uniform guess, and above an earlier loss, that exceed any noise."""


class DivergenceError(ValueError):
    """A run cannot continue because every step is skipped, or has diverged at its end."""


@dataclass(frozen=True)
class LossPoint:
    """The mean loss since the previous point."""

    step: int
    loss: float | None
    """None if no step had a finite loss."""


@dataclass(frozen=True)
class SpikeState:
    """The state of the detector."""

    usual: list[float] = field(default_factory=list)
    """The last losses that were not high, up to the window size."""
    high: list[LossPoint] = field(default_factory=list)
    """Consecutive high points, ending with the last point."""
    good_step: int = 0
    """Step of the last point that was not high."""
    num_rollbacks: int = 0


def limit(usual: Sequence[float], config: SpikeConfig) -> float:
    """Return the loss above which a point is high; infinite until the window is full."""
    if len(usual) < config.window:
        return math.inf
    median = statistics.median(usual)
    deviation = _NORMAL * statistics.median(abs(loss - median) for loss in usual)
    return median + max(config.deviations * deviation, config.min_rise)


def observe(state: SpikeState, point: LossPoint, config: SpikeConfig) -> SpikeState:
    """Return the state after a point; high losses do not enter the usual ones."""
    if point.loss is None or point.loss > limit(state.usual, config):
        return replace(state, high=[*state.high, point])
    usual = [*state.usual, point.loss][-config.window :]
    return replace(state, usual=usual, high=[], good_step=point.step)


def is_spike(state: SpikeState, config: SpikeConfig) -> bool:
    """Return whether the loss has been high for `patience` points."""
    return len(state.high) >= config.patience


def reset_after_spike(state: SpikeState) -> SpikeState:
    """Return the state of a run that continues after a spike: reset the usual loss.

    Otherwise every later point would be a spike again.
    """
    usual = [point.loss for point in state.high if point.loss is not None]
    return replace(state, usual=usual, high=[], good_step=state.high[-1].step)


def divergence(
    state: SpikeState,
    skipped_in_a_row: int,
    evaluation: float | None,
    guess: float,
    config: SpikeConfig,
) -> str | None:
    """Return why a run that ends here has diverged, else None.

    Args:
        evaluation: The last loss on held-out text; None without one.
        guess: The loss of a uniform guess, log(vocabulary size).
    """
    if evaluation is not None and not math.isfinite(evaluation):
        return f"the loss on held-out text is {evaluation}"
    if skipped_in_a_row and (skipped_in_a_row >= config.patience or not state.usual):
        return describe_spike(replace(state, high=[]), skipped_in_a_row)
    high = [point.loss for point in state.high if point.loss is not None]
    if high and evaluation is not None and evaluation > limit(state.usual, config):
        return f"{describe_spike(state, 0)}, and {evaluation:.3f} on held-out text"
    last = (high or state.usual)[-1:]
    # After a few steps the loss may still be that of a large initialization.
    risen = state.good_step >= config.window or any(last[0] > old + _FAR for old in state.usual)
    if last and last[0] > guess + _FAR and risen:
        return f"the loss is {last[0]:.3f}, above the {guess:.3f} of a uniform guess"
    return None


def rollback_steps(saved: Sequence[int], state: SpikeState, every: int) -> list[int]:
    """Return the checkpoints before a spike at multiples of `every`.

    A point that was not high follows each of them, so its weights are known to be good. Checkpoints
    at other steps were saved at an interruption; with them, an interrupted run would roll back to
    another step than an uninterrupted one.
    """
    return [step for step in saved if step < state.good_step and step % every == 0]


def describe_spike(spike: SpikeState, skipped_in_a_row: int) -> str:
    """Return a description of a spike, or of skipped steps."""
    if not spike.high or spike.high[-1].loss is None:
        return f"the last {skipped_in_a_row:,} steps had no finite gradients and were skipped"
    first, last = spike.high[0], spike.high[-1]
    usual = f", {statistics.median(spike.usual):.3f} before" if spike.usual else ""
    return (
        f"loss spike: {last.loss:.3f} at step {last.step:,}, high since step {first.step:,}{usual}"
    )


def spike_ignored_message(config: SpikeConfig, saved: Sequence[int]) -> str:
    """Return advice for a run that continues without a rollback; `saved` are its checkpoints."""
    resume = "resume with a higher --spikes.max-rollbacks, which skips the data of the spike, or "
    return (
        f"the run continues (spikes.max_rollbacks={config.max_rollbacks}). If the loss does not "
        f"recover, {resume if saved else ''}start again with a lower optimizer.lr or a longer "
        "warmup"
    )


def diverged_message(reason: str, saved: Sequence[int]) -> str:
    """Return why a run ended diverged, and what to try; `saved` are its checkpoints."""
    newest = (
        f"Earlier checkpoints are kept: --resume repeats the end from step {saved[-1]:,}, with "
        "--spikes.max-rollbacks 3 without the data of the spike; or start"
        if saved
        else "There is no earlier checkpoint: start"
    )
    return (
        f"the run has diverged: {reason}. {newest} again with a lower optimizer.lr or a longer "
        "warmup"
    )


def skipped_steps_message(step: int, skipped_in_a_row: int, saved: Sequence[int]) -> str:
    """Return why skipped steps end a run, and what to try; `saved` are its checkpoints."""
    resume = (
        "no checkpoint was written since. Resume from the newest one with --resume and "
        "--spikes.max-rollbacks 3, which skips these data, or with --runtime.dtype float32; or "
    )
    none = "there is no checkpoint. Try --runtime.dtype float32, or "
    return (
        f"step {step:,}: the last {skipped_in_a_row:,} steps had no finite gradients and changed "
        f"nothing (spikes.max_skipped); {resume if saved else none}start again with a lower "
        "optimizer.lr or a longer warmup"
    )

"""Learning rate and batch size over a run, as pure functions of the tokens seen so far.

The recipe of the paper: linear warmup, constant rate, exponential decay; a batch that ramps up
while the rate follows its square root. Nothing here has state, so a resumed run is on the same
schedule as one that never stopped.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from learnable_multipliers.pretrain.config import ScheduleConfig


class Step(NamedTuple):
    """One optimizer step of the plan of a run."""

    step: int
    """Number of the step, from 0."""
    tokens_before: int
    """Tokens seen before this step."""
    sequences: int
    """Sequences in the batch of this step."""
    lr_factor: float
    """What the peak learning rate is multiplied by, the rule for small batches included."""


def learning_rate_factor(config: ScheduleConfig, tokens: int) -> float:
    """Return the rate after `tokens` tokens over the peak rate: warmup, constant, decay.

    With the decay's progress p in [0, 1] and factor f: exponential f^-p; linear and cosine go
    from 1 to 1/f along a line and half a cosine. Past the decay the rate stays at 1/f.
    """
    if tokens < config.warmup_tokens:
        return tokens / config.warmup_tokens
    past = tokens - config.decay_start
    if past <= 0 or config.decay_tokens == 0:
        return 1.0
    lowest = 1 / config.decay_factor
    if past >= config.decay_tokens:
        return lowest
    progress = past / config.decay_tokens
    if config.decay_shape == "exponential":
        return config.decay_factor**-progress
    if config.decay_shape == "linear":
        return 1 - (1 - lowest) * progress
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2


def batch_sequences(config: ScheduleConfig, tokens: int, full_sequences: int) -> int:
    """Return the batch size after `tokens` tokens, in sequences.

    The ramp has (full - start) / increment stages of equal length in tokens, each larger than
    the one before by the increment; the full batch begins at `rampup_tokens`.
    """
    if tokens >= config.rampup_tokens:
        return full_sequences
    stages = _rampup_stages(config, full_sequences)
    done = tokens * stages // config.rampup_tokens
    return config.rampup_start_sequences + done * config.rampup_increment_sequences


def steps(config: ScheduleConfig, full_sequences: int, sequence_length: int) -> list[Step]:
    """Return every step of the run, in order.

    The batch of a step is that of the tokens before it; its rate that of the tokens after it, so
    that the first step is not lost to a rate of zero and the last one is at 1/decay_factor. The
    last batch is whole and may pass the end of the run by less than itself.
    """
    for name, value in (("full_sequences", full_sequences), ("sequence_length", sequence_length)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if config.rampup_tokens:
        _rampup_stages(config, full_sequences)
    plan: list[Step] = []
    tokens = 0
    while tokens < config.tokens:
        sequences = batch_sequences(config, tokens, full_sequences)
        after = tokens + sequences * sequence_length
        # Square-root rule: a smaller batch trains at sqrt(batch / full batch) times the rate.
        batch_factor = math.sqrt(sequences / full_sequences)
        factor = learning_rate_factor(config, after) * batch_factor
        plan.append(Step(len(plan), tokens, sequences, factor))
        tokens = after
    return plan


def tokens_after(plan: list[Step], sequence_length: int) -> list[int]:
    """Return the tokens seen after 0, 1, 2, ... and all steps of a plan."""
    return [0, *(step.tokens_before + step.sequences * sequence_length for step in plan)]


def check_divisible(plan: list[Step], dp_degree: int) -> None:
    """Raise a ValueError if a batch of the run cannot be divided among data-parallel ranks."""
    for step in plan:
        if step.sequences % dp_degree:
            raise ValueError(
                f"a batch of {step.sequences} sequences cannot be divided by the data-parallel "
                f"degree of {dp_degree} (parallel.data x parallel.shard): choose "
                "data.batch_sequences and the ramp-up of the schedule as multiples of that"
            )


def _rampup_stages(config: ScheduleConfig, full_sequences: int) -> int:
    start, increment = config.rampup_start_sequences, config.rampup_increment_sequences
    stages, rest = divmod(full_sequences - start, increment)
    if stages < 1 or rest:
        raise ValueError(
            f"the batch cannot ramp from {start} to {full_sequences} sequences in steps of "
            f"{increment}: the full batch must be the start plus one or more increments"
        )
    return stages

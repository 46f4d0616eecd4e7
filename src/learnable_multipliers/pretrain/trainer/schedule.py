"""Learning rate and batch size over a run, as pure functions of the tokens seen so far.

The recipe of the paper: linear warmup, constant rate, exponential decay; a batch that ramps up
while the rate follows its square root. Nothing here has state, so a resumed run is on the same
schedule as one that never stopped.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, overload

from learnable_multipliers._formats import count
from learnable_multipliers.pretrain.config import ScheduleConfig, TrainConfig

MOST_EPOCHS = 4
"""Text repeated more often than this helps little (Muennighoff et al. 2023)."""
_MAX_STAGES = 10_000
"""Maximum stages of a ramp-up, which are kept in memory."""


class Step(NamedTuple):
    """One optimizer step of the plan of a run."""

    step: int
    """Number of the step, from 0."""
    tokens_before: int
    """Tokens seen before this step."""
    sequences: int
    """Sequences in the batch of this step."""
    lr_factor: float
    """Factor on the peak learning rate, including the square-root rule for small batches."""
    multiplier_factor: float = 1.0
    """Factor on the multipliers' relative learning rate."""


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


def multiplier_factor(config: ScheduleConfig, tokens: int) -> float:
    """Return the factor that undoes warmup or decay for multipliers that leave it out, else 1."""
    left_out = "no-warmup" if tokens < config.warmup_tokens else "no-decay"
    return 1 / learning_rate_factor(config, tokens) if config.multipliers == left_out else 1.0


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


class Schedule(Sequence[Step]):
    """Every step of a run, in order; computed lazily, so a run may have any length.

    The batch of a step is that of the tokens before it; its rate that of the tokens after it, so
    that the first step is not lost to a rate of zero and the last one is at 1/decay_factor. The
    last batch is whole and may pass the end of the run by less than itself.
    """

    def __init__(self, config: ScheduleConfig, full_sequences: int, sequence_length: int):
        sizes = {"full_sequences": full_sequences, "sequence_length": sequence_length}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._settings = config, full_sequences, sequence_length
        self._config, self._length = config, sequence_length
        self._stages = list(_stages(config, full_sequences, sequence_length))
        self._starts = [stage.step for stage in self._stages]
        last = self._stages[-1]
        missing = config.tokens - last.tokens_before
        self._num_steps = last.step + -(-missing // (last.sequences * sequence_length))

    @classmethod
    def of_run(cls, config: TrainConfig) -> Schedule:
        """Return the schedule of a run."""
        return cls(config.schedule, config.data.batch_sequences, config.data.sequence_length)

    def __len__(self) -> int:
        return self._num_steps

    @overload
    def __getitem__(self, index: int, /) -> Step: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Step]: ...
    def __getitem__(self, index: int | slice, /) -> Step | list[Step]:
        indices = range(len(self))[index]
        return self._step(indices) if isinstance(indices, int) else [self._step(i) for i in indices]

    def __iter__(self) -> Iterator[Step]:
        ends = [*self._starts[1:], len(self)]
        for stage, end in zip(self._stages, ends, strict=True):
            for step in range(stage.step, end):
                yield self._of_stage(stage, step)

    def tokens_before(self, step: int) -> int:
        """Return the tokens seen before a step; at the number of steps, those of the whole run."""
        stage = self._stage(step)
        return stage.tokens_before + (step - stage.step) * stage.sequences * self._length

    @property
    def batch_sizes(self) -> list[int]:
        """Sequences in a batch, in the order of the run."""
        return [stage.sequences for stage in self._stages]

    @property
    def peak_factor(self) -> float:
        """The largest `lr_factor` of all steps."""
        ends = [*self._starts[1:], len(self)]
        # In a stage the rate rises to the end of the warmup, and falls some time later.
        return max(
            self[min(max(step, stage.step), end - 1)].lr_factor
            for stage, end in zip(self._stages, ends, strict=True)
            for step in self._around_warmup(stage)
        )

    def begins_like(self, other: Schedule, num_steps: int) -> bool:
        """Return whether both have the same first steps."""
        if min(len(self), len(other)) < num_steps:
            return False
        pairs = zip(islice(self, num_steps), islice(other, num_steps), strict=True)
        return self._settings == other._settings or all(one == its for one, its in pairs)

    def _around_warmup(self, stage: Step) -> tuple[int, int]:
        """Return the last step before the end of the warmup and the first at it or after."""
        missing = self._config.warmup_tokens - stage.tokens_before
        reached = stage.step - 1 + -(-missing // (stage.sequences * self._length))
        return reached - 1, reached

    def _stage(self, step: int) -> Step:
        return self._stages[bisect_right(self._starts, step) - 1]

    def _step(self, step: int) -> Step:
        return self._of_stage(self._stage(step), step)

    def _of_stage(self, stage: Step, step: int) -> Step:
        size = stage.sequences * self._length
        before = stage.tokens_before + (step - stage.step) * size
        # A stage holds the factor of its batch alone.
        factor = learning_rate_factor(self._config, before + size) * stage.lr_factor
        relative = multiplier_factor(self._config, before + size)
        return Step(step, before, stage.sequences, factor, relative)


def check_divisible(plan: Schedule, dp_degree: int) -> None:
    """Raise a ValueError if a batch of the run cannot be divided among data-parallel ranks."""
    for sequences in plan.batch_sizes:
        if sequences % dp_degree:
            raise ValueError(
                f"a batch of {sequences} sequences cannot be divided by the data-parallel "
                f"degree of {dp_degree} (parallel.data x parallel.shard): choose "
                "data.batch_sequences and the ramp-up of the schedule as multiples of that"
            )


def repeated_data_warning(config: ScheduleConfig, num_tokens: int) -> str | None:
    """Return a warning if a run repeats data of so many tokens too often, else None."""
    most = MOST_EPOCHS * num_tokens
    if config.tokens <= most:
        return None
    return (
        f"the run reads its {count(num_tokens)} tokens of data {config.tokens / num_tokens:.1f} "
        f"times, but repeating text more than about {MOST_EPOCHS} times helps little: shorten the "
        f"run (--schedule.tokens {most}) or use more text"
    )


def _stages(config: ScheduleConfig, full_sequences: int, sequence_length: int) -> Iterator[Step]:
    """Yield the first step of each batch size that a run has, with the factor of the batch."""
    number = _rampup_stages(config, full_sequences) if config.rampup_tokens else 0
    step = tokens = 0
    while tokens < config.tokens:
        sequences = batch_sequences(config, tokens, full_sequences)
        # Square-root rule: a smaller batch trains at sqrt(batch / full batch) times the rate.
        yield Step(step, tokens, sequences, math.sqrt(sequences / full_sequences))
        if tokens >= config.rampup_tokens:
            return
        # A stage ends with the first batch that reaches the tokens of the next.
        next_stage = tokens * number // config.rampup_tokens + 1
        size, end = sequences * sequence_length, -(-next_stage * config.rampup_tokens // number)
        taken = -(-(min(end, config.tokens) - tokens) // size)
        step, tokens = step + taken, tokens + taken * size


def _rampup_stages(config: ScheduleConfig, full_sequences: int) -> int:
    start, increment = config.rampup_start_sequences, config.rampup_increment_sequences
    stages, rest = divmod(full_sequences - start, increment)
    if stages < 1 or rest:
        raise ValueError(
            f"the batch cannot ramp from {start} to {full_sequences} sequences in steps of "
            f"{increment}: the full batch must be the start plus one or more increments"
        )
    if stages > _MAX_STAGES:
        raise ValueError(
            f"the batch ramps up in {stages:,} stages, and {_MAX_STAGES:,} are the most: raise "
            "schedule.rampup_increment_sequences"
        )
    return stages

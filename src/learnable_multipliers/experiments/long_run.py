"""The gap between runs with and without vector multipliers, over the course of a run (sec. 5).

Both arms see the same text in the same order and are judged on the same held-out text, so their
losses are subtracted point by point. Scores on benchmarks after such a run (table 2) are not judged
here: `lrm evaluate` measures them on checkpoints of the `paper` preset.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.loss_difference import SEEDS
from learnable_multipliers.experiments.presets import (
    NAMES,
    OPTIMIZERS,
    base,
    lengthened,
    with_optimizer,
)
from learnable_multipliers.experiments.readings import Curve, Number
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds
from learnable_multipliers.pretrain.config import CheckpointConfig, ScheduleConfig, TrainConfig
from learnable_multipliers.pretrain.optimizer_config import OptimizerKind
from learnable_multipliers.pretrain.trainer.schedule import Schedule
from learnable_multipliers.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "The gap over a long run"
FIGURE = "Fig. 7, right"
Statistic = Callable[[Curve, ScheduleConfig], Number]
_POINTS: dict[Preset, int] = {"cpu": 12, "gpu": 32}
"""Evaluations of a run: enough for a straight line through the noise of single ones."""

_TIMES = 3
"""Length of a run over that of other experiments; decay is as much weaker, so that 2 wd sum(lr) is
the same."""
_MULTIPLIER_LR: dict[OptimizerKind, float] = {"adamw": 2.0, "muon": 4.0}
"""Learning rate of the multipliers over that of the matrices, as in our first long runs."""


def _tests(optimizer: OptimizerKind) -> tuple[Test, ...]:
    """Return the tests of one optimizer; all statistics are in nats.

    The paper's figure ends its constant stage at a gap of about 0.008. Half of that grew slowly
    over the stage, so a quarter over its second half, and for "slightly shrinking" we take a
    quarter too. Half of each effect is the bound, and as much on the other side contradicts.
    """
    name = NAMES[optimizer]
    return (
        Test(
            name=f"C14.{optimizer}.gap",
            what=f"held-out loss without multipliers minus with, {name}, mean over the last "
            "quarter of the constant stage, nats",
            bound=0.004,
            opposite=-0.004,
            effect=0.008,
        ),
        Test(
            name=f"C14.{optimizer}.grows",
            what=f"rise of that gap over the second half of the constant stage, {name}, by a "
            "straight line, nats",
            bound=0.001,
            opposite=-0.001,
            effect=0.002,
        ),
        Test(
            name=f"C14.{optimizer}.shrinks",
            what=f"gap in the last quarter of the constant stage minus that at the end of the "
            f"decay, {name}, nats",
            bound=0.001,
            opposite=-0.001,
            effect=0.002,
        ),
    )


CLAIMS = (
    Claim(
        id="C14",
        statement="Vector multipliers develop a loss gap that keeps growing at a constant learning "
        "rate and shrinks slightly while the rate decays, with Adam and with Muon.",
        where="Sec. 5.1, Fig. 7 right",
        tests=tuple(test for optimizer in OPTIMIZERS for test in _tests(optimizer)),
        note="The constant stage begins where warmup and batch ramp-up have ended. The end of the "
        "decay is its last quarter, with what follows at the lowest rate.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return a plain and a vector run for each optimizer and seed."""
    arms = [
        ({"arm": arm, "optimizer": optimizer}, _config(preset, optimizer, arm))
        for optimizer in OPTIMIZERS
        for arm in ("plain", "vector")
    ]
    return with_seeds(arms, SEEDS[preset])


def _config(preset: Preset, optimizer: OptimizerKind, arm: str) -> TrainConfig:
    config = _paper() if preset == "paper" else _small(preset, optimizer)
    placement = "full" if arm == "vector" else "none"
    return with_optimizer(config, kind=optimizer, placement=placement)


def _small(preset: Preset, optimizer: OptimizerKind) -> TrainConfig:
    config, tokens = base(preset, "llama"), 4096
    if preset == "gpu":
        decay = config.optimizer.weight_decay / _TIMES
        config, tokens = with_optimizer(lengthened(config, _TIMES), weight_decay=decay), 131_072
    config = with_optimizer(config, multiplier_lr_scale=_MULTIPLIER_LR[optimizer])
    every = math.ceil(len(Schedule.of_run(config)) / _POINTS[preset])
    return replace(config, log=replace(config.log, evaluate_every=every, evaluate_tokens=tokens))


def _paper() -> TrainConfig:
    """Return the paper's run: 160 GT, 40 of decay by 32, 40 more at the lowest rate.

    A checkpoint is kept every GT of those last 40, to average scores over.
    """
    config = base("paper", "hybrid")
    schedule = replace(
        config.schedule,
        tokens=240_000_000_000,
        decay_tokens=40_000_000_000,
        decay_factor=32.0,
        minimum_tokens=40_000_000_000,
    )
    gigatoken = round(1e9 / (config.data.batch_sequences * config.data.sequence_length))
    return replace(
        config,
        schedule=schedule,
        log=replace(config.log, evaluate_every=gigatoken),
        checkpoint=CheckpointConfig(every=gigatoken, keep=41),
    )


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return the gap, its rise at a constant rate and its fall in the decay, by optimizer."""
    by_test: dict[str, BySeed] = {}
    for optimizer in OPTIMIZERS:
        plain, vector = _arms(records, optimizer)
        for name, statistic in (("gap", _late), ("grows", _rise), ("shrinks", _fall)):
            by_test[f"C14.{optimizer}.{name}"] = readings.paired(
                partial(_of_gap, statistic), plain, vector
            )
    return by_test


def _arms(
    records: Sequence[Labelled], optimizer: str
) -> tuple[Mapping[int, Record], Mapping[int, Record]]:
    plain, vector = (
        readings.by_seed(records, arm=arm, optimizer=optimizer) for arm in ("plain", "vector")
    )
    return plain, vector


def gap(plain: Record, vector: Record) -> Curve:
    """Return tokens -> held-out loss of a plain run minus that of one with multipliers."""
    return readings.difference(readings.held_out(plain), readings.held_out(vector))


def _of_gap(statistic: Statistic, plain: Record, vector: Record) -> Number:
    """Return a statistic of the gap between two runs.

    Where one diverged the gap is infinite, and how it moved before is unknown.
    """
    if plain.loss is None or vector.loss is None:
        return readings.loss(plain) - readings.loss(vector) if statistic is _late else math.nan
    return statistic(gap(plain, vector), plain.train_config.schedule)


def _late(gaps: Curve, config: ScheduleConfig) -> Number:
    """Return the mean gap over the last quarter of the constant stage."""
    start, end = _constant(config)
    return _mean(gaps, end - (end - start) / 4, end)


def _rise(gaps: Curve, config: ScheduleConfig) -> Number:
    """Return the rise of the gap over the second half of the constant stage, by a line.

    In the first half arms still differ by how they came out of the warmup.
    """
    start, end = _constant(config)
    middle = (start + end) / 2
    points = [(x, y) for x, y in gaps.items() if middle <= x <= end]
    if len(points) < 3:
        return None
    slope, _ = np.polyfit(*zip(*points, strict=True), deg=1)
    return float(slope) * (end - middle)


def _fall(gaps: Curve, config: ScheduleConfig) -> Number:
    """Return how much smaller the gap is at the end of the decay than before the decay."""
    late = _late(gaps, config)
    final = _mean(gaps, config.decay_start + 3 / 4 * config.decay_tokens, math.inf)
    return None if late is None or final is None or not config.decay_tokens else late - final


def _constant(config: ScheduleConfig) -> tuple[float, float]:
    """Return where the stage at a constant rate begins and ends, in tokens."""
    return max(config.warmup_tokens, config.rampup_tokens), config.decay_start


def _mean(gaps: Curve, low: float, high: float) -> Number:
    values = [value for tokens, value in gaps.items() if low <= tokens <= high]
    return statistics.fmean(values) if values else None


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw the gap and the losses over tokens, with where the decay begins."""
    gaps = {
        NAMES[optimizer]: list(readings.paired(gap, *_arms(records, optimizer)).values())
        for optimizer in OPTIMIZERS
    }
    decay = records[0].record.train_config.schedule.decay_start if records else 0
    plots: list[Plot] = []
    with drawing.canvas(
        plots,
        "Gap on held-out text",
        "The paper sees a gap that grows slowly while the learning rate is constant, to about "
        "0.008 nats, and shrinks slightly while it decays.",
        x="tokens",
        y="loss without multipliers minus with (nats)",
    ) as axes:
        # Before, the two arms are in warmup, and their gap is larger than any later one.
        drawing.curves(axes, gaps, early=0.15)
        drawing.level(axes, 0.0, "no gap")
        drawing.show_zero(axes)
        _mark(axes, decay)
    for optimizer in readings.distinct(records, "optimizer"):
        arms = {
            f"{arm} multipliers" if arm == "vector" else arm: [
                readings.held_out(one.record)
                for one in readings.select(records, arm=arm, optimizer=optimizer)
            ]
            for arm in ("plain", "vector")
        }
        with drawing.canvas(
            plots,
            f"Loss on held-out text, {NAMES[optimizer]}",
            "All runs of a seed see the same text in the same order.",
            x="tokens",
            y="held-out loss (nats)",
        ) as axes:
            drawing.curves(axes, arms, early=0.2)
            _mark(axes, decay)
    return plots


def _mark(axes: Axes, decay: float) -> None:
    """Draw where the learning rate begins to decay."""
    axes.axvline(decay, color=style.COLOURS["muted"], linewidth=1.2, linestyle=(0, (4, 3)))
    style.note(axes, decay, 0.97, " decay", transform=axes.get_xaxis_transform(), va="top")

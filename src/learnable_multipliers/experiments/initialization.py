"""Starts of small models: what all positions have in common, and what it costs.

Not a figure of the paper, but what its runs rest on. Where all matrices start at 0.02, embeddings
are small beside what blocks add, and much of that is the same at every position: from some layer on
there is little left to tell positions apart. Scaling the embedding up removes it. The preset gpu
has the start with the lowest held-out loss here, averaged over both optimizers and all seeds, for
the Llama and the hybrid apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import Claim
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.presets import (
    NAMES,
    OPTIMIZERS,
    SEEDS,
    Family,
    base,
    with_optimizer,
    with_signals,
)
from learnable_multipliers.experiments.readings import Curve
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.model.presets import with_falcon_h1_multipliers
from learnable_multipliers.pretrain.optimizer_config import OptimizerKind

TITLE = "How small models start"
FIGURE = "not in the paper"
CLAIMS: tuple[Claim, ...] = ()

SMALL = "all at 0.02"
FACTOR = "embedding x 5.66"
UNIT = "embedding rms 1"
FALCON = "Falcon-H1's factors"
STARTS: dict[Family, tuple[str, ...]] = {
    "llama": (SMALL, FACTOR, UNIT),
    "hybrid": (SMALL, FACTOR, UNIT, FALCON),
}


def runs(preset: Preset) -> list[Run]:
    """Return a plain run of each start, family and optimizer; AdamW alone on the CPU."""
    arms = [
        (
            {"family": family, "optimizer": optimizer, "start": start},
            started(base(preset, family), start, optimizer),
        )
        for optimizer in (OPTIMIZERS[:1] if preset == "cpu" else OPTIMIZERS)
        for family, starts in STARTS.items()
        for start in starts
    ]
    return with_seeds(arms, SEEDS[preset])


def started(config: TrainConfig, start: str, optimizer: OptimizerKind) -> TrainConfig:
    """Return a plain run that begins this way, whatever the start of the config given."""
    factors = dict.fromkeys(config.model.mup_factors, 1.0)
    model = replace(config.model, init_std=0.02, embedding_std=0.0, **factors)
    if start == FACTOR:
        # Falcon-H1's own, 2^2.5.
        model = replace(model, mup_embedding=2**2.5)
    elif start == UNIT:
        model = replace(model, embedding_std=1.0)
    elif start == FALCON:
        model = with_falcon_h1_multipliers(model)
    config = with_optimizer(replace(config, model=model), kind=optimizer)
    return with_signals(config)


def common_direction(record: Record, at_end: bool = False) -> list[float]:
    """Return the share of the power of each layer's input that is the same at every position.

    The last one is that of the final norm's input.
    """
    signals = record.signals[-1 if at_end else 0] if record.signals else {}
    return signals.get("common_direction", [])


def gradient_ratios(record: Record) -> list[float]:
    """Return the rms of the gradients of query and key over that of value and output, by layer.

    Geometric means, at the first step; nothing where records have no gradients.
    """
    gradients = record.signals[0].get("gradients", {}) if record.signals else {}
    columns = [gradients.get(role, []) for role in ("query", "key", "value", "attention-out")]
    return [
        math.sqrt(query * key / (value * output))
        for query, key, value, output in zip(*columns, strict=True)
        if value and output
    ]


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw the common direction by layer, the loss over steps, and the loss at the end."""
    plots: list[Plot] = []
    for family in readings.distinct(records, "family"):
        of_family = readings.select(records, family=family)
        _draw_directions(plots, family, of_family, at_end=False)
        _draw_directions(plots, family, of_family, at_end=True)
        _draw_gradients(plots, family, of_family)
        for optimizer in readings.distinct(of_family, "optimizer"):
            _draw_losses(plots, family, optimizer, readings.select(of_family, optimizer=optimizer))
        _draw_final(plots, family, of_family)
    return plots


def _draw_directions(
    plots: list[Plot], family: str, records: Sequence[Labelled], *, at_end: bool
) -> None:
    # Every optimizer begins with the same weights; where they end is another matter.
    records = readings.select(records, optimizer=records[0].labels["optimizer"])
    arms: dict[str, list[Curve]] = {
        start: [
            {float(layer): share for layer, share in enumerate(common_direction(record, at_end))}
            for record in seeds
        ]
        for start, seeds in _by_start(records).items()
    }
    when = "at the end" if at_end else "at the first step"
    optimizer = NAMES[str(records[0].labels["optimizer"])]
    with drawing.canvas(
        plots,
        f"What positions have in common {when}, {NAMES[family]}",
        "Square of the mean of a layer's input over positions, over its mean square: 1 where all "
        f"positions are the same, 0 where they have nothing in common. Trained with {optimizer}.",
        x="layer whose input it is (last: the final norm)",
        y="share of power in common",
    ) as axes:
        drawing.curves(axes, arms)
        axes.set_ylim(-0.02, 1.02)


def _draw_gradients(plots: list[Plot], family: str, records: Sequence[Labelled]) -> None:
    # The first gradient is that of the start, whatever the optimizer; Muon averages it.
    arms: dict[str, list[Curve]] = {
        start: [
            {float(i): ratio for i, ratio in enumerate(ratios, 1)}
            for r in seeds
            if (ratios := gradient_ratios(r))
        ]
        for start, seeds in _by_start(readings.select(records, optimizer="adamw")).items()
    }
    if not any(arms.values()):
        return
    with drawing.canvas(
        plots,
        f"Gradients in attention at the first step, {NAMES[family]}",
        "RMS of the gradients of query and key over that of value and output. Where positions "
        "have much in common, what attention looks at changes little.",
        x="layer",
        y="gradients of Q and K over those of V and output",
    ) as axes:
        axes.set_yscale("log")
        drawing.curves(axes, {start: seeds for start, seeds in arms.items() if seeds})


def _draw_losses(
    plots: list[Plot], family: str, optimizer: str, records: Sequence[Labelled]
) -> None:
    arms = {
        start: [readings.trained(record, "loss") for record in seeds]
        for start, seeds in _by_start(records).items()
    }
    with drawing.canvas(
        plots,
        f"Loss by start, {NAMES[family]}, {NAMES[optimizer]}",
        "A poor start shows as a plateau. All runs of a seed see the same text in the same order.",
        x="step",
        y="training loss (nats)",
    ) as axes:
        # The first tenth, from that of chance down, would be all there is to see.
        drawing.curves(axes, arms, early=0.1)


def _draw_final(plots: list[Plot], family: str, records: Sequence[Labelled]) -> None:
    arms = {
        NAMES[optimizer]: {
            start: [readings.loss(record) for record in seeds]
            for start, seeds in _by_start(readings.select(records, optimizer=optimizer)).items()
        }
        for optimizer in readings.distinct(records, "optimizer")
    }
    means = (
        f"{name}: {', '.join(f'{start} {statistics.fmean(of[start]):.3f}' for start in of)}."
        for name, of in arms.items()
    )
    with drawing.canvas(
        plots,
        f"Final loss by start, {NAMES[family]}",
        " ".join(means),
        x="start",
        y="held-out loss at the end (nats)",
    ) as axes:
        drawing.categories(axes, arms)


def _by_start(records: Sequence[Labelled]) -> dict[str, list[Record]]:
    """Return the records of each start that has any, in the order of `STARTS`."""
    by_start = {
        start: [one.record for one in readings.select(records, start=start)]
        for start in STARTS["hybrid"]
    }
    return {start: some for start, some in by_start.items() if some}

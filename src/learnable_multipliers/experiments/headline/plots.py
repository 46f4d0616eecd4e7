"""Plots of the headline: held-out loss over time, what vector gains on the way, and all gains."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.headline.arms import PLAIN, VECTOR
from learnable_multipliers.experiments.headline.gains import finals, gains, reported_loss
from learnable_multipliers.experiments.presets import NAMES
from learnable_multipliers.experiments.record import Labelled


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw loss over time, gains over tokens and the gains of all arms, for each model."""
    plots: list[Plot] = []
    for family in dict.fromkeys(one.labels["family"] for one in finals(records)):
        runs, name = readings.select(finals(records), family=family), NAMES[str(family)]
        _draw_over_time(plots, runs, name)
        _draw_gain_over_tokens(plots, runs, name)
        _draw_gains(plots, runs, name)
    return plots


def _draw_over_time(plots: list[Plot], runs: Sequence[Labelled], model: str) -> None:
    """Draw held-out loss over wall-clock, for plain and multipliers with each optimizer."""
    arms = {
        f"{NAMES[str(optimizer)]}, {name}": _curves(
            readings.select(runs, optimizer=optimizer, arm=arm.name)
        )
        for optimizer in readings.distinct(runs, "optimizer")
        for arm, name in ((PLAIN, "plain"), (VECTOR, "row and column multipliers"))
    }
    with drawing.canvas(
        plots,
        f"Loss over time, {model}",
        "Mean and range over seeds at tuned settings, on validation text, by time on the device "
        "without that of evaluations.",
        x="seconds of training",
        y="held-out loss (nats)",
    ) as axes:
        drawing.curves(axes, {name: seeds for name, seeds in arms.items() if seeds}, early=0.3)


def _curves(records: Sequence[Labelled]) -> list[dict[float, float]]:
    """Return seconds -> held-out loss of each seed, at the mean speed of them all."""
    if not records:
        return []
    speed = fmean(one.record.tokens_per_second for one in records)
    return [
        {tokens / speed: loss for tokens, loss in readings.held_out(one.record).items()}
        for one in records
    ]


def _draw_gain_over_tokens(plots: list[Plot], runs: Sequence[Labelled], model: str) -> None:
    """Draw the loss of plain minus that of vector after equal tokens, paired by seed."""
    gaps = {}
    for optimizer in readings.distinct(runs, "optimizer"):
        plain, vector = (
            readings.by_seed(runs, optimizer=optimizer, arm=arm.name) for arm in (PLAIN, VECTOR)
        )
        losses = (readings.paired(readings.held_out, arm) for arm in (plain, vector))
        if by_seed := readings.paired(readings.difference, *losses):
            gaps[NAMES[str(optimizer)]] = list(by_seed.values())
    with drawing.canvas(
        plots,
        f"Gain on the way, {model}",
        "Held-out loss of plain minus that of row and column multipliers after the same tokens, "
        "paired by seed: mean and range over seeds.",
        x="training tokens",
        y="plain minus multipliers (nats)",
    ) as axes:
        drawing.curves(axes, gaps, early=0.3)
        drawing.show_zero(axes)
        drawing.level(axes, 0.0, "plain")


def _draw_gains(plots: list[Plot], runs: Sequence[Labelled], model: str) -> None:
    """Draw the final gains of all arms over plain."""
    read = reported_loss(runs)
    by_arm = {
        NAMES[str(optimizer)]: {
            str(arm): list(gains(runs, read, {"optimizer": optimizer, "arm": arm}).values())
            for arm in dict.fromkeys(one.labels["arm"] for one in runs)
            if arm != PLAIN.name and readings.select(runs, optimizer=optimizer, arm=arm)
        }
        for optimizer in readings.distinct(runs, "optimizer")
    }
    if not any(by_arm.values()):
        return
    with drawing.canvas(
        plots,
        f"Gain over plain, {model}",
        "Held-out loss of plain runs minus that of an arm, paired by seed.",
        x="arm",
        y="gain over plain (nats)",
        height=320,
    ) as axes:
        drawing.categories(axes, by_arm)
        drawing.level(axes, 0.0, "plain")

"""Differences in the final loss between two arms: the runs, the statistic, its bounds and drawing.

Arms are paired by seed: both begin with the same weights and see the same data in the same order.
They train with Muon: at the size of these runs seeds of AdamW differ too much. Differences between
two of its arms have a standard deviation of 0.036 nats over seeds (median of 105 pairs of arms in
results/experiments), and seeds of a single arm one of 0.026. The two arms of Muon that are there
have 0.004 and 0.007. Multipliers train with AdamW either way.
Multipliers as a whole gain 0.008 nats in the paper (Fig. 7, right), at a loss of 0.75, and 0.013 to
0.027 in docs/first_comparison.md, at 3.7: about twice as much. What one of their details is worth
is a part of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.presets import Family, base, with_optimizer, with_signals
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Labels, Preset
from learnable_multipliers.pretrain.config import TrainConfig

SEEDS: dict[Preset, tuple[int, ...]] = {"cpu": (0,), "gpu": (0, 1, 2, 3, 4), "paper": (0,)}
"""More than elsewhere: if paired differences have a standard deviation of 0.005, five seeds give an
interval of 0.006 either way, three one of 0.012."""
GAIN = 0.016
"""Of multipliers as a whole, in nats at the size of these runs: twice the paper's 0.008."""
CLEAR = 0.002
"""The smallest difference that says which arm is better: the paper's own are 0.002 to 0.02."""


def plain(preset: Preset, family: Family) -> TrainConfig:
    """Return the run without multipliers that arms change; the paper's own are with AdamW."""
    kind = "adamw" if preset == "paper" else "muon"
    return with_signals(with_optimizer(base(preset, family), kind=kind))


def hurts(name: str, what: str, effect: float = GAIN / 2) -> Test:
    """Return the test of a change that the paper finds to be worse.

    Args:
        effect: In nats at the size of these runs; where the paper gives no number, half the gain
            of multipliers.
    """
    what = f"{what}: held-out loss, nats"
    return Test(name=name, what=what, bound=CLEAR, opposite=-CLEAR, effect=effect)


def between(records: Sequence[Labelled], arm: Labels, reference: Labels) -> dict[int, float]:
    """Return the loss of one arm minus that of another, for every seed that has both."""
    return readings.paired(
        of, readings.by_seed(records, **arm), readings.by_seed(records, **reference)
    )


def of(ours: Record, theirs: Record) -> float:
    """Return the loss of one run minus that of another; NaN if both diverged."""
    return readings.loss(ours) - readings.loss(theirs)


def plot(
    records: Sequence[Labelled],
    arms: Mapping[str, Labels],
    reference: Labels,
    *,
    title: str,
    caption: str,
    against: str,
) -> list[Plot]:
    """Draw the differences of named arms from one of them.

    Args:
        against: What the reference is called.
    """
    differences = {
        name: list(between(records, labels, reference).values()) for name, labels in arms.items()
    }
    plots: list[Plot] = []
    y = f"held-out loss minus that of {against}, nats"
    with drawing.canvas(plots, title, caption, x="arm", y=y) as axes:
        drawing.categories(axes, {"mean and range of the seeds": differences})
        drawing.level(axes, 0.0, against)
    return plots

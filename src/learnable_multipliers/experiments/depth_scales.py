"""Scalars on all matrices against none: the scale of block outputs by depth (sec. 3.1).

The two arms share initial weights and data order seed by seed, and the ratio of their output norms
is read layer by layer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.presets import SEEDS, base, with_scalars, with_signals
from learnable_multipliers.experiments.readings import Curve, Number
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds

TITLE = "Scales of block outputs by depth"
FIGURE = "Fig. 2"
_OUTPUTS = {"attention": "attention_out", "SSM": "ssm_out", "MLP": "mlp_out"}
_LAST = {"attention": "attention-out", "SSM": "ssm-out", "MLP": "down"}
_INTERNAL = {"query": "query", "gate": "gate", "z": "ssm-z", "dt": "ssm-dt"}

# The paper gives no number for this figure, so the bounds are ours: a trend is a fifth from the
# first layer to the last (as much down contradicts; a plot shows twice that), variation between
# layers a standard deviation of 15% (2% or less contradicts).
CLAIMS = (
    Claim(
        id="C6",
        statement="With scalar multipliers on all matrices, block outputs grow towards later "
        "layers against a run without; the multipliers of attention outputs differ between layers "
        "of the second half, and those of dt between all layers.",
        where="Sec. 3.1, Fig. 2",
        tests=(
            Test(
                name="C6.trend",
                what="rise of log(output norm with scalars / without) from the first layer to the "
                "last, by a straight line, mean over attention, SSM and MLP",
                bound=0.2,
                opposite=-0.2,
                effect=0.4,
            ),
            Test(
                name="C6.attention",
                what="standard deviation over the layers of the second half of log(multiplier) of "
                "the attention output",
                bound=0.15,
                opposite=0.02,
                effect=0.15,
            ),
            Test(
                name="C6.dt",
                what="standard deviation over layers of log(multiplier) of dt",
                bound=0.15,
                opposite=0.02,
                effect=0.15,
            ),
        ),
        note="The paper's model has 36 layers; ours have few, so that a trend over depth is short. "
        "In short runs the multipliers are learned in logarithms, to reach their scale in time.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return a plain hybrid and one with scalars for each seed."""
    plain = with_signals(base(preset, "hybrid"))
    arms = [({"arm": "plain"}, plain), ({"arm": "scalar"}, with_scalars(plain, preset))]
    return with_seeds(arms, SEEDS[preset])


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return the trend of the ratio over depth and the spread of multipliers, by seed."""
    records = readings.finished(records)
    plain, scalar = (readings.by_seed(records, arm=arm) for arm in ("plain", "scalar"))
    return {
        "C6.trend": readings.paired(_trend, scalar, plain),
        "C6.attention": readings.paired(
            lambda record: _spread(_second_half(readings.layer_scalars(record, "attention-out"))),
            scalar,
        ),
        "C6.dt": readings.paired(
            lambda record: _spread(readings.layer_scalars(record, "ssm-dt")), scalar
        ),
    }


def ratios(scalar: Record, plain: Record, block: str) -> list[float] | None:
    """Return the output norm of a block with scalars over that without, by layer."""
    ours, theirs = (
        readings.final_signals(record).get("activations", {}).get(_OUTPUTS[block])
        for record in (scalar, plain)
    )
    if not ours or not theirs or len(ours) != len(theirs) or not all(x > 0 for x in ours + theirs):
        return None
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _trend(scalar: Record, plain: Record) -> Number:
    by_block = [ratios(scalar, plain, block) for block in _OUTPUTS]
    rises = [_rise(ratio) for ratio in by_block if ratio is not None]
    return statistics.fmean(rises) if len(rises) == len(by_block) else None


def _rise(ratio: Sequence[float]) -> float:
    """Return how much log(ratio) rises over the depth of the model, by least squares."""
    depth = np.linspace(0, 1, len(ratio))
    return float(np.polyfit(depth, np.log(ratio), 1)[0])


def _second_half(scalars: Sequence[float] | None) -> Sequence[float] | None:
    """Return the scalars of the second half of the layers, of two at least."""
    return None if scalars is None else scalars[-max(2, len(scalars) - len(scalars) // 2) :]


def _spread(scalars: Sequence[float] | None) -> Number:
    """Return the standard deviation of the logarithm over layers."""
    if not scalars or len(scalars) < 2 or min(scalars) <= 0:
        return None
    return statistics.stdev(math.log(scalar) for scalar in scalars)


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw the ratio of output norms, and multipliers at the end of and inside blocks, by layer."""
    records = readings.finished(records)
    plain, scalar = (readings.by_seed(records, arm=arm) for arm in ("plain", "scalar"))
    ratio = {
        block: [_by_layer(ratios(scalar[s], plain[s], block)) for s in sorted(scalar) if s in plain]
        for block in _OUTPUTS
    }
    panels = (
        (
            "Block outputs by depth",
            "output norm with scalars over that without",
            "The paper sees an overall rise towards later layers.",
            ratio,
        ),
        (
            "Multipliers of block outputs",
            "scalar of the last matrix of a block",
            "The paper sees attention layers of the second half differ.",
            _multipliers(scalar, _LAST),
        ),
        (
            "Multipliers inside blocks",
            "scalar of a matrix inside a block",
            "The paper sees large differences between layers for dt.",
            _multipliers(scalar, _INTERNAL),
        ),
    )
    plots: list[Plot] = []
    for title, y, caption, arms in panels:
        with drawing.canvas(plots, title, caption, x="layer", y=y) as axes:
            drawing.curves(axes, arms)
            drawing.log_limits(axes, "y")
            axes.set_xlim(1, max(2.0, axes.dataLim.x1))
    return plots


def _multipliers(records: dict[int, Record], roles: dict[str, str]) -> dict[str, list[Curve]]:
    return {
        name: [_by_layer(readings.layer_scalars(records[seed], role)) for seed in sorted(records)]
        for name, role in roles.items()
    }


def _by_layer(values: Sequence[float] | None) -> Curve:
    return dict(enumerate(values or (), 1))

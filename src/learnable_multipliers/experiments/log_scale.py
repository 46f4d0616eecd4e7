"""Multipliers learned as they are, or as logarithms (sec. 2).

The paper reports at most a slight gain from logarithms, and less stability: a step changes a
multiplier by a factor then, so that drift along symmetries is exponential. Whether that is so shows
at a learning rate of the multipliers at which they move far within a short run.
"""

from __future__ import annotations

from collections.abc import Sequence

from learnable_multipliers.experiments import drawing, loss_difference, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.loss_difference import GAIN, SEEDS
from learnable_multipliers.experiments.presets import with_optimizer
from learnable_multipliers.experiments.record import Labelled
from learnable_multipliers.experiments.run import Labels, Preset, Run, with_seeds
from learnable_multipliers.experiments.symmetry_drift import residual_stream

TITLE = "Logarithms of multipliers"
FIGURE = "Sec. 2"
FAST = 10.0
"""Learning rate of the multipliers over that of the matrices, where stability is tested."""
_RATES = (1.0, FAST)

CLAIMS = (
    Claim(
        id="C18",
        statement="Multipliers learned as logarithms bring at most a slight gain, and are less "
        "stable.",
        where="Sec. 2",
        tests=(
            # Slight: a third of what multipliers gain as a whole. As much again as that gain is a
            # contradiction.
            Test(
                name="C18.gain",
                what="gain of logarithms, linear minus log: held-out loss, nats",
                bound=0.005,
                side="at most",
                opposite=GAIN,
                effect=GAIN,
            ),
            # What would take back all that multipliers gain. The paper's own runs end in NaN.
            Test(
                name="C18.stable",
                what="what ten times the learning rate of the multipliers costs logarithms more "
                "than linear ones: held-out loss, nats",
                bound=GAIN,
                opposite=-GAIN,
                effect=0.1,
            ),
        ),
        note="Row and column multipliers on every matrix but the head. A run that diverged has an "
        "infinite loss.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return linear and log multipliers at the usual rate and a fast one, and a plain run."""
    plain = loss_difference.plain(preset, "llama")
    arms = [
        (
            {"arm": scale, "rate": rate},
            with_optimizer(
                plain, placement="full", multiplier_scale=scale, multiplier_lr_scale=rate
            ),
        )
        for rate in _RATES
        for scale in ("linear", "log")
    ]
    return with_seeds([*arms, ({"arm": "plain"}, plain)], SEEDS[preset])


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return what logarithms gain, and what a fast rate costs them."""
    excess = [_excess(records, rate) for rate in _RATES]
    return {
        "C18.gain": {seed: -value for seed, value in excess[0].items()},
        "C18.stable": readings.paired(lambda usual, fast: fast - usual, *excess),
    }


def _excess(records: Sequence[Labelled], rate: float) -> dict[int, float]:
    """Return the loss with logarithms minus that without, at one rate."""
    arms: list[Labels] = [{"arm": arm, "rate": rate} for arm in ("log", "linear")]
    return loss_difference.between(records, *arms)


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw losses against a plain run, and how the residual stream grows."""
    names = {"linear": "multipliers", "log": "their logarithms"}
    plots: list[Plot] = []
    with drawing.canvas(
        plots,
        "Loss at the end",
        "Mean and range over seeds; a triangle is a run that diverged. The paper finds at most "
        "a slight gain of logarithms, and less stability.",
        x="learning rate of the multipliers over that of the matrices",
        y="held-out loss minus that of no multipliers, nats",
    ) as axes:
        differences = {
            name: {rate: _over_plain(records, {"arm": arm, "rate": rate}) for rate in _RATES}
            for arm, name in names.items()
        }
        drawing.scan(axes, differences)
        drawing.level(axes, 0.0, "no multipliers")
    with drawing.canvas(
        plots,
        "Growth of the residual stream",
        "Mean over the layers of log10 of the rms after each: a scale that no loss holds, so "
        "that it shows drift. In logarithms a step changes a multiplier by a factor.",
        x="step",
        y="log10 of the residual stream's rms",
    ) as axes:
        curves = {
            f"{name}, rate x{rate:g}": [
                residual_stream(one.record) for one in readings.select(records, arm=arm, rate=rate)
            ]
            for rate in _RATES
            for arm, name in names.items()
        }
        drawing.curves(axes, curves)
    return plots


def _over_plain(records: Sequence[Labelled], labels: Labels) -> list[float]:
    return list(loss_difference.between(records, labels, {"arm": "plain"}).values())

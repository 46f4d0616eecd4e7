"""Drift of multipliers along the symmetries of the model, and what a light decay does (sec. 4.1).

Scaling the queries and dividing the keys by the same number changes nothing in the model, and
neither does scaling the whole residual stream: only decay of the multipliers holds their scale.

How far decay can pull is its rate times the sum of the multipliers' learning rates: 0.07 in the
paper if its multipliers train with the rate of its matrices, which it does not say, and 0.5 if they
train with the 1e-2 of its MLP experiment. Short runs therefore have a higher rate and more decay
for multipliers; everything between 0.06 and 0.6 tests the claim.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.presets import (
    SEEDS,
    base,
    lengthened,
    summed_lr,
    with_optimizer,
    with_signals,
)
from learnable_multipliers.experiments.readings import Number
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.metrics.meters import QUANTILES
from learnable_multipliers.report import style

TITLE = "Drift along symmetries"
FIGURE = "Fig. 4"
LENGTH: dict[Preset, int] = {"cpu": 2, "gpu": 3, "paper": 1}
"""Times the length of the usual run: matrices are to be in equilibrium for most of it."""
RATE: dict[Preset, float] = {"cpu": 10.0, "gpu": 10.0, "paper": 1.0}
"""Learning rate of the multipliers over that of the matrices."""
LIGHT: dict[Preset, float] = {"cpu": 5e-3, "gpu": 8e-3, "paper": 2e-3}
"""The light decay; 2e-3 is the paper's."""
_LEGEND = {"none": "no decay", "light": "light decay"}

CLAIMS = (
    Claim(
        id="C8",
        statement="Without decay of the multipliers the ratio of the query's to the key's drifts "
        "while their product stays; a light decay suppresses the drift.",
        where="Sec. 4.1, Fig. 4a",
        tests=(
            # The paper's axis goes to 3.5 decades.
            Test(
                name="C8.drift",
                what="how much farther the ratio of query to key multipliers moves without decay "
                "than with the light one, in decades, mean over layers",
                bound=math.log10(2),
                opposite=-0.1,
                effect=3.0,
            ),
            Test(
                name="C8.held",
                what="how far that ratio moves with the light decay, in decades",
                bound=math.log10(2),
                side="at most",
                opposite=1.0,
                effect=3.0,
            ),
        ),
        note="The multiplier of a matrix is the rms of its rows' times that of its columns'. The "
        "paper's runs have 25,000 steps. Rows of queries and keys that are paired one to one get "
        "the same updates from AdamW and cannot drift; heads that share a key can. That their "
        "product stays is drawn, not judged.",
    ),
    Claim(
        id="C9",
        statement="Without decay of the multipliers the residual stream grows without bound; a "
        "light decay suppresses the growth.",
        where="Sec. 4.1, Fig. 4b",
        tests=(
            # The paper's axis, the logarithm of the rms, goes to 6 within 25,000 steps: more than a
            # decade, whichever logarithm it is. A quarter more is growth.
            Test(
                name="C9.growth",
                what="growth of the residual stream's rms without decay from 40% to 80% of the "
                "steps, in decades, mean over layers",
                bound=0.1,
                opposite=-0.1,
                effect=1.0,
            ),
            Test(
                name="C9.held",
                what="rms of the residual stream at the end without decay over that with the "
                "light one, in decades, mean over layers",
                bound=0.1,
                opposite=-0.05,
                effect=1.0,
            ),
        ),
        note="From 40% to 80% of a run the learning rate is constant, and matrices have come to "
        "their equilibrium: before and after, the residual stream changes with their norms. A run "
        "that diverged is read where it was last seen.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return a hybrid with all multipliers, with and without their light decay."""
    usual = with_signals(lengthened(base(preset, "hybrid"), LENGTH[preset]))
    usual = with_optimizer(usual, placement="full", multiplier_lr_scale=RATE[preset])
    decays = {"none": 0.0, "light": LIGHT[preset]}
    arms = [
        ({"arm": arm}, with_optimizer(usual, multiplier_weight_decay=decay))
        for arm, decay in decays.items()
    ]
    return with_seeds(arms, SEEDS[preset])


def pull(config: TrainConfig) -> float:
    """Return the decay of the multipliers times the sum of their learning rates."""
    optimizer = config.optimizer
    return optimizer.multiplier_weight_decay * optimizer.multiplier_lr_scale * summed_lr(config)


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return how far ratios and residual streams moved without decay and with the light one."""
    free, held = (readings.by_seed(records, arm=arm) for arm in ("none", "light"))
    ratios = [readings.paired(ratio_drift, arm) for arm in (free, held)]
    at = {part: readings.paired(partial(_residual, part=part), free) for part in (0.4, 0.8, 1.0)}
    end = readings.paired(partial(_residual, part=1.0), held)
    return {
        "C8.drift": readings.paired(operator.sub, *ratios),
        "C8.held": ratios[1],
        "C9.growth": readings.paired(operator.sub, at[0.8], at[0.4]),
        "C9.held": readings.paired(operator.sub, at[1.0], end),
    }


def ratio_drift(record: Record) -> Number:
    """Return how far log10(query / key) has moved since the first step, mean over layers."""
    layers = [layer for layer in trajectories(record) if len(layer) > 1]
    return fmean(abs(layer[-1][1] - layer[0][1]) for layer in layers) if layers else None


def trajectories(record: Record) -> list[list[tuple[float, float]]]:
    """Return log10 of the product and of the ratio of query and key multipliers, over the run.

    One list for each layer.
    """
    queries, keys = (readings.names_of(record, role) for role in ("query", "key"))
    return [
        [
            (math.log10(query * key), math.log10(query / key))
            for weights in record.weights
            if (query := _scale(weights, names[0])) and (key := _scale(weights, names[1]))
        ]
        for names in zip(queries, keys, strict=True)
    ]


def _scale(weights: Mapping[str, Any], name: str) -> Number:
    """Return the rms of a matrix's row multipliers times that of its column multipliers."""
    multipliers = weights.get("multipliers", {}).get(name, {})
    value = math.prod(map(rms_of_quantiles, multipliers.values()))
    return value if multipliers and 0 < value < math.inf else None


def rms_of_quantiles(values: Sequence[float]) -> float:
    """Return the rms of numbers that are spread evenly between their quantiles."""
    pieces = zip(QUANTILES, QUANTILES[1:], values, values[1:], strict=False)
    # The mean square of numbers spread evenly from a to b.
    return math.sqrt(sum((v - u) * (a * a + a * b + b * b) / 3 for u, v, a, b in pieces))


def _residual(record: Record, *, part: float) -> Number:
    """Return log10 of the residual stream's rms after a part of the steps of a run."""
    stream = residual_stream(record)
    seen = [value for step, value in stream.items() if step <= part * max(stream)]
    return seen[-1] if seen else None


def residual_stream(record: Record) -> dict[float, float]:
    """Return log10 of the rms of the residual stream after each layer, mean of these, by step."""

    def after_layers(signals: Mapping[str, Any]) -> Number:
        rms = readings.geometric_mean(signals.get("activations", {}).get("residual", [])[1:])
        return None if rms is None else math.log10(rms)

    return readings.over_steps(record.signals, after_layers)


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw the paths of query and key multipliers, and the residual stream over the steps."""
    plots: list[Plot] = []
    with drawing.canvas(
        plots,
        "Query and key multipliers",
        "Path of each layer and seed from the start of the run to its end (dot). The paper "
        "finds paths that go up without decay, at a constant product, and short ones with a "
        "light decay.",
        x="log10(query x key): product of the multipliers",
        y="log10(query / key): ratio of the multipliers",
        height=320,
    ) as axes:
        for index, (arm, name) in enumerate(_LEGEND.items()):
            colour, _ = style.run_look(index)
            label: str | None = name
            for one in readings.select(records, arm=arm):
                for layer in filter(None, trajectories(one.record)):
                    points = list(zip(*layer, strict=True))
                    axes.plot(*points, color=colour, linewidth=1, alpha=0.6, label=label)
                    axes.plot(*layer[-1], "o", color=colour, markersize=4)
                    label = None
    with drawing.canvas(
        plots,
        "Growth of the residual stream",
        "Mean over the layers of log10 of the rms after each. The paper finds growth without "
        "an end without decay, and none with a light decay.",
        x="step",
        y="log10 of the residual stream's rms",
    ) as axes:
        curves = {
            name: [residual_stream(one.record) for one in readings.select(records, arm=arm)]
            for arm, name in _LEGEND.items()
        }
        drawing.curves(axes, curves)
    return plots

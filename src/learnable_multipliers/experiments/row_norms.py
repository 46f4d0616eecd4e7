"""Distributions of row norms of effective weights, with and without vector multipliers (sec. 3.1).

Rows of the input projections of attention and SSM and of the MLP's gate are the internal features
of these blocks. Each norm is divided by the mean of its layer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.presets import SEEDS, base, with_optimizer, with_signals
from learnable_multipliers.experiments.readings import Number
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds
from learnable_multipliers.report import style

TITLE = "Distributions of row norms"
FIGURE = "Fig. 3"
GROUPS = {
    "attention": ("query", "key", "value"),
    "SSM": ("ssm-z", "ssm-x", "ssm-B", "ssm-C", "ssm-dt"),
    "gate": ("gate",),
}
"""Projections whose rows are compared; the paper shows no others."""
_TITLES = {"attention": "attention input", "SSM": "SSM input", "gate": "MLP gate"}
# Of the multipliers; 0 is the rate of the matrices. The paper's rate of vectors is not known; 1e-2
# is that of its scalars, and lets a multiplier move by 5 in a short run. In a hybrid of width 64,
# 400 steps at lr 4e-3, it had the lowest loss: 3.914 plain; 3.866, 3.860, 3.864, 3.875 with
# multipliers at 4e-3, 1e-2, 2e-2, 4e-2. Distributions were the broader the higher the rate.
_LR: dict[Preset, float] = {"cpu": 6e-2, "gpu": 1e-2, "paper": 0.0}
Weight = Literal["raw", "effective"]
_NORMAL_95 = statistics.NormalDist().inv_cdf(0.95)


def _broadens(name: str, what: str) -> Test:
    """Return the test of a distribution that multipliers should broaden: by half at least.

    The paper says "significantly", on an axis from 0.1 to 10 on which the distribution without
    multipliers is "very narrow": an effect of 0.7, twice as broad, at least. Narrower by a fifth
    contradicts.
    """
    return Test(
        name=name,
        what=f"log of the ratio of spreads, with over without multipliers, {what}; the spread is "
        "the deviation of log(row norm / mean of its layer), from its 5% and 95% quantiles",
        bound=0.4,
        opposite=-0.2,
        effect=0.7,
    )


CLAIMS = (
    Claim(
        id="C7",
        statement="Without multipliers, row norms within a layer are all but equal; vector "
        "multipliers broaden their distribution significantly.",
        where="Sec. 3.1, Fig. 3",
        tests=(
            _broadens("C7.attention", "rows of query, key and value"),
            _broadens("C7.ssm", "rows of z, x, B, C and dt"),
            _broadens("C7.gate", "rows of the gate"),
            # On an axis of two decades, a narrow peak is one with most rows within 30% of their
            # mean; a factor of two either way is not narrow.
            Test(
                name="C7.narrow",
                what="spread without multipliers, the largest of attention, SSM and gate",
                bound=0.3,
                side="at most",
                opposite=0.7,
                effect=0.7,
            ),
        ),
        note="Roles weigh the same in a spread. It grows with the learning rate of the "
        "multipliers, which is chosen by loss.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return a plain hybrid and one with row and column multipliers for each seed."""
    plain = with_signals(base(preset, "hybrid"))
    vector = with_optimizer(plain, placement="full", multiplier_lr=_LR[preset])
    return with_seeds([({"arm": "plain"}, plain), ({"arm": "vector"}, vector)], SEEDS[preset])


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return how much multipliers broaden each distribution, and how narrow the plain ones are."""
    records = readings.finished(records)
    plain, vector = (readings.by_seed(records, arm=arm) for arm in ("plain", "vector"))
    broader = {
        f"C7.{group.lower()}": readings.paired(partial(_broadening, group=group), vector, plain)
        for group in GROUPS
    }
    return {**broader, "C7.narrow": readings.paired(_widest, plain)}


def spread(record: Record, group: str, weight: Weight = "effective") -> Number:
    """Return the spread of row norms over the means of their layers, rms over roles.

    It is log(95% quantile / 5% quantile) over that of a normal distribution of deviation 1: rows
    whose multiplier passes zero would decide a standard deviation.
    """
    rows = readings.final_signals(record).get("rows", {})
    quantiles = [rows.get(role, {}).get(weight, {}).get("pooled") for role in GROUPS[group]]
    if not all(pooled and pooled[1] > 0 for pooled in quantiles):
        return None
    # 21 quantiles: 0%, 5%, ... 100%.
    spreads = [math.log(pooled[19] / pooled[1]) / (2 * _NORMAL_95) for pooled in quantiles]
    return math.sqrt(statistics.fmean(spread**2 for spread in spreads))


def _broadening(vector: Record, plain: Record, group: str) -> Number:
    ours, theirs = spread(vector, group), spread(plain, group)
    return math.log(ours / theirs) if ours and theirs else None


def _widest(record: Record) -> Number:
    spreads = [spread(record, group) for group in GROUPS]
    return None if None in spreads else max(value for value in spreads if value is not None)


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw the share of rows below each norm, for each group of projections."""
    arms: tuple[tuple[str, str, Weight], ...] = (
        ("without multipliers", "plain", "effective"),
        ("with, effective weights", "vector", "effective"),
        ("with, raw weights", "vector", "raw"),
    )
    records = readings.finished(records)
    plots: list[Plot] = []
    for group in GROUPS:
        with drawing.canvas(
            plots,
            f"Row norms, {_TITLES[group]}",
            "All layers and seeds together. A steep curve is a narrow distribution; the paper "
            "sees it without multipliers, and a much broader one with them.",
            x="row norm / mean of its layer",
            y="share of rows below",
        ) as axes:
            for index, (label, arm, weight) in enumerate(arms):
                of_arm = [one.record for one in readings.select(records, arm=arm)]
                norms, shares = _distribution(of_arm, group, weight)
                colour, line = style.run_look(index)
                axes.plot(norms, shares, color=colour, linestyle=line, label=label)
            # The paper's axis.
            style.log_axis(axes, "x", 0.1, 10)
            axes.set_ylim(0, 1)
    return plots


def _distribution(
    records: Iterable[Record], group: str, weight: Weight
) -> tuple[list[float], list[float]]:
    """Return norms and the share of rows below each, from evenly spaced quantiles of each role."""
    rows = [readings.final_signals(record).get("rows", {}) for record in records]
    norms = sorted(
        norm
        for by_role in rows
        for role in GROUPS[group]
        for norm in by_role.get(role, {}).get(weight, {}).get("pooled", ())
        if norm > 0
    )
    return norms, [(index + 0.5) / len(norms) for index in range(len(norms))]

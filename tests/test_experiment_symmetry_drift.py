"""Drift of ratios and of the residual stream is read from records as it was put in."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from learnable_multipliers.experiments import symmetry_drift
from learnable_multipliers.experiments.presets import (
    base,
    lengthened,
    rates,
    summed_lr,
    with_signals,
)
from learnable_multipliers.experiments.run import Labels
from learnable_multipliers.pretrain.metrics.meters import QUANTILES
from shuffling import World, made_up, made_up_record, verdicts

LAYERS = 2
QUERY, KEY = "layers.{}.q_proj.weight", "layers.{}.k_proj.weight"


def world(ratio: dict[str, float], residual: dict[str, float]) -> World:
    """Return a world in which these are the drift and the growth over a run, in decades."""

    def fields(labels: Labels, noise: random.Random) -> dict[str, Any]:
        arm = str(labels["arm"])
        weights, signals = [], []
        for step in range(11):
            part = step / 10
            apart = 10 ** (part * (ratio[arm] + noise.gauss(0, 0.02)) / 2)
            multipliers = {}
            for layer in range(LAYERS):
                sign = (-1) ** layer
                for name, value in ((QUERY, apart**sign), (KEY, apart**-sign)):
                    flat = [value] * len(QUANTILES)
                    multipliers[name.format(layer)] = {"row": flat, "col": [1.0] * len(flat)}
            weights.append({"step": step + 1, "multipliers": multipliers})
            rms = 10 ** (part * residual[arm] + noise.gauss(0, 0.01))
            signals.append({"step": step + 1, "activations": {"residual": [0.02, rms, 2 * rms]}})
        weights[-1]["roles"] = {
            name.format(layer): role
            for name, role in ((QUERY, "query"), (KEY, "key"))
            for layer in range(LAYERS)
        }
        return {"weights": weights, "signals": signals}

    return fields


RIGHT = world({"none": 1.2, "light": 0.1}, {"none": 1.0, "light": 0.3})


def test_quantiles_give_the_rms_of_what_lies_evenly_between_them():
    assert symmetry_drift.rms_of_quantiles([2.0] * 7) == pytest.approx(2.0)
    # Even from 0 to 1: the mean square is 1/3.
    assert symmetry_drift.rms_of_quantiles(QUANTILES) == pytest.approx(math.sqrt(1 / 3))


def test_path_is_product_and_ratio_of_row_times_column():
    run = symmetry_drift.runs("gpu")[0]
    quantiles = [1.0] * len(QUANTILES)
    multipliers = {
        "q": {"row": [4.0] * 7, "col": [5.0] * 7},
        "k": {"row": [0.5] * 7, "col": quantiles},
    }
    weights = [{"step": 1, "multipliers": multipliers, "roles": {"q": "query", "k": "key"}}]
    record = made_up_record(run, {}, weights=weights)
    assert symmetry_drift.trajectories(record) == [[pytest.approx((1.0, math.log10(40.0)))]]


@pytest.mark.parametrize(
    ("ratio", "residual", "expected"),
    [
        ((1.2, 0.1), (1.0, 0.3), ("reproduced", "reproduced")),
        ((0.1, 1.5), (-0.5, 0.3), ("contradicted", "contradicted")),
        ((0.1, 0.1), (0.0, 0.0), ("not at this scale", "not at this scale")),
        # Decay that holds too little of the drift, or nothing of the growth.
        ((1.2, 0.6), (1.0, 1.0), ("not at this scale", "not at this scale")),
    ],
)
def test_verdicts_follow_the_world(ratio, residual, expected):
    arms = [dict(zip(("none", "light"), each, strict=True)) for each in (ratio, residual)]
    made = world(*arms)
    assert verdicts(symmetry_drift, made_up(symmetry_drift, made)) == {
        "C8": expected[0],
        "C9": expected[1],
    }


def test_growth_is_read_where_the_rate_is_constant():
    step = [1, *range(180, 1801, 180)]
    log = [-1.0, 0.0, 1.0, 0.5, 0.3, 0.2, 0.3, 0.4, 0.5, 0.4, 0.2]
    signals = [
        {"step": s, "activations": {"residual": [0.02, 10**v, 10**v]}}
        for s, v in zip(step, log, strict=True)
    ]
    records = made_up(symmetry_drift, lambda *_: {"signals": signals})
    assert list(symmetry_drift.analyse(records)["C9.growth"].values()) == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_decay_can_pull_as_far_as_in_the_paper(preset):
    for run in symmetry_drift.runs(preset):
        pull = symmetry_drift.pull(run.config)
        assert pull == 0 if run.labels["arm"] == "none" else 0.06 <= pull <= 0.6


def test_a_longer_run_has_the_same_schedule_and_as_many_records():
    usual = with_signals(base("gpu", "hybrid"))
    longer = lengthened(usual, 3)
    assert summed_lr(longer) == pytest.approx(3 * summed_lr(usual), rel=1e-3)
    for every in ("every", "weights_every", "signals_every"):
        assert len(rates(longer)) / getattr(longer.log, every) == pytest.approx(
            len(rates(usual)) / getattr(usual.log, every)
        )


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_matrices_are_in_equilibrium_where_growth_is_read(preset):
    config = symmetry_drift.runs(preset)[0].config
    before = rates(config)[: round(0.4 * len(rates(config)))]
    assert 2 * config.optimizer.weight_decay * sum(before) >= 2


def test_arms_differ_in_the_decay_of_multipliers_alone():
    first, *others = (run.config for run in symmetry_drift.runs("gpu")[:2])
    assert first.model.num_kv_heads < first.model.num_heads
    for other in others:
        decay = other.optimizer.multiplier_weight_decay
        assert decay > 0
        assert other == replace(
            first, optimizer=replace(first.optimizer, multiplier_weight_decay=decay)
        )

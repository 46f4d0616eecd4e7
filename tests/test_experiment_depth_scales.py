"""Ratios of block outputs and multipliers are read by layer."""

import math
from functools import partial
from random import Random
from typing import Any

import pytest

from learnable_multipliers.experiments import depth_scales
from learnable_multipliers.experiments.run import Labels
from shuffling import made_up, verdicts

LAYERS = 6
_ROLES = ("query", "key", "gate", "ssm-z", "ssm-dt", "attention-out", "ssm-out", "down")


def _world(
    labels: Labels, noise: Random, *, rise: float = 1.5, spread: float = 0.4
) -> dict[str, Any]:
    """Scalars raise the last output by `rise` against the first, and vary by `spread`."""
    scalar = labels["arm"] == "scalar"
    outputs = [
        (layer + 1) * (rise ** (layer / (LAYERS - 1)) if scalar else 1) * (1 + noise.gauss(0, 0.01))
        for layer in range(LAYERS)
    ]
    size = spread * (1 + noise.gauss(0, 0.01)) if scalar else 0.0
    multipliers = [math.exp(size), math.exp(-size)] * (LAYERS // 2)
    rows = {
        "raw": {"mean": [0.05] * LAYERS},
        "effective": {"mean": [0.05 * multiplier for multiplier in multipliers]},
    }
    signals = {
        "step": 10,
        "activations": dict.fromkeys(("attention_out", "ssm_out", "mlp_out"), outputs),
        "rows": dict.fromkeys(_ROLES, rows),
    }
    return {"signals": [{"step": 1, "activations": signals["activations"]}, signals]}


RIGHT = _world


def test_rise_and_spread_are_those_of_the_world():
    found = depth_scales.analyse(made_up(depth_scales, partial(_world, rise=1.8, spread=0.3)))
    assert list(found["C6.trend"].values()) == pytest.approx([math.log(1.8)] * 3, abs=0.05)
    # Sample standard deviations of +-0.3: three layers of each sign, and two of one sign.
    assert list(found["C6.dt"].values()) == pytest.approx([0.3 * math.sqrt(6 / 5)] * 3, rel=0.05)
    in_half = 0.3 * math.sqrt(4 / 3)
    assert list(found["C6.attention"].values()) == pytest.approx([in_half] * 3, rel=0.05)


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        ({}, "reproduced"),
        ({"rise": 0.6}, "contradicted"),
        ({"rise": 1.0, "spread": 0.05}, "not at this scale"),
        ({"rise": 1.0, "spread": 0.0}, "contradicted"),
    ],
)
def test_verdicts_follow_the_world(world: dict[str, float], expected: str):
    assert verdicts(depth_scales, made_up(depth_scales, partial(_world, **world))) == {
        "C6": expected
    }


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_arms_differ_in_multipliers_alone(preset):
    for run in (found := depth_scales.runs(preset)):
        assert run.config.model.has_ssm
    for plain, scalar in zip(found[::2], found[1::2], strict=True):
        assert plain.config.optimizer.placement == "none"
        assert scalar.config.optimizer.placement == "scalar"
        assert plain.config.seed == scalar.config.seed
        assert plain.config.model == scalar.config.model
        assert plain.config.schedule == scalar.config.schedule

"""Spreads of row norms are compared between runs with and without vector multipliers."""

import math
from functools import partial
from random import Random
from statistics import NormalDist
from typing import Any

import pytest

from learnable_multipliers.experiments import depth_scales, row_norms
from learnable_multipliers.experiments.run import Labels
from shuffling import made_up, verdicts

_ROLES = [role for roles in row_norms.GROUPS.values() for role in roles]


def _world(
    labels: Labels, noise: Random, *, plain: float = 0.08, vector: float = 0.4
) -> dict[str, Any]:
    """Row norms within a layer have these spreads."""
    effective = (plain if labels["arm"] == "plain" else vector) * (1 + noise.gauss(0, 0.02))
    rows = {"raw": _rows(plain), "effective": _rows(effective)}
    return {"signals": [{"step": 1}, {"step": 10, "rows": dict.fromkeys(_ROLES, rows)}]}


RIGHT = _world


def _rows(spread: float) -> dict[str, list[float]]:
    normal = [NormalDist().inv_cdf(q / 20) for q in range(1, 20)]
    pooled = [math.exp(spread * deviation) for deviation in (-5, *normal, 5)]
    return {"mean": [0.05, 0.06], "log_std": [spread, spread], "pooled": pooled}


def test_broadening_is_the_ratio_of_spreads():
    found = row_norms.analyse(made_up(row_norms, partial(_world, plain=0.1, vector=0.3)))
    for group in ("attention", "ssm", "gate"):
        values = list(found[f"C7.{group}"].values())
        assert values == pytest.approx([math.log(3)] * 3, abs=0.1)
    assert list(found["C7.narrow"].values()) == pytest.approx([0.1] * 3, rel=0.1)


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        ({}, "reproduced"),
        ({"vector": 0.04}, "contradicted"),
        ({"vector": 0.08}, "not at this scale"),
        # Broader, but not narrow without multipliers.
        ({"plain": 0.45, "vector": 1.5}, "not at this scale"),
        ({"plain": 0.9, "vector": 2.7}, "contradicted"),
    ],
)
def test_verdicts_follow_the_world(world: dict[str, float], expected: str):
    assert verdicts(row_norms, made_up(row_norms, partial(_world, **world))) == {"C7": expected}


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_arms_differ_in_placement_alone(preset):
    for run in (found := row_norms.runs(preset)):
        assert run.config.model.has_ssm
        placement = {"plain": "none", "vector": "full"}[str(run.labels["arm"])]
        assert run.config.optimizer.placement == placement
    shared = {run.key for run in found if run.labels["arm"] == "plain"}
    assert shared == {r.key for r in depth_scales.runs(preset) if r.labels["arm"] == "plain"}

"""Losses with multipliers learned as they are and as logarithms, at two rates."""

import random
from typing import Any

import pytest

from learnable_multipliers.experiments import log_scale
from learnable_multipliers.experiments.run import Labels
from shuffling import World, made_up, verdicts


def world(gain: float, cost: float, diverges: bool = False) -> World:
    """Return a world in which logarithms gain so much, and lose so much more at the fast rate."""

    def fields(labels: Labels, noise: random.Random) -> dict[str, Any]:
        common = random.Random(labels["seed"]).gauss(0, 0.005)
        loss = 3.5 + common + noise.gauss(0, 0.0005)
        fast = labels.get("rate") == log_scale.FAST
        if labels["arm"] == "plain":
            return {"loss": loss + 0.02}
        if labels["arm"] == "log":
            loss += cost * fast - gain
        steps = [{"step": s, "activations": {"residual": [1.0, 1.0 + s]}} for s in (1, 2)]
        diverged = diverges and fast and labels["arm"] == "log"
        return {"loss": None if diverged else loss + 0.01 * fast, "signals": steps}

    return fields


RIGHT = world(gain=-0.001, cost=0.05)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (RIGHT, "reproduced"),
        (world(gain=0.002, cost=0.0, diverges=True), "reproduced"),
        (world(gain=0.03, cost=0.05), "contradicted"),
        (world(gain=0.0, cost=-0.05), "contradicted"),
        (world(gain=0.0, cost=0.0), "not at this scale"),
        (world(gain=0.01, cost=0.05), "not at this scale"),
    ],
)
def test_verdicts_follow_the_world(made: World, expected: str):
    assert verdicts(log_scale, made_up(log_scale, made)) == {"C18": expected}


def test_statistics_are_gain_and_extra_cost():
    found = log_scale.analyse(made_up(log_scale, world(gain=0.01, cost=0.04)))
    assert list(found["C18.gain"].values()) == pytest.approx([0.01] * 5, abs=0.003)
    assert list(found["C18.stable"].values()) == pytest.approx([0.04] * 5, abs=0.004)


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_arms_differ_in_scale_and_rate_of_the_multipliers(preset):
    for run in log_scale.runs(preset):
        optimizer = run.config.optimizer
        assert optimizer.placement == ("none" if run.labels["arm"] == "plain" else "full")
        assert optimizer.multiplier_scale == ("log" if run.labels["arm"] == "log" else "linear")
        assert optimizer.multiplier_lr_scale == run.labels.get("rate", 1.0)

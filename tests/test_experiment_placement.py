"""Losses by placement, and what each placement puts on the matrices."""

import random
from dataclasses import replace
from typing import Any

import pytest

from learnable_multipliers.experiments import placement
from learnable_multipliers.experiments.run import Labels
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer.build import make_plan
from shuffling import World, made_up, verdicts

# Matrices whose input a norm scales, and all that carry multipliers in `full`.
NORMED = {"query", "key", "value", "gate", "up", "ssm-z", "ssm-x", "ssm-B", "ssm-C", "ssm-dt"}
OUT = {"attention-out", "ssm-out", "down"}
ALL = NORMED | OUT | {"embedding"}
# Appendix C, whose model has no norm inside the state-space mixer.
AWARE = OUT | {"embedding", "query", "gate", "ssm-z", "ssm-dt"}
CARRIED = {
    "full": (ALL, ALL),
    "symmetry-aware": (AWARE, ALL - NORMED),
    "no embedding": (ALL - {"embedding"}, ALL - {"embedding"}),
    "columns": (AWARE, ALL),
    "plain": (set(), set()),
}
"""Arm -> roles with rows, roles with columns."""


def world(aware: float, embedding: float) -> World:
    """Return a world with these losses above that of all multipliers."""
    excess = {
        "full": 0.0,
        "symmetry-aware": aware,
        "no embedding": embedding,
        "columns": 0.001,
        "plain": 0.015,
    }

    def fields(labels: Labels, noise: random.Random) -> dict[str, Any]:
        common = random.Random(labels["seed"]).gauss(0, 0.005)
        return {"loss": 3.5 + excess[str(labels["arm"])] + common + noise.gauss(0, 0.0005)}

    return fields


RIGHT = world(aware=0.006, embedding=0.008)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (RIGHT, "reproduced"),
        (world(aware=-0.006, embedding=0.008), "contradicted"),
        (world(aware=0.006, embedding=-0.008), "contradicted"),
        (world(aware=0.0, embedding=0.0), "not at this scale"),
        (world(aware=0.006, embedding=0.0), "not at this scale"),
    ],
)
def test_verdicts_follow_the_world(made: World, expected: str):
    assert verdicts(placement, made_up(placement, made)) == {"C19": expected}


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_matrices_carry_what_the_arm_says(preset):
    for run in placement.runs(preset):
        model = build(replace(run.config.model, vocab_size=32, num_layers=1), 0)
        matrices = [
            entry.matrix
            for entry in make_plan(model, run.config.optimizer).entries
            if entry.matrix is not None
        ]
        rows = {block.role for matrix in matrices for block in matrix.blocks if block.row}
        columns = {block.role for matrix in matrices if matrix.col for block in matrix.blocks}
        assert (rows, columns) == CARRIED[str(run.labels["arm"])]

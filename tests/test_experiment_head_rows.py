"""Losses with columns on the head, with rows too, and with neither."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from learnable_multipliers._initialize import initialize_
from learnable_multipliers.experiments import head_rows, initialization, log_scale
from learnable_multipliers.experiments.run import Labels
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer.build import make_plan
from shuffling import World, check_shuffled, made_up, verdicts


def world(rows: float, none: float, plain: float = 0.02) -> World:
    """Return a world with these losses above that of columns, each at its own best number."""
    excess = {"columns": 0.0, "rows": rows, "none": none}
    best = {"columns": 4.0, "rows": 4.0, "none": 16.0}

    def fields(labels: Labels, noise: random.Random) -> dict[str, Any]:
        arm = str(labels["arm"])
        if arm == "plain":
            change = plain
        else:
            change = excess[arm] + 0.05 * abs(math.log(float(labels["scale"]) / best[arm], 4))
        common = random.Random(labels["seed"]).gauss(0, 0.005)
        return {"loss": 3.5 + change + common + noise.gauss(0, 0.0005)}

    return fields


RIGHT = world(rows=0.01, none=0.005)


def test_heads_are_compared_at_the_best_number_of_each():
    found = head_rows.analyse(made_up(head_rows, world(rows=0.02, none=0.007)))
    assert list(found["C12.rows"].values()) == pytest.approx([0.02] * 5, abs=0.003)
    assert list(found["C12.fixed"].values()) == pytest.approx([0.007] * 5, abs=0.003)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (RIGHT, "reproduced"),
        (world(rows=0.01, none=0.0), "reproduced"),
        (world(rows=-0.01, none=0.01), "contradicted"),
        (world(rows=0.01, none=-0.03), "contradicted"),
        (world(rows=0.0, none=0.01), "not at this scale"),
    ],
)
def test_verdicts_follow_the_world(made: World, expected: str):
    assert verdicts(head_rows, made_up(head_rows, made)) == {"C12": expected}


def test_numbers_shuffled_with_arms_are_not_reproduced():
    check_shuffled(head_rows, made_up(head_rows, RIGHT), {"C12": ("arm", "scale")})


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_heads_carry_what_the_arm_says(preset):
    for run in head_rows.runs(preset):
        # Small enough to build; nothing that decides about the head.
        shape = replace(
            run.config.model, vocab_size=32, hidden_size=16, num_layers=1, intermediate_size=8
        )
        model = build(shape, 0)
        planned = initialize_(model, make_plan(model, run.config.optimizer))
        carried = planned["lm_head.weight"].multipliers
        assert carried == ("row" if run.labels["arm"] == "rows" else "none")
        # The number stays on the logits.
        assert model.mup_head == run.labels.get("scale", 1.0)
        frozen = not model.model.final_layernorm.weight.requires_grad
        assert frozen == (run.labels["arm"] == "none")


def test_runs_without_changes_are_those_of_other_experiments():
    ours = {(r.labels["arm"], r.labels.get("scale")): r.key for r in head_rows.runs("gpu")[:10]}
    logs = {(r.labels["arm"], r.labels.get("rate")): r.key for r in log_scale.runs("gpu")[:5]}
    starts = {run.key for run in initialization.runs("gpu")}
    assert ours["plain", None] == logs["plain", None]
    assert ours["plain", None] in starts
    assert ours["columns", 1.0] == logs["linear", 1.0]

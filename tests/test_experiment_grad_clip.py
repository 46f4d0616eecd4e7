"""Norms, clipping and losses with multipliers in the clip norm and out of it."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from learnable_multipliers._initialize import initialize_
from learnable_multipliers.experiments import grad_clip
from learnable_multipliers.experiments.run import Labels
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer.build import make_plan
from shuffling import World, made_up, verdicts

# 120 of the 600 steps of the gpu preset are early.
STEPS = [1, *range(10, 601, 10)]


def world(norm_in: float, norm_out: float, loss_in: float) -> World:
    """Return a world with these early norms, and this loss with scalars in, 3.5 with them out."""

    def fields(labels: Labels, noise: random.Random) -> dict[str, Any]:
        scalar_in = labels["arm"] == "in"
        early = norm_in if scalar_in else norm_out
        norms = [(early if step <= 120 else 0.3) * math.exp(noise.gauss(0, 0.1)) for step in STEPS]
        losses = [4.0 + noise.gauss(0, 0.01) for _ in STEPS]
        train = {"step": [float(step) for step in STEPS], "loss": losses, "grad_norm": norms}
        common = random.Random(labels["seed"]).gauss(0, 0.005)
        loss = (loss_in if scalar_in else 3.5) + common + noise.gauss(0, 0.0005)
        return {"loss": loss, "train": train}

    return fields


RIGHT = world(4.0, 0.4, 3.52)


def test_norms_of_the_first_fifth_are_compared():
    found = grad_clip.analyse(made_up(grad_clip, RIGHT))
    assert list(found["C11.norm"].values()) == pytest.approx([math.log(10)] * 5, abs=0.2)
    assert list(found["C11.clipped"].values()) == [1.0] * 5
    assert list(found["C11.loss"].values()) == pytest.approx([0.02] * 5, abs=0.003)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (RIGHT, "reproduced"),
        (world(4.0, 0.4, 3.48), "contradicted"),
        (world(4.0, 0.4, 3.5), "not at this scale"),
        # Norms that are above the threshold without multipliers too.
        (world(8.0, 1.8, 3.52), "not at this scale"),
        (world(0.5, 0.4, 3.52), "not at this scale"),
    ],
)
def test_verdicts_follow_the_world(made: World, expected: str):
    assert verdicts(grad_clip, made_up(grad_clip, made)) == {"C11": expected}


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_arms_differ_in_the_clip_norm_alone(preset):
    found = {run.labels["arm"]: run.config for run in grad_clip.runs(preset)[:3]}
    for arm, config in found.items():
        assert config.optimizer.max_grad_norm == 1.0
        assert config.optimizer.clip_multipliers == (arm == "in")
    optimizer = replace(found["in"].optimizer, clip_multipliers=False)
    assert replace(found["in"], optimizer=optimizer) == found["out"]
    assert found["none"].model == found["out"].model


def test_scalars_start_at_the_factors_of_the_model():
    config = grad_clip.runs("gpu")[0].config
    model = build(replace(config.model, vocab_size=64), 0)
    planned = initialize_(model, make_plan(model, config.optimizer))
    (head,) = planned["lm_head.weight"].matrix.blocks
    (embedding,) = planned["model.embed_tokens.weight"].matrix.blocks
    assert (head.init, embedding.init) == (40 / 256, 2**2.5)
    assert model.mup_head == model.model.mup_embedding == 1.0


def test_early_norms_are_logged_at_several_steps():
    config = grad_clip.runs("gpu")[0].config
    tokens = config.data.sequence_length * config.data.batch_sequences
    assert grad_clip.EARLY * config.schedule.tokens / tokens / config.log.every >= 5

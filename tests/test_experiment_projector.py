"""The projector experiment: what its runs change, and what it says of made-up worlds."""

import math
from dataclasses import replace

import pytest

from learnable_multipliers.experiments import projector
from learnable_multipliers.experiments.presets import SEEDS, base
from learnable_multipliers.pretrain.model.hybrid import empty_model
from learnable_multipliers.pretrain.trainer.build import make_plan
from shuffling import made_up, verdicts

HEAD, NORM = "lm_head.weight", "model.final_layernorm.weight"
PRESETS = ["cpu", "gpu", "paper"]


def world(*, degrades=("frozen",), sizes=("frozen",), matrix=0.05, multiplier=2.0):
    """Return a world.

    Args:
        degrades: Arms whose loss rises towards extreme scales.
        sizes: Arms whose logits change with the scale.
        matrix: |log(rms / rms on noise)| of the head.
        multiplier: The same of scalar and vector.
    """

    def fields(labels, noise):
        arm, log_scale = labels["arm"], math.log(labels["scale"], 8)
        loss = 3.5 + noise.gauss(0, 0.001)
        if arm in degrades:
            loss += 0.02 * max(0.0, abs(log_scale) - 1) * 4
        if not degrades:
            loss -= 0.05 * (abs(log_scale) == 2)
        logits = 3.0 * (2.0**log_scale if arm in sizes else 1.05**log_scale)
        on_noise = 0.04 * labels["scale"]
        ratio = multiplier * math.exp(noise.gauss(0, 0.01))
        reading = {
            "role": "head",
            "measured": 1.0,
            "log_ratio": -ratio * math.copysign(1, log_scale),
        }
        readings = {
            "frozen": [],
            "scalar": [reading | {"name": HEAD, "part": "scalar", "kind": "multiplier"}],
            "vector": [reading | {"name": NORM, "part": "weight", "kind": "vector"}],
        }
        weights = {
            "raw_rms": {HEAD: on_noise * math.exp(matrix + noise.gauss(0, 0.01))},
            "predicted_rms": {HEAD: on_noise},
            "multipliers": {HEAD: {"scalar": [0.7] * 7}} if arm == "scalar" else {},
        }
        signals = {"activations": {"logits": logits}, "parameters": {"final_norm": [0.8]}}
        return {
            "loss": loss,
            "weights": [{"step": 1, **weights}, {"step": 9, **weights, "roles": {HEAD: "head"}}],
            "signals": [{"step": 1, **signals}, {"step": 9, **signals}],
            "readings": readings[arm],
        }

    return fields


RIGHT = world()


def test_every_claim_is_reproduced_where_the_paper_is_right():
    records = made_up(projector, RIGHT)
    assert verdicts(projector, records) == dict.fromkeys(("C2", "C3", "C4"), "reproduced")


@pytest.mark.parametrize(
    "opposite",
    [
        {"degrades": (), "sizes": ("scalar", "vector"), "matrix": 1.0},
        {"degrades": ("scalar", "vector"), "sizes": (), "multiplier": 0.05},
    ],
)
def test_every_claim_is_contradicted_by_its_opposite(opposite):
    records = made_up(projector, world(**opposite))
    assert verdicts(projector, records) == dict.fromkeys(("C2", "C3", "C4"), "contradicted")


def test_a_degradation_with_all_arms_is_no_recovery():
    records = made_up(projector, world(degrades=projector.ARMS))
    # A share of 0 is where the opposite begins.
    assert verdicts(projector, records)["C2"] in ("not at this scale", "contradicted")


def test_small_departures_are_not_at_this_scale():
    def fields(labels, noise):
        found = world(degrades=(), matrix=0.4, multiplier=0.4)(labels, noise)
        size = 1.0 + 0.2 * math.log(labels["scale"], 64)
        return found | {
            "loss": 3.5 + noise.gauss(0, 0.001),
            "signals": [{"step": 9, "activations": {"logits": size**2}}],
        }

    found = verdicts(projector, made_up(projector, fields))
    # Logits that vary by 2.25 in all arms are neither constant nor do they vary.
    assert found == dict.fromkeys(("C2", "C3", "C4"), "not at this scale")


def test_a_frozen_norm_that_diverges_is_degraded_and_recovered():
    def fields(labels, noise):
        found = world()(labels, noise)
        diverges = labels["arm"] == "frozen" and labels["scale"] == projector.LARGE
        return found | ({"loss": None} if diverges else {})

    assert verdicts(projector, made_up(projector, fields))["C2"] == "reproduced"


@pytest.mark.parametrize("preset", PRESETS)
def test_runs_scale_the_head_alone_and_keep_to_the_protocol(preset):
    runs = projector.runs(preset)
    labels = {(run.labels["arm"], run.labels["scale"], run.labels["seed"]) for run in runs}
    assert len(labels) == len(runs)
    assert {run.labels["seed"] for run in runs} == set(SEEDS[preset])
    for run in runs:
        config, optimizer = run.config, run.config.optimizer
        assert config.z_loss == 0
        assert optimizer.norm_scale == {"head": run.labels["scale"]}
        assert (optimizer.lr_factors, optimizer.weight_decay_factors) == ({}, {})
        assert optimizer.multiplier_weight_decay == 0
        assert optimizer.placement == "none"
        assert config.model.freeze_final_norm == (run.labels["arm"] != "vector")
        assert not config.model.freeze_norms


def test_the_gpu_preset_sweeps_five_scales_from_1_64_to_64():
    runs = projector.runs("gpu")
    assert len(runs) == 45
    for arm in projector.ARMS:
        scales = {run.labels["scale"] for run in runs if run.labels["arm"] == arm}
        assert scales == {1 / 64, 1 / 8, 1.0, 8.0, 64.0}


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_rate_and_decay_of_the_head_alone_move_and_their_product_stays(preset):
    for run in projector.runs(preset):
        if run.labels["seed"]:
            continue
        model, scale = empty_model(replace(run.config.model, vocab_size=512)), run.labels["scale"]
        entries = {e.name: e for e in make_plan(model, run.config.optimizer).entries}
        head = entries.pop(HEAD)
        assert head.lr_scale == scale
        decay = run.config.optimizer.weight_decay
        assert (head.weight_decay or decay) == pytest.approx(decay / scale)
        assert head.matrix.carries == (run.labels["arm"] == "scalar")
        rates = {"vector": run.config.optimizer.multiplier_ratio}
        assert entries.pop(NORM).lr_scale == pytest.approx(rates.get(run.labels["arm"], 1.0))
        assert model.get_parameter(NORM).requires_grad == (run.labels["arm"] == "vector")
        assert {(e.lr_scale, e.weight_decay) for e in entries.values()} == {(1.0, None)}
        assert not any(e.matrix.carries for e in entries.values() if e.matrix is not None)


@pytest.mark.parametrize("preset", PRESETS)
def test_scalar_and_vector_train_at_one_rate(preset):
    by_arm = {run.labels["arm"]: run.config.optimizer for run in projector.runs(preset)}
    scalar, vector = by_arm["scalar"], by_arm["vector"]
    assert scalar.rules == (". only=head kind=scalar",)
    (rule,) = vector.rules
    name, _, factor = rule.partition(" lr_scale=")
    assert name == "final_layernorm"
    assert float(factor) * vector.lr == pytest.approx(scalar.multiplier_lr)
    if preset == "paper":
        assert scalar.multiplier_lr == base("paper", "hybrid").optimizer.lr

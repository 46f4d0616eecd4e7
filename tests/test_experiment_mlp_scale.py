"""The MLP experiment: what its runs change, and what it says of made-up worlds."""

import math
from dataclasses import replace

import pytest

from learnable_multipliers.experiments import mlp_scale
from learnable_multipliers.experiments.presets import SEEDS
from learnable_multipliers.pretrain.model.hybrid import empty_model
from learnable_multipliers.pretrain.trainer.build import make_plan
from shuffling import made_up, verdicts

PRESETS = ["cpu", "gpu", "paper"]
MATRICES = {
    **{f"layers.{i}.{role}": role for i in (0, 1) for role in mlp_scale.MLP},
    **{f"layers.{i}.{role}": role for i in (0, 1) for role in ("value", "attention-out")},
}


def world(*, rises=("plain",), follows=1.0, output=0.1, escape=0.2, closes=0.15):
    """Return a world.

    Args:
        rises: Arms whose loss rises with the scale.
        follows: Exponent of the MLP's raw matrices.
        output: Exponent of its output with scalars.
        escape: Exponent of conv1d, D, value and output, and half of that of the mixers' output.
        closes: What the changed models take away from it.
    """

    def fields(labels, noise):
        scale, arm, model = labels["scale"], labels["arm"], labels["model"]

        def power(exponent):
            return scale ** (exponent + noise.gauss(0, 0.003))

        held = escape - closes * (model == mlp_scale.MULTI_HEAD)
        free = 2 * (escape - closes * (model == mlp_scale.INNER_NORM))
        raw = {
            name: 0.04 * power(follows if role in mlp_scale.MLP else held)
            for name, role in MATRICES.items()
        }
        scalars = {
            name: {"scalar": [power(-1.0)] * 7}
            for name, role in MATRICES.items()
            if arm == "scalars" and role in mlp_scale.MLP
        }
        log_scale = math.log2(scale)
        rise = 0.05 * max(0.0, log_scale - 1) if arm in rises else 0.0
        if not rises:
            rise = -0.05 * log_scale
        signals = {
            "activations": {
                "mlp_out": [power(output), 2 * power(output)],
                "ssm_out": [power(free), power(free)],
                "attention_out": [1.0, 1.0],
                "embedding": 1.0,
            },
            "parameters": {"conv1d": [power(escape)] * 2, "D": [power(escape)] * 2},
        }
        weights = {"raw_rms": raw, "multipliers": scalars, "roles": MATRICES}
        return {
            "loss": 3.5 + rise + noise.gauss(0, 0.001),
            "weights": [{"step": 9, **weights}],
            "signals": [{"step": 9, **signals}],
        }

    return fields


RIGHT = world()


def test_both_claims_are_reproduced_where_the_paper_is_right():
    records = made_up(mlp_scale, RIGHT)
    assert verdicts(mlp_scale, records) == {"C5": "reproduced", "C23": "reproduced"}


@pytest.mark.parametrize(
    "opposite",
    [
        {"rises": (), "escape": -0.1},
        {"rises": ("scalars",), "closes": -0.1},
        {"follows": 0.1, "escape": -0.1},
        {"output": 2.0, "escape": -0.1},
    ],
)
def test_both_claims_are_contradicted_by_an_opposite(opposite):
    found = verdicts(mlp_scale, made_up(mlp_scale, world(**opposite)))
    assert found == {"C5": "contradicted", "C23": "contradicted"}


def test_effects_that_are_too_small_are_not_at_this_scale():
    small = {"rises": ("neither",), "follows": 0.65, "output": 0.5, "escape": 0.03, "closes": 0.01}
    found = verdicts(mlp_scale, made_up(mlp_scale, world(**small)))
    assert found == {"C5": "not at this scale", "C23": "not at this scale"}


def test_one_optimizer_alone_does_not_reproduce():
    def fields(labels, noise):
        flat = labels["optimizer"] == "muon"
        return world(rises=("neither",) if flat else ("plain",))(labels, noise)

    assert verdicts(mlp_scale, made_up(mlp_scale, fields))["C5"] == "not at this scale"


def test_exponents_are_those_of_the_power_laws():
    def exact(labels, noise):
        noise.gauss = lambda mean, deviation: mean
        return world(output=-0.1)(labels, noise)

    found = mlp_scale.analyse(made_up(mlp_scale, exact))
    expected = {
        **{"C5.adamw.plain": 0.05, "C5.adamw.scalars": 1.0, "C5.adamw.matrices": 1.0},
        **{"C5.adamw.outputs": 0.1, "C23.conv1d": 0.2, "C23.D": 0.2, "C23.attention": 0.2},
        **{"C23.ssm": 0.4, "C23.multi_head": 0.15, "C23.inner_norm": 0.3},
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(dict.fromkeys((0, 1, 2), value), abs=1e-9), name


@pytest.mark.parametrize("preset", PRESETS)
def test_runs_keep_to_the_protocol(preset):
    runs = mlp_scale.runs(preset)
    assert {run.labels["seed"] for run in runs} == set(SEEDS[preset])
    for run in runs:
        config, optimizer, labels = run.config, run.config.optimizer, run.labels
        assert optimizer.norm_scale == dict.fromkeys(("gate", "up", "down"), labels["scale"])
        assert optimizer.kind == labels["optimizer"]
        assert optimizer.multiplier_lr == mlp_scale.MULTIPLIER_LR[preset]
        assert optimizer.multiplier_weight_decay == 0.0
        assert config.model.freeze_norms
        assert config.model.has_ssm
        multi_head = config.model.num_kv_heads == config.model.num_heads
        assert multi_head == (labels["model"] == mlp_scale.MULTI_HEAD)
        assert config.model.ssm_norm == (labels["model"] == mlp_scale.INNER_NORM)


def test_the_gpu_preset_sweeps_five_scales_with_adamw_and_three_with_muon():
    runs = mlp_scale.runs("gpu")
    assert len(runs) == 60
    swept = {"adamw": {0.25, 0.5, 1.0, 2.0, 4.0}, "muon": {0.25, 1.0, 4.0}}
    for optimizer in ("adamw", "muon"):
        for arm in ("plain", "scalars"):
            labels = {"optimizer": optimizer, "arm": arm, "model": mlp_scale.GROUPED}
            found = [run for run in runs if labels.items() <= run.labels.items()]
            assert {run.labels["scale"] for run in found} == swept[optimizer]


def test_three_matrices_alone_move_and_carry_scalars():
    for run in mlp_scale.runs("cpu"):
        model, scale = empty_model(replace(run.config.model, vocab_size=512)), run.labels["scale"]
        decay = run.config.optimizer.weight_decay
        for entry in make_plan(model, run.config.optimizer).entries:
            block = entry.matrix.blocks[0] if entry.matrix is not None else None
            moves = block is not None and block.role in ("gate", "up", "down")
            assert entry.lr_scale == (scale if moves else 1.0)
            assert entry.weight_decay == (pytest.approx(decay / scale) if moves else None)
            if block is not None:
                assert block.scalar == (moves and run.labels["arm"] == "scalars")
                assert not block.row

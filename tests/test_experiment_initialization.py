"""Starts differ in the scale of what they start with, and their figures are read off records."""

from dataclasses import replace

import pytest

from learnable_multipliers.experiments import initialization
from learnable_multipliers.experiments.initialization import FACTOR, FALCON, SMALL, UNIT
from learnable_multipliers.pretrain.model.hybrid import build
from shuffling import made_up

SHARES = {SMALL: 0.8, FACTOR: 0.3, UNIT: 0.01, FALCON: 0.2}


def world(labels, noise):
    loss = 3.5 + SHARES[labels["start"]] + noise.gauss(0, 0.003)
    begin = {
        "step": 1,
        "common_direction": [SHARES[labels["start"]] * x for x in (0.1, 0.5, 1)],
        "gradients": {
            **{"query": [1e-5, 4e-5], "key": [4e-5, 1e-5]},
            **{"value": [1e-3, 2e-3], "attention-out": [1e-3, 2e-3]},
        },
    }
    end = {"step": 10, "common_direction": [0.05, 0.1, 0.15]}
    train = {"step": [1.0, 5.0, 10.0], "loss": [9.0, 5.0, loss]}
    return {"loss": loss, "signals": [begin, end], "train": train}


RIGHT = world


def test_directions_are_those_of_the_first_and_the_last_record():
    (record,) = (
        each.record
        for each in made_up(initialization, RIGHT)
        if dict(each.labels) == {"family": "llama", "optimizer": "muon", "start": SMALL, "seed": 2}
    )
    assert initialization.common_direction(record) == pytest.approx([0.08, 0.4, 0.8])
    assert initialization.common_direction(record, at_end=True) == [0.05, 0.1, 0.15]
    assert initialization.common_direction(replace(record, signals=[])) == []
    assert initialization.gradient_ratios(record) == pytest.approx([0.02, 0.01])
    assert initialization.gradient_ratios(replace(record, signals=[{"step": 1}])) == []


def test_every_start_has_a_curve_and_a_mark_with_its_mean():
    plots = {plot.title: plot for plot in initialization.plot(made_up(initialization, RIGHT))}
    assert len(plots) == 12
    for family, starts in (("Llama", 3), ("hybrid", 4)):
        axes = plots[f"What positions have in common at the first step, {family}"].figure.axes[0]
        lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        assert [str(line.get_label()) for line in lines] == list(SHARES)[:starts]
        assert [line.get_ydata()[-1] for line in lines] == pytest.approx(
            list(SHARES.values())[:starts]
        )
        final = plots[f"Final loss by start, {family}"]
        # 3.5 + 0.3, give or take the noise.
        assert f"{FACTOR} 3.8" in final.caption


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_starts_differ_in_embedding_and_factors_alone(preset):
    for run in initialization.runs(preset):
        model = run.config.model
        assert run.config.optimizer.kind == run.labels["optimizer"]
        assert run.config.optimizer.placement == "none"
        assert model.has_ssm == (run.labels["family"] == "hybrid")
        assert model.embedding_std == (run.labels["start"] == UNIT)
        factors = {name for name, value in model.mup_factors.items() if value != 1}
        assert (factors == {"mup_embedding"}) == (run.labels["start"] == FACTOR)
        assert (len(factors) > 8) == (run.labels["start"] == FALCON)
        assert not (factors and run.labels["start"] in (SMALL, UNIT))


def test_embeddings_of_rms_one_leave_the_other_matrices_alone():
    plain, unit = (
        build(replace(run.config.model, vocab_size=4096))
        for run in initialization.runs("cpu")
        if run.labels["family"] == "llama" and run.labels["start"] in (SMALL, UNIT)
    )
    before, after = (dict(model.named_parameters()) for model in (plain, unit))
    for name, value in before.items():
        if "embed" in name:
            assert after[name].std().item() == pytest.approx(1.0, rel=0.01)
        else:
            assert after[name].equal(value)

"""The noise experiment: what its runs change, and what it says of made-up worlds."""

import math
from dataclasses import replace

import pytest

from learnable_multipliers.equilibrium import brownian_rms
from learnable_multipliers.experiments import noise as experiment
from learnable_multipliers.experiments.presets import base, rates
from learnable_multipliers.experiments.record import Labelled
from shuffling import made_up, verdicts

CLAIMS = ("C1", "C21", "C22")
NAMES = {f"layers.{i}.{role}": role for i in (0, 1) for role in experiment.ROLES}
OCCURRENCES = [10.0 ** (d + 0.5) for d in range(-3, 4)]
SHARES = [-math.expm1(-times) for times in OCCURRENCES]


def on_noise(lr, wd):
    """Return the rms of rows in the made-up token bands under noise, by frequency."""
    config = base("gpu", "llama")
    lrs = tuple(lr / config.optimizer.lr * rate for rate in rates(config))
    return experiment._rows_on_noise(
        tuple(SHARES), lrs, wd, config.optimizer.betas, config.model.init_std
    )


def world(*, by_lr=0.5, by_wd=-0.5, signal=2.0, rare=0.05, frequent=0.6):
    """Return a world.

    Args:
        by_lr: Exponent of the rms of matrices in the learning rate; `by_wd` in the decay.
        signal: Indicator of multipliers over that of matrices.
        rare: |log(rms / rms on noise)| of the rows of rare tokens; `frequent` of frequent ones.
    """

    def fields(labels, noise):
        lr, wd = labels["lr"], labels["wd"]
        law = lr**by_lr * wd**by_wd
        raw = {name: law * (1 + noise.gauss(0, 0.005)) for name in NAMES}
        parts = {"weight": 1.2}
        if labels["arm"] == "vector":
            parts |= {"row": 1.2 * signal, "col": 1.2 * signal}
        readings = [
            {"name": name, "part": part, "role": role, "indicator": size + noise.gauss(0, 0.02)}
            for name, role in NAMES.items()
            for part, size in parts.items()
        ]
        rows = [
            rms * math.exp((rare if times < 1 else frequent) + noise.gauss(0, 0.005))
            for times, rms in zip(OCCURRENCES, on_noise(lr, wd), strict=True)
        ]
        tokens = {
            **{"occurrences": OCCURRENCES, "share": SHARES, "count": [500] * 7},
            **{"raw": rows, "effective": rows},
        }
        return {
            # The rate falls from step 480 on, and norms then are none of the law's.
            "weights": [
                {"step": 480, "raw_rms": raw, "multipliers": {}},
                {"step": 600, "raw_rms": dict.fromkeys(NAMES, 1.0), "roles": NAMES},
            ],
            "signals": [{"step": 9, "token_rows": tokens}],
            "readings": readings,
        }

    return fields


RIGHT = world()


def without_signals(records):
    return [Labelled(labels=r.labels, record=replace(r.record, signals=[])) for r in records]


def test_every_claim_is_reproduced_where_the_paper_is_right():
    records = made_up(experiment, RIGHT)
    assert verdicts(experiment, records) == dict.fromkeys(CLAIMS, "reproduced")


@pytest.mark.parametrize(
    "opposite",
    [
        {"by_lr": 0.0, "signal": 0.8, "rare": 1.0},
        {"by_wd": -1.0, "signal": 0.8, "rare": 0.1, "frequent": 0.05},
    ],
)
def test_every_claim_is_contradicted_by_its_opposite(opposite):
    records = made_up(experiment, world(**opposite))
    assert verdicts(experiment, records) == dict.fromkeys(CLAIMS, "contradicted")


def test_effects_that_are_too_small_are_not_at_this_scale():
    small = {"by_lr": 0.35, "by_wd": -0.65, "signal": 1.1, "rare": 0.1, "frequent": 0.2}
    records = made_up(experiment, world(**small))
    assert verdicts(experiment, records) == dict.fromkeys(CLAIMS, "not at this scale")


def test_exponents_and_ratios_are_those_of_the_world():
    def exact(labels, noise):
        noise.gauss = lambda mean, deviation: mean
        return world(by_lr=0.4, by_wd=-0.3)(labels, noise)

    found = experiment.analyse(made_up(experiment, exact))
    expected = {
        **{"C1.lr": 0.1, "C1.wd": 0.2, "C21.row": 2.0, "C21.col": 2.0},
        **{"C22.rare": 0.05, "C22.frequent": 0.55},
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(dict.fromkeys(range(6), value), abs=1e-9), name


def test_rows_with_a_gradient_in_every_step_are_plain_brownian_motion():
    config = base("gpu", "llama")
    lrs, decay = rates(config), config.optimizer.weight_decay
    often, seldom = experiment._rows_on_noise(
        (1.0, 0.05), tuple(lrs), decay, config.optimizer.betas, 0.02
    )
    assert often == pytest.approx(brownian_rms(lrs, decay, 0.02)[-1], rel=0.05)
    # The rarer the token, the smaller its row.
    assert seldom < 0.9 * often


def test_rare_and_frequent_tokens_are_told_by_their_text_and_the_run():
    run = experiment.runs("gpu")[0]
    (record,) = (r for r in made_up(experiment, RIGHT) if r.labels == run.labels)
    bands = experiment._bands(record.record)
    # 600 steps of 32,768 tokens: 0.3% of the text is 98 a step, 10 in the run 0.017 a step.
    assert [band.occurrences for band in bands if band.frequent] == OCCURRENCES[5:]
    assert [band.occurrences for band in bands if band.rare] == OCCURRENCES[1:3]


def test_a_run_without_signals_is_left_out():
    found = experiment.analyse(without_signals(made_up(experiment, RIGHT)))
    assert found["C22.rare"] == found["C22.frequent"] == {}
    assert len(found["C1.lr"]) == 6


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_runs_keep_to_the_protocol(preset):
    runs = experiment.runs(preset)
    assert len(runs) == 5 * len(experiment.SEEDS[preset])
    plain = base(preset, "llama").optimizer
    for run in runs:
        optimizer = run.config.optimizer
        assert (optimizer.lr, optimizer.weight_decay) == (run.labels["lr"], run.labels["wd"])
        vector = run.labels["arm"] == "vector"
        assert optimizer.placement == ("full" if vector else "none")
        if vector:
            assert (optimizer.lr, optimizer.weight_decay) == (plain.lr, plain.weight_decay)
    grid = {(run.labels["lr"], run.labels["wd"]) for run in runs if run.labels["arm"] == "plain"}
    assert len(grid) == 4

"""Tunings are compared in tiers, and a sweep says which factors to tune to."""

from dataclasses import replace

import pytest

from learnable_multipliers.experiments import initialization, tuning_ablation
from learnable_multipliers.pretrain.model.hybrid import empty_model
from learnable_multipliers.pretrain.trainer.build import make_plan
from shuffling import made_up, verdicts

TIER = 0.006
NONE, SECOND, BEST = 2 * TIER, TIER, 0.0


CHOSEN = {"lr": {"head": 2.0, "attn in": 0.5}, "wd": {"ssm in": 2.0, "gate": 0.5}}


def paper(tuning, arm):
    if arm == "plain":
        return NONE if tuning == "NONE" else SECOND
    return SECOND if tuning == "NONE" else BEST


def world(level, sd=3e-4):
    """Return a world in which the loss of a tuning and an arm is 3.5 plus this."""

    def made(labels, noise):
        if labels["arm"] == "sweep":
            won = CHOSEN[labels["what"]].get(labels["group"]) == labels["factor"]
            return {"loss": 3.5 + level("NONE", "plain") - 0.02 * won}
        return {"loss": 3.5 + level(labels["tuning"], labels["arm"]) + noise.gauss(0, sd)}

    return made


RIGHT = world(paper)


def test_statistics_are_differences_of_tiers():
    losses = {"plain": [5.0, 4.0, 3.5, 3.0], "vector": [4.5, 2.0, 1.8, 1.4]}

    def level(tuning, arm):
        return losses[arm][tuning_ablation.TUNINGS.index(tuning)] - 3.5

    found = tuning_ablation.analyse(made_up(tuning_ablation, world(level, sd=0.0)))
    # The second tier is (4.5 + 4 + 3.5 + 3) / 4.
    expected = {"improves": 0.5, "worst": 1.25, "best": 3.75 - 5.2 / 3, "enough": 0.4}
    for optimizer in tuning_ablation.OPTIMIZERS:
        for name, value in expected.items():
            by_seed = found[f"C13.{optimizer}.{name}"]
            assert by_seed == pytest.approx(dict.fromkeys((0, 1, 2), value))


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (paper, "reproduced"),
        (lambda tuning, arm: -paper(tuning, arm), "contradicted"),
        # Multipliers need tuned decays and starts after all.
        (
            lambda tuning, arm: paper(tuning, arm) - 2 * TIER * (tuning in ("LRWD", "FULL")),
            "contradicted",
        ),
        (lambda tuning, arm: 0.0, "not at this scale"),
    ],
)
def test_the_verdict_is_that_of_the_world(level, expected):
    records = made_up(tuning_ablation, world(level))
    assert verdicts(tuning_ablation, records) == {"C13": expected}


def test_arms_with_factors_follow_from_the_whole_sweep():
    records = made_up(tuning_ablation, RIGHT)
    first = {run.key: each.record for run, each in zip(SWEEP, records, strict=False)}
    assert len(first) == 36 + 12
    more = tuning_ablation.follow_up("gpu", first)
    assert {run.labels["tuning"] for run in more} == {"LR", "LRWD", "FULL"}
    assert len(more) == 36
    head = more[0].config.optimizer.lr_factors
    assert head == {"head": 2.0, "query": 0.5, "key": 0.5, "value": 0.5}
    # One missing, or the run they are compared with.
    for key in (SWEEP[0].key, SWEEP[36].key):
        assert tuning_ablation.follow_up("gpu", {k: r for k, r in first.items() if k != key}) == []
    part = [each for each in records if each.record.key in first]
    assert verdicts(tuning_ablation, part) == {"C13": "not run"}


SWEEP = tuning_ablation.runs("gpu")


def test_a_factor_wins_where_it_gains_more_than_noise():
    gains = {
        ("lr", "head", 2.0): 0.01,
        ("lr", "up", 0.5): 0.001,
        ("wd", "gate", 0.5): 0.02,
        ("wd", "gate", 2.0): 0.03,
    }

    def made(labels, noise):
        swept = tuple(labels.get(name) for name in ("what", "group", "factor"))
        return {"loss": 3.5 - gains.get(swept, 0.0)}

    records = made_up(tuning_ablation, made)
    assert tuning_ablation.winners(records) == {"lr": {"head": 2.0}, "wd": {"gate": 2.0}}
    assert tuning_ablation.winners([]) == {"lr": {}, "wd": {}}
    captions = [plot.caption for plot in tuning_ablation.plot(records)]
    assert captions[1].endswith("Chosen: head x 2.")
    assert captions[2].endswith("Chosen: gate x 2.")


def all_runs(preset):
    """Return the runs with those that follow from a sweep that chose the factors above."""
    return [
        *tuning_ablation.runs(preset),
        *tuning_ablation._arms(preset, tuning_ablation.TUNINGS[1:], CHOSEN),
    ]


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_arms_differ_in_what_their_labels_say(preset):
    runs = all_runs(preset)
    # All decay alike, but for the factors that are studied.
    optimizers = {(run.config.optimizer.lr, run.config.optimizer.weight_decay) for run in runs}
    assert len(optimizers) == len({run.config.schedule for run in runs}) == 1
    # Runs of one key are one run.
    assert len({run.key for run in runs}) == len(runs)
    for run in runs:
        model, optimizer = run.config.model, run.config.optimizer
        assert run.config.seed == run.labels["seed"]
        # The data decide about the vocabulary.
        replace(run.config, model=replace(model, vocab_size=512)).check()
        assert (model.mup_key != 1) == (run.labels.get("tuning") == "FULL")
        placement = "full" if run.labels["arm"] == "vector" else "none"
        assert optimizer.placement == placement
        if run.labels["arm"] == "sweep":
            factors = {"lr": optimizer.lr_factors, "wd": optimizer.weight_decay_factors}
            swept = factors.pop(str(run.labels["what"]))
            assert factors.popitem()[1] == {}
            roles = tuning_ablation.GROUPS[str(run.labels["group"])]
            assert swept == dict.fromkeys(roles, run.labels["factor"])
            continue
        assert bool(optimizer.lr_factors) == (run.labels["tuning"] != "NONE")
        decays = run.labels["tuning"] in ("LRWD", "FULL")
        assert bool(optimizer.weight_decay_factors) == decays


def test_runs_of_other_experiments_are_shared():
    keys = {
        (each.labels["tuning"], each.labels["arm"], each.labels["optimizer"]): each.key
        for each in tuning_ablation.runs("gpu")
        if each.labels["arm"] != "sweep" and each.labels["seed"] == 1
    }
    starts = {
        (each.labels["start"], each.labels["optimizer"]): each.key
        for each in initialization.runs("gpu")
        if each.labels["family"] == "hybrid" and each.labels["seed"] == 1
    }
    for optimizer in tuning_ablation.OPTIMIZERS:
        assert keys["NONE", "plain", optimizer] == starts[initialization.SMALL, optimizer]


def test_factors_reach_the_matrices_of_their_group():
    (full,) = (
        run
        for run in all_runs("cpu")
        if (run.labels.get("tuning"), run.labels["arm"]) == ("FULL", "vector")
        and run.labels["optimizer"] == "adamw"
    )
    model = empty_model(replace(full.config.model, vocab_size=512))
    plan = make_plan(model, full.config.optimizer)
    found = {role for entry in plan.entries for role in entry.role.split(" | ")}
    assert found >= {role for roles in tuning_ablation.GROUPS.values() for role in roles}
    rates = {role: e.lr_scale for e in plan.entries for role in e.role.split(" | ")}
    assert (rates["head"], rates["query"], rates["key"], rates["down"]) == (2.0, 0.5, 0.5, 1.0)
    decay = full.config.optimizer.weight_decay
    decays = {role: e.weight_decay for e in plan.entries for role in e.role.split(" | ")}
    assert (decays["ssm-dt"], decays["gate"]) == (2 * decay, 0.5 * decay)
    # Multipliers start at the fixed factors and take their place.
    folded = dict(plan.folds)
    assert folded["mup_key"] == full.config.model.mup_key

"""Tunings are compared in tiers, and a sweep says which factors to tune to."""

from dataclasses import replace

import pytest

from learnable_multipliers.experiments import initialization, tuning_ablation
from learnable_multipliers.experiments.presets import settling
from learnable_multipliers.pretrain.model.hybrid import empty_model
from learnable_multipliers.pretrain.trainer.optimizer import make_plan
from shuffling import check_shuffled, check_subsets, made_up, verdicts

TIER = 0.006
NONE, SECOND, BEST = 2 * TIER, TIER, 0.0


@pytest.fixture
def tuned(monkeypatch):
    """Fill the tables of factors, as after a sweep."""
    monkeypatch.setattr(tuning_ablation, "LR_FACTORS", {"head": 2.0, "attn in": 0.5})
    monkeypatch.setattr(tuning_ablation, "WD_FACTORS", {"ssm in": 2.0, "gate": 0.5})


def paper(tuning, arm):
    if arm == "plain":
        return NONE if tuning == "NONE" else SECOND
    return SECOND if tuning == "NONE" else BEST


def world(level, sd=3e-4):
    """Return a world in which the loss of a tuning and an arm is 3.5 plus this."""

    def made(labels, noise):
        if labels["arm"] == "sweep":
            return {"loss": 3.5}
        return {"loss": 3.5 + level(labels["tuning"], labels["arm"]) + noise.gauss(0, sd)}

    return made


def test_statistics_are_differences_of_tiers(tuned):
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
def test_the_verdict_is_that_of_the_world(tuned, level, expected):
    records = made_up(tuning_ablation, world(level))
    assert verdicts(tuning_ablation, records) == {"C13": expected}


def test_without_tuned_factors_the_claim_is_not_run():
    records = made_up(tuning_ablation, world(paper))
    assert {each.labels["tuning"] for each in records if "tuning" in each.labels} == {
        "NONE",
        "FULL",
    }
    assert verdicts(tuning_ablation, records) == {"C13": "not run"}


def test_shuffled_arms_reproduce_nothing(tuned):
    records = made_up(tuning_ablation, world(paper))
    check_shuffled(tuning_ablation, records, {"C13": ("tuning", "arm")})


def test_any_part_of_the_records_is_analysed_and_drawn(tuned):
    check_subsets(tuning_ablation, made_up(tuning_ablation, world(paper)))


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


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_arms_differ_in_what_their_labels_say(preset, tuned):
    runs = tuning_ablation.runs(preset)
    # All decay alike, but for the factors that are studied.
    assert settling(runs[0].config) >= 4
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
        # Until there are factors on rates and decays.
        assert keys["FULL", "plain", optimizer] == starts[initialization.FALCON, optimizer]


def test_factors_reach_the_matrices_of_their_group(tuned):
    (full,) = (
        run
        for run in tuning_ablation.runs("cpu")
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

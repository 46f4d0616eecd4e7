"""The harness itself: shuffling moves what it should, and would notice a claim that ignores it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from learnable_multipliers.experiments import presets, readings
from learnable_multipliers.experiments.claim import Claim, Test
from learnable_multipliers.experiments.drawing import canvas, scan
from learnable_multipliers.experiments.run import Run
from shuffling import check_shuffled, check_subsets, made_up, shuffled, verdicts

GAP = Test(name="C2.gap", what="loss of frozen - vector", bound=0.05, opposite=-0.05, effect=0.2)
CLAIM = Claim(id="C2", statement="Frozen is worse", where="Fig. 1", tests=(GAP,))


def experiment(arms=("frozen", "vector"), claim=CLAIM):
    """An experiment of some arms; the first is compared with the last."""

    def runs(preset):
        return [
            Run(
                labels={"arm": arm, "seed": seed},
                config=replace(presets.base(preset, "llama"), seed=10 * seed + index),
            )
            for seed in presets.SEEDS[preset]
            for index, arm in enumerate(arms)
        ]

    def analyse(records):
        first, last = (readings.by_seed(records, arm=arm) for arm in (arms[0], arms[-1]))
        return {
            "C2.gap": readings.paired(lambda a, b: readings.loss(a) - readings.loss(b), first, last)
        }

    def plot(records):
        plots = []
        with canvas(plots, "Loss", "By seed.", x="seed + 1", y="loss") as axes:
            scan(axes, {"all": {x.labels["seed"] + 1: [readings.loss(x.record)] for x in records}})
        return plots

    return SimpleNamespace(CLAIMS=(claim,), runs=runs, analyse=analyse, plot=plot)


def world(effect):
    return lambda labels, noise: {
        "loss": 3.5 + effect * (labels["arm"] == "frozen") + noise.gauss(0, 0.003)
    }


@pytest.mark.parametrize(
    ("effect", "verdict"),
    [(0.2, "reproduced"), (-0.2, "contradicted"), (0.0, "not at this scale")],
)
def test_worlds_have_the_verdicts_they_were_made_for(effect, verdict):
    two = experiment()
    assert verdicts(two, made_up(two, world(effect))) == {"C2": verdict}
    assert verdicts(two, made_up(two, world(effect), "cpu")) == {"C2": "underpowered"}


@pytest.mark.parametrize("arms", [("frozen", "vector"), ("frozen", "scalar", "vector")])
def test_no_shuffled_world_is_reproduced(arms):
    several = experiment(arms)
    check_shuffled(several, made_up(several, world(0.2)), {"C2": "arm"}, times=200)


def test_every_way_to_exchange_two_arms_is_drawn_but_the_identity():
    records = made_up(experiment(), world(0.2))
    drawn = Counter()
    for trial in range(400):
        moved = shuffled(records, "arm", random.Random(trial))
        wrong = [a.record is not b.record for a, b in zip(records, moved, strict=True)]
        # Both arms of a seed are wrong, or none; labels stay where they are.
        assert wrong[::2] == wrong[1::2]
        assert [each.labels for each in moved] == [each.labels for each in records]
        drawn[tuple(wrong[::2])] += 1
    assert len(drawn) == 7
    assert (False, False, False) not in drawn


def test_more_arms_are_wrong_in_every_seed():
    records = made_up(experiment(("frozen", "row", "col", "vector")), world(0.2))
    for trial in range(50):
        moved = shuffled(records, "arm", random.Random(trial))
        assert all(a.record is not b.record for a, b in zip(records, moved, strict=True))
        assert {a.labels["seed"] for a in moved if a.record is records[0].record} == {0}


def test_other_labels_hold_runs_apart():
    records = made_up(experiment(), world(0.2))
    with pytest.raises(ValueError, match="no two runs differ in width alone"):
        shuffled(records, "width", random.Random(0))


def test_a_claim_that_does_not_depend_on_labels_is_noticed():
    """A bound that noise alone clears: the check must fail."""
    lenient = Test(name="C2.gap", what="a gap", bound=-5.0, opposite=-6.0, effect=1.0)
    claim = Claim(id="C2", statement="All is well", where="nowhere", tests=(lenient,))
    always = experiment(claim=claim)
    with pytest.raises(AssertionError, match="C2 stays so when shuffled by arm"):
        check_shuffled(always, made_up(always, world(0.2)), {"C2": "arm"})
    with pytest.raises(AssertionError, match="C2 is contradicted before any shuffling"):
        check_shuffled(experiment(), made_up(experiment(), world(-0.2)), {"C2": "arm"})


def test_any_part_of_the_records_can_be_analysed_and_plotted():
    check_subsets(experiment(), made_up(experiment(), world(0.2)))


def test_an_analysis_that_fails_on_a_part_is_noticed():
    fragile = experiment()
    whole = fragile.analyse
    fragile.analyse = lambda records: whole(records) if len(records) != 1 else records[1]
    with pytest.raises(IndexError):
        check_subsets(fragile, made_up(fragile, world(0.2)))


def test_a_statistic_that_no_test_reads_is_noticed():
    astray = experiment()
    astray.analyse = lambda records: {"C2.gab": {}}
    with pytest.raises(AssertionError, match="analyse does not know the tests"):
        check_subsets(astray, made_up(astray, world(0.2)))

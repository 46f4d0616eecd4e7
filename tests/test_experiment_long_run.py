"""The gap between arms is followed over a run, and judged where the rate is constant and decays."""

import math
from dataclasses import replace

import pytest

from learnable_multipliers.experiments import long_run
from learnable_multipliers.experiments.readings import by_seed
from shuffling import made_up, verdicts

# In steps: decay begins after 80% of the 59M tokens, at 32,768 a step.
STEPS, DECAY = 1800, 1440
EVERY = long_run.runs("gpu")[0].config.log.evaluate_every
POINTS = [*range(EVERY, STEPS, EVERY), STEPS]


def world(gap, sd=1e-4):
    """Return a world in which multipliers gain gap(part of the constant stage, part of decay)."""

    def made(labels, noise):
        losses = []
        for step in POINTS:
            constant, decay = min(1.0, step / DECAY), max(0.0, (step - DECAY) / (STEPS - DECAY))
            loss = 3.5 + 2 / (1 + step / 100) - 0.1 * decay + noise.gauss(0, sd)
            losses.append(loss - gap(constant, decay) * (labels["arm"] == "vector"))
        curve = {"step": list(map(float, POINTS)), "loss": losses}
        return {"held_out": curve, "loss": losses[-1]}

    return made


def right(constant, decay):
    return 0.004 + 0.008 * constant - 0.004 * decay


RIGHT = world(right)


def test_statistics_are_those_of_the_gap():
    records = made_up(long_run, world(right, sd=0.0))
    found = long_run.analyse(records)
    late = [s for s in POINTS if 0.8 - 0.7 / 4 <= s / STEPS <= 0.8]
    final = [s for s in POINTS if s / STEPS >= 0.95]
    before = sum(right(step / DECAY, 0) for step in late) / len(late)
    after = sum(right(1, (step - DECAY) / (STEPS - DECAY)) for step in final) / len(final)
    for optimizer in ("adamw", "muon"):
        values = {name: found[f"C14.{optimizer}.{name}"] for name in ("gap", "grows", "shrinks")}
        # The constant stage begins where an eighth of it is behind, with the warmup.
        expected = {"gap": before, "grows": 0.008 * 7 / 16, "shrinks": before - after}
        for name, value in expected.items():
            assert values[name] == pytest.approx(dict.fromkeys(range(5), value), rel=1e-6)


def test_growth_is_that_of_the_second_half():
    """A head start that is lost in the first half plays no part."""
    lost = world(lambda constant, decay: right(constant, decay) + max(0.0, 0.5 - constant), sd=0.0)
    found = long_run.analyse(made_up(long_run, lost))["C14.muon.grows"]
    assert found == pytest.approx(dict.fromkeys(range(5), 0.008 * 7 / 16), rel=1e-6)


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        (right, "reproduced"),
        (lambda constant, decay: -right(constant, decay), "contradicted"),
        # A head start that is made up for: training is faster, not better.
        (lambda constant, decay: 0.02 - 0.01 * constant - 0.004 * decay, "contradicted"),
        (lambda constant, decay: right(constant, -decay), "contradicted"),
        (lambda constant, decay: 0.0, "not at this scale"),
    ],
)
def test_the_verdict_is_that_of_the_world(gap, expected):
    assert verdicts(long_run, made_up(long_run, world(gap))) == {"C14": expected}


def test_noise_as_large_as_the_gap_decides_nothing():
    assert verdicts(long_run, made_up(long_run, world(right, sd=0.02))) == {"C14": "underpowered"}


def test_a_diverged_plain_run_is_an_infinite_gap_and_says_nothing_of_growth():
    records = [
        replace(each, record=replace(each.record, loss=None, held_out={}, outcome="diverged"))
        if each.labels["arm"] == "plain"
        else each
        for each in made_up(long_run, RIGHT)
    ]
    found = long_run.analyse(records)
    assert set(found["C14.adamw.gap"].values()) == {math.inf}
    assert all(map(math.isnan, found["C14.adamw.grows"].values()))


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_arms_differ_in_their_multipliers_alone(preset):
    runs = long_run.runs(preset)
    for run in runs:
        assert run.config.optimizer.kind == run.labels["optimizer"]
        placement = {"plain": "none", "vector": "full"}[str(run.labels["arm"])]
        assert run.config.optimizer.placement == placement
        other = replace(run.config, optimizer=replace(run.config.optimizer, placement="none"))
        assert any(other == rest.config for rest in runs)


def test_the_papers_run_is_evaluated_every_gigatoken():
    for run in long_run.runs("paper"):
        tokens = run.config.data.batch_sequences * run.config.data.sequence_length
        assert run.config.log.evaluate_every * tokens == pytest.approx(1e9, rel=1e-3)
        schedule = run.config.schedule
        assert (schedule.decay_start, schedule.tokens) == (160e9, 240e9)
        assert (schedule.decay_factor, schedule.minimum_tokens) == (32, 40e9)
        # Those of the last 40 GT are there to average over.
        assert run.config.checkpoint.every == run.config.log.evaluate_every
        assert run.config.checkpoint.keep * 1e9 > schedule.minimum_tokens


def test_losses_are_paired_by_tokens():
    records = made_up(long_run, world(right, sd=0.0))
    arms = [by_seed(records, arm=arm, optimizer="muon")[1] for arm in ("plain", "vector")]
    gap = long_run.gap(*arms)
    assert list(gap) == [step * 32_768 for step in POINTS]
    assert gap[STEPS * 32_768] == pytest.approx(0.008)

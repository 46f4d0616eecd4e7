"""Claims: intervals against hand-computed numbers, and every way a verdict can come about."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest

from learnable_multipliers.experiments import claim as claims
from learnable_multipliers.experiments.claim import Claim, Test, judge, mean_interval

AT_LEAST = Test(name="C2.gap", what="loss difference, nats", bound=0.01, opposite=0.0, effect=0.02)
AT_MOST = replace(AT_LEAST, bound=-0.01, side="at most")
CLAIM = Claim(id="C2", statement="It degrades", where="Fig. 1", tests=(AT_LEAST, AT_MOST))


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # Two-sided 95% quantiles of Student's t as any printed table has them.
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (7, 2.36462), (30, 2.04227)],
)
def test_t_quantiles_are_those_of_printed_tables(degrees, quantile):
    assert claims.t_quantile(degrees) == pytest.approx(quantile, rel=2e-6)


def test_t_quantile_tends_to_that_of_the_normal_distribution():
    assert claims.t_quantile(100_001) == pytest.approx(1.95996, rel=2e-5)


def test_interval_is_the_hand_computed_one():
    # mean 2, sd 1, standard error 1 / sqrt(3), t = 4.30265
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.484138, 4.484138), abs=1e-6)
    # mean 0.4, squared deviations .09 + .01 + .01 + .09 = .2, sd = sqrt(.2 / 3), se = sd / 2
    half = 3.182446 * math.sqrt(0.2 / 3) / 2
    expected = (0.4, 0.4 - half, 0.4 + half)
    assert mean_interval([0.1, 0.3, 0.5, 0.7]) == pytest.approx(expected, abs=1e-6)


def test_equal_seeds_give_an_interval_without_width_or_rounding():
    assert mean_interval([0.1, 0.1, 0.1]) == (0.1, 0.1, 0.1)
    assert judge(replace(AT_LEAST, bound=0.1), {0: 0.1, 1: 0.1, 2: 0.1}).verdict == "reproduced"


# Three seeds at mean - d, mean and mean + d have an interval of 4.30265 d / sqrt(3) either way:
# 0.01 for this d, as wide as the effect in all.
_D = 0.01 * math.sqrt(3) / 4.30265


@pytest.mark.parametrize(
    ("mean", "spread", "verdict"),
    [
        # The interval clears the bound, or does not.
        (0.0201, _D, "reproduced"),
        (0.0199, _D, "underpowered"),
        # It ends before the opposite, or does not: as wide as the effect, and narrower.
        (-0.0101, _D, "contradicted"),
        (-0.0099, 1.01 * _D, "underpowered"),
        (-0.0095, 0.99 * _D, "not at this scale"),
        # Between the opposite and the bound.
        (0.005, 0.4 * _D, "not at this scale"),
        # All below the bound, across the opposite: too wide, and just not.
        (-0.0005, 1.02 * _D, "underpowered"),
        (-0.0005, 0.98 * _D, "not at this scale"),
        # However narrow, across the bound it is neither.
        (0.0095, 0.1 * _D, "underpowered"),
    ],
)
@pytest.mark.parametrize("mirrored", [False, True])
def test_verdict_follows_the_interval(mean, spread, verdict, mirrored):
    sign = -1 if mirrored else 1
    values = {seed: sign * (mean + step * spread) for seed, step in enumerate((-1, 0, 1))}
    judged = judge(AT_MOST if mirrored else AT_LEAST, values)
    assert judged.verdict == verdict
    assert judged.n == 3
    assert judged.mean == pytest.approx(sign * mean)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ((), "no seed has all of its runs"),
        ((1.0, 1.0), "takes at least 3 seeds"),
        ((1.0, 1.0, 1.0), "clears the bound"),
        ((-1.0, -1.0, -1.0), "beyond 0, where the opposite holds"),
        ((0.005, 0.005, 0.005), "misses the bound and is narrower than the paper's effect, 0.02"),
        ((0.0, 0.01, 0.02), "reaches across the bound"),
        ((-0.015, -0.005, -0.025), "misses the bound, but is wider than the paper's effect, 0.02"),
        ((1.0, 1.0, math.inf), "diverged"),
    ],
)
def test_verdict_says_why(values, why):
    assert why in judge(AT_LEAST, dict(enumerate(values))).why
    mirrored = {seed: -value for seed, value in enumerate(values)}
    assert why in judge(AT_MOST, mirrored).why


def test_no_seed_is_not_run_and_two_are_underpowered():
    assert judge(AT_LEAST, {}).verdict == "not run"
    assert math.isnan(judge(AT_LEAST, {}).mean)
    one, two = judge(AT_LEAST, {0: 1.0}), judge(AT_LEAST, {0: 1.0, 2: 1.0})
    assert (one.verdict, one.low, one.high) == ("underpowered", -math.inf, math.inf)
    assert (two.verdict, two.low, two.high) == ("underpowered", 1.0, 1.0)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        # All diverged on the side of the claim, or on the other one.
        ((INF, INF, INF), "reproduced"),
        ((-INF, -INF, -INF), "contradicted"),
        # Some diverged: they neither vanish nor decide, however clear the others are.
        ((INF, 1.0, 1.0), "underpowered"),
        ((1.0, 1.0, -INF), "underpowered"),
        ((INF, INF, -INF), "underpowered"),
        # Both arms of a seed diverged: it says nothing, and is not left out either.
        ((1.0, 1.0, 1.0, NAN), "underpowered"),
        ((INF, INF, NAN), "underpowered"),
    ],
)
def test_diverged_runs_stay_in_the_statistic(values, verdict):
    judged = judge(AT_LEAST, dict(enumerate(values)))
    assert judged.verdict == verdict
    assert judged.n == len(values)


def test_a_single_outlier_widens_the_interval_to_the_whole_line():
    """The limit that the rule for infinite values takes."""
    for outlier in (1e3, 1e6, 1e9):
        _, low, high = mean_interval([1.0, 1.1, outlier])
        assert low < -outlier
        assert high > outlier


def test_claim_has_the_worst_verdict_of_its_tests():
    order = ["not run", "contradicted", "underpowered", "not at this scale", "reproduced"]
    for first, second in permutations(order, 2):
        assert claims.worst([first, second]) == min(first, second, key=order.index)
    assert claims.worst(["reproduced", "reproduced"]) == "reproduced"
    assert claims.worst([]) == "not run"


def test_hash_covers_statement_and_tests_and_nothing_else():
    changed = replace(CLAIM, tests=(replace(AT_LEAST, bound=0.011), AT_MOST))
    reworded = replace(CLAIM, statement="It does not")
    assert len({CLAIM.hash, changed.hash, reworded.hash}) == 3
    assert replace(CLAIM, note="More to know", where="Fig. 2").hash == CLAIM.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"opposite": 0.01}, "cannot contradict a statistic of at least 0.01.*below"),
        ({"side": "at most", "opposite": 0.005}, "at most 0.01.*above"),
        ({"effect": 0.0}, "it is a size: above zero"),
        ({"bound": math.nan}, "must be finite"),
    ],
)
def test_tests_that_cannot_be_judged_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(AT_LEAST, **change)

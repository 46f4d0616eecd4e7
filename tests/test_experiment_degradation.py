"""The share of a degradation that multipliers recover."""

import math

import pytest

from learnable_multipliers.experiments.degradation import recovered


@pytest.mark.parametrize(
    ("without", "with_multipliers", "share"),
    [
        (0.3, 0.0, 1.0),
        (0.3, 0.1, 2 / 3),
        (0.3, 0.3, 0.0),
        (0.3, 0.6, -1.0),
        # Nothing to recover: flat without multipliers, and with them.
        (0.0, 0.0, 1.0),
        (0.01, 0.0, 1.0),
        (0.01, 0.03, 0.0),
        (math.inf, 0.2, 1.0),
    ],
)
def test_a_share_is_that_of_the_degradation_or_of_the_least_one(without, with_multipliers, share):
    assert recovered(without, with_multipliers, 0.03) == pytest.approx(share)


def test_two_runs_that_diverged_say_nothing():
    assert math.isnan(recovered(math.inf, math.inf, 0.03))

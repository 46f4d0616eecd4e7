"""Coordinate descent finds the bottom of a bowl, in few trials."""

import math

import pytest

from learnable_multipliers.experiments.headline.search import Axis, Search, best, neighbours

RATE, DECAY = Axis("lr", 4e-3, 2**0.5), Axis("wd", 0.1, 2.0)


def trace(search, loss):
    """Return all points that a search tries, in order, with their losses."""
    losses = {}
    while (point := search.next(losses)) is not None:
        assert point not in losses
        losses[point] = loss(search.values(point))
    return losses


def bowl(lr, wd):
    """Return a loss with its bottom at these values, in steps of the grid."""
    return lambda at: math.log2(at["lr"] / lr) ** 2 + 0.3 * math.log2(at["wd"] / wd) ** 2


def test_values_are_steps_of_the_ratio_to_three_digits():
    assert [RATE.value(n) for n in (-2, -1, 0, 1, 2)] == [2e-3, 2.83e-3, 4e-3, 5.66e-3, 8e-3]


@pytest.mark.parametrize(("lr", "wd"), [(4e-3, 0.1), (8e-3, 0.05), (2e-3, 0.4), (1.41e-3, 0.1)])
def test_the_bottom_of_a_bowl_is_found_and_bracketed(lr, wd):
    search = Search((RATE, DECAY), trials=50)
    losses = trace(search, bowl(lr, wd))
    assert search.values(best(losses)) == {"lr": lr, "wd": wd}
    # Every neighbour of it was tried: it lies inside of what was.
    assert set(neighbours(best(losses))) <= set(losses)


def test_a_start_at_the_bottom_takes_the_neighbours_alone():
    search = Search((RATE, DECAY), trials=50)
    losses = trace(search, bowl(4e-3, 0.1))
    assert list(losses) == [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]


def test_it_goes_on_from_a_better_point_at_once():
    search = Search((RATE, DECAY), trials=50)
    losses = trace(search, bowl(8e-3, 0.1))
    assert list(losses)[:4] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_noise_is_not_followed():
    """Gains that repeats of a run have too leave the other axes their trials."""
    search = Search((DECAY, RATE), trials=50)
    losses = trace(
        search, lambda at: 3e-4 * math.log2(at["wd"]) + bowl(4e-3, 0.1)(at) * (at["lr"] != 4e-3)
    )
    assert list(losses) == [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]


@pytest.mark.parametrize(
    ("axis", "sign", "tried"),
    [
        (Axis("x", 8.0, 4.0, minimum=1.0), 1, [8.0, 32.0, 2.0]),
        (Axis("x", 0.1, 2.0, maximum=0.8), -1, [0.1, 0.2, 0.4, 0.8]),
    ],
)
def test_values_beyond_the_ends_of_an_axis_are_never_tried(axis, sign, tried):
    search = Search((axis,), trials=50)
    losses = trace(search, lambda at: sign * at["x"])
    assert [search.values(point)["x"] for point in losses] == tried


def test_trials_are_bounded():
    search = Search((RATE, DECAY), trials=3)
    losses = trace(search, bowl(8e-3, 0.1))
    assert len(losses) == 3


def test_diverged_runs_are_never_the_best():
    search = Search((RATE,), trials=5)
    losses = trace(search, lambda at: math.nan if at["lr"] > 4e-3 else 3.0 + at["lr"])
    assert search.values(best(losses))["lr"] < 4e-3
    assert best({(0,): math.nan, (1,): math.inf, (2,): 3.0}) == (2,)
    assert best({(0,): 3.0, (1,): math.inf, (2,): math.nan}) == (0,)

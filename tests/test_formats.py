"""Numbers are written the same way everywhere."""

import pytest

from learnable_multipliers import _formats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7.5, "7.5"),
        (-12_345, "-12.3k"),
        (999.4, "999"),
        (999.6, "1k"),
        (12_345, "12.3k"),
        (999_700, "1M"),
        (4_560_000, "4.56M"),
        (3e10, "30G"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_counts_have_three_digits_and_a_letter(value, text):
    assert _formats.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (200, "3m 20s"), (7500, "2h 05m")],
)
def test_durations_have_two_units(seconds, text):
    assert _formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 MiB"), (3 * 2**19, "1.5 MiB"), (2**28, "0.25 GiB"), (41.6 * 2**30, "41.60 GiB")],
)
def test_sizes_are_in_binary_units(num_bytes, text):
    assert _formats.size(num_bytes) == text


def test_of_many_names_the_first_are_shown():
    assert _formats.first_of(["a", "b"], 2) == "a, b"
    assert _formats.first_of(["a", "b", "c", "d", "e"], 2) == "a, b and 3 more"

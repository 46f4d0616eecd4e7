"""Plots of experiments: what is drawn are the numbers, and nothing is left out or unlabelled."""

from __future__ import annotations

import math
import re

import pytest

from learnable_multipliers.experiments.drawing import (
    Plot,
    canvas,
    categories,
    curves,
    level,
    power_laws,
    ratio,
    scan,
)


def shown(x: str = "x", y: str = "y"):
    """Return axes to draw on, of a plot of its own."""
    return canvas([], "Loss", "The loss.", x=x, y=y)


def test_curve_is_the_mean_of_seeds_inside_their_range():
    with shown() as axes:
        curves(axes, {"arm": [{1: 2.0, 2: 1.0}, {1: 4.0, 2: 2.0}]})
    assert axes.lines[0].get_ydata().tolist() == [3.0, 1.5]
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (1.0, 4.0)


def test_diverged_seed_is_crossed_where_it_ended():
    with shown() as axes:
        curves(axes, {"arm": [{1: 2.0, 2: 1.0, 3: 0.5}, {1: 4.0, 2: 3.0, 3: math.nan}]})
    line, cross = axes.lines
    assert line.get_ydata().tolist() == [3.0, 2.0, 0.5]
    assert (cross.get_marker(), cross.get_xdata()[0], cross.get_ydata()[0]) == ("x", 2, 3.0)


def test_steep_start_does_not_widen_the_axis():
    with shown() as axes:
        curves(axes, {"arm": [{0: 90.0, 50: 2.0, 100: 1.0}]}, early=0.3)
    assert axes.get_ylim() == pytest.approx((0.92, 2.08))


def test_scan_marks_the_mean_and_shows_what_diverged():
    with shown() as axes:
        scan(axes, {"arm": {8.0: [1.0, 3.0], 0.125: [2.0, math.inf], 64.0: [math.inf]}})
    line, *triangles = axes.lines
    assert line.get_xdata().tolist() == [0.125, 8.0]
    assert line.get_ydata().tolist() == [2.0, 2.0]
    assert sorted(mark.get_xdata()[0] for mark in triangles) == [0.125, 64.0]
    assert axes.get_xscale() == "log"
    low, high = axes.get_xlim()
    assert low < 0.125 < 64.0 < high
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1/8", "8", "64"]


def test_settings_stand_beside_each_other_with_the_mean_of_their_seeds():
    with shown() as axes:
        found = {"small start": [1.0, 3.0], "b": [2.0, math.inf], "c": [math.inf]}
        categories(axes, {"AdamW": found, "Muon": {"c": [4.0]}})
    first, *triangles, second = axes.lines
    assert first.get_ydata().tolist() == [2.0, 2.0]
    assert first.get_xdata().tolist() == pytest.approx([-0.08, 0.92])
    assert (second.get_xdata()[0], second.get_ydata()[0]) == pytest.approx((2.08, 4.0))
    assert [mark.get_xdata()[0] for mark in triangles] == pytest.approx([0.92, 1.92])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["small start", "b", "c"]
    assert [text.get_text() for text in axes.figure.legends[0].texts] == ["AdamW", "Muon"]


def test_power_law_is_fitted_by_least_squares_in_logarithms():
    # log y = 0, 1, 5 at log x = 0, 1, 2: slope 5/2, mean 2 at 1. What is not positive has no log.
    points = [*((math.exp(x), math.exp(y)) for x, y in ((0, 0), (1, 1), (2, 5))), (3.0, -1.0)]
    with shown() as axes:
        power_laws(axes, {"head": points, "one": [(3.0, 1.0)]})
    assert [text.get_text() for text in axes.figure.legends[0].texts] == ["head: +2.50", "one"]
    fitted = axes.lines[1]
    assert fitted.get_ydata() == pytest.approx([math.exp(-0.5), math.exp(4.5)])


@pytest.mark.parametrize(
    ("value", "text"),
    [(8.0, "8"), (1.0, "1"), (1 / 64, "1/64"), (0.7, "0.7"), (2**-0.5, "0.707107")],
)
def test_scales_are_written_as_fractions(value, text):
    assert ratio(value) == text


def test_level_is_named():
    with shown() as axes:
        level(axes, 2.0, "plain run")
    assert [text.get_text() for text in axes.texts] == ["plain run"]


def test_a_plot_without_a_label_raises():
    with (
        pytest.raises(ValueError, match="plot 'Loss' has an axis without a label"),
        shown(x=""),
    ):
        pass


def test_equal_plots_give_equal_bytes():
    def drawn() -> str:
        plots: list[Plot] = []
        with canvas(plots, "Loss", "The loss.", x="step", y="loss") as axes:
            curves(axes, {"arm": [{1: 2.0, 2: 1.0}]})
        return plots[0].svg("loss-0")

    assert drawn() == drawn()


def test_svg_rounds_coordinates_and_leaves_words_alone():
    plots: list[Plot] = []
    with canvas(plots, "Loss", "The loss.", x="step 0.123456", y="loss") as axes:
        curves(axes, {"arm": [{1: 2.0, 2: 1.0, 7: 1.123456}]})
    svg = plots[0].svg("loss-0")
    tags = re.findall("<[^>]*>", svg)
    assert not [tag for tag in tags if re.search(r"\.\d{3}", tag)]
    assert ">step 0.123456<" in svg


@pytest.mark.parametrize(
    ("points", "empty"), [({}, True), ({8.0: []}, True), ({8.0: [math.inf]}, False)]
)
def test_a_plot_of_no_run_is_empty_and_one_of_a_diverged_run_is_not(points, empty):
    plots: list[Plot] = []
    with canvas(plots, "Loss", "", x="S", y="loss") as axes:
        scan(axes, {"arm": points})
        level(axes, 1.0, "the paper's")
    assert plots[0].is_empty == empty

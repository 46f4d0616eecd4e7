"""Runs of experiments: what tells two of them apart, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from learnable_multipliers.experiments import presets
from learnable_multipliers.experiments.run import Run, key_of

CONFIG = presets.base("gpu", "llama")


def test_key_is_that_of_what_decides_the_result():
    elsewhere = replace(
        CONFIG,
        out=Path("elsewhere"),
        name="mine",
        data=replace(CONFIG.data, path=Path("text")),
        runtime=replace(CONFIG.runtime, device="cpu"),
    )
    assert key_of(elsewhere) == key_of(CONFIG)
    assert key_of(replace(CONFIG, seed=1)) != key_of(CONFIG)


def test_a_whole_number_has_the_key_of_its_float():
    """As a record is read back: JSON does not keep the difference."""
    whole, point = (
        replace(CONFIG, schedule=replace(CONFIG.schedule, decay_factor=factor))
        for factor in (2, 2.0)
    )
    assert key_of(whole) == key_of(point)


def test_labels_are_one_line():
    run = Run(labels={"arm": "frozen", "scale": 64.0, "seed": 0}, config=CONFIG)
    assert run.in_words == "frozen scale=64 seed=0"

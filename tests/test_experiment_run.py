"""Runs of experiments: what tells two of them apart, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from learnable_multipliers.experiments import catalogue, presets
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


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_runs_of_all_experiments_keep_to_the_protocol(preset):
    for name in catalogue.MODULES:
        runs = catalogue.load(name).runs(preset)
        assert len({run.key for run in runs}) == len(runs), name
        seeds = [run.labels["seed"] for run in runs]
        assert seeds == sorted(seeds) == [run.config.seed for run in runs], name
        rates = {}
        for run in runs:
            config, optimizer = run.config, run.config.optimizer
            # The data decide about the vocabulary.
            replace(config, model=replace(config.model, vocab_size=4096)).check()
            assert config.log.signals_every or name in ("long_run", "tuning_ablation"), name
            rates[config.schedule, optimizer.lr, optimizer.weight_decay] = config
        assert all(presets.settling(config) >= 4 for config in rates.values()), name

"""The command that an experiment prints trains what the experiment means."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from learnable_multipliers.cli.train import configure
from learnable_multipliers.experiments import catalogue
from learnable_multipliers.experiments.command import arguments, command_of
from learnable_multipliers.experiments.presets import base
from learnable_multipliers.pretrain.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("place")
PRESETS = ("cpu", "gpu", "paper")


def parsed(config):
    """Return the config that the command of a config makes."""
    words = shlex.split(command_of(config))
    assert words[:2] == ["lrm", "train"]
    return configure(words[2:])


def on_data(config):
    return replace(config, data=replace(config.data, path=config.data.path or Path("DATA")))


# Each parse takes a moment: one command for each set of options stands for those with other values.
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", catalogue.MODULES)
def test_the_commands_of_an_experiment_make_its_configs(name, preset):
    by_options = {}
    for run in catalogue.load(name).runs(preset):
        options = tuple(word for word in arguments(run.config) if word.startswith("--"))
        by_options.setdefault(options, run.config)
    for config in by_options.values():
        assert parsed(config) == on_data(config)


@pytest.mark.parametrize("family", ["llama", "hybrid"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_commands_of_the_plain_runs_make_their_configs(preset, family):
    config = base(preset, family)
    assert parsed(config) == on_data(config)


def test_any_setting_may_differ():
    config = RECIPES["20m"][1]
    config = replace(
        config,
        name="a 'name' with $HOME",
        seed=7,
        optimizer=replace(
            config.optimizer,
            betas=(0.5, 1e-5),
            eps=1e-16,
            kind="muon",
            rules=(". only=head kind=row", r"layers\.\d+\. kind=none"),
            lr_factors={"head": 0.1, "up": 8.0},
            norm_scale={"head": 1 / 64},
        ),
        log=replace(config.log, drift=False, prompt=""),
        data=replace(config.data, path=Path("some where")),
        resume=True,
    )
    assert parsed(config) == config
    assert command_of(config).startswith("lrm train 20m ")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_needs_no_options_but_the_data(name):
    config = RECIPES[name][1]
    assert arguments(config) == [name, "--data.path", "DATA"]
    expected = f"torchrun --nproc-per-node 8 --no-python lrm train {name} --data.path DATA"
    assert command_of(config, num_ranks=8) == expected

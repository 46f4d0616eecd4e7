"""What holds for every experiment, in a made-up world where the paper is right.

The world is `RIGHT` of the experiment's own tests, `test_experiment_NAME.py`.
"""

import importlib

import pytest

from learnable_multipliers.experiments import catalogue
from shuffling import SHUFFLED, check_shuffled, check_subsets, made_up

SHARED = {"width_scales": "width_mup"}
"""Experiment -> the one whose runs it has."""


# Subtests: the short grid keeps but two cases of a parametrized test.
@pytest.fixture(scope="module")
def records(labelled):
    """The records of every experiment."""
    made = {}
    for name in catalogue.MODULES:
        tests = importlib.import_module(f"test_experiment_{SHARED.get(name, name)}")
        made[name] = made_up(catalogue.load(name), tests.RIGHT)
    return {**made, "headline": labelled}


def test_shuffled_labels_reproduce_no_claim(records, subtests):
    for name, made in records.items():
        with subtests.test(name):
            experiment = catalogue.load(name)
            ids = [claim.id for claim in experiment.CLAIMS if SHUFFLED[claim.id]]
            check_shuffled(experiment, made, {each: SHUFFLED[each] for each in ids})


def test_any_part_of_the_records_is_analysed_and_drawn(records, subtests):
    for name, made in records.items():
        with subtests.test(name):
            check_subsets(catalogue.load(name), made)

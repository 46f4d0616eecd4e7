"""The published verdicts: what the committed records give, and nothing without or against them."""

import random
import re
from pathlib import Path

import pytest

from learnable_multipliers.experiments import catalogue, ledger
from learnable_multipliers.experiments.record import Labelled, read_records
from shuffling import SHUFFLED, shuffled, verdicts

RESULTS = Path(__file__).parents[1] / "results"
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


@pytest.fixture(scope="module")
def records():
    found = read_records(RESULTS / "experiments")
    return {
        name: [
            Labelled(labels=run.labels, record=found[run.key])
            for run in catalogue.load(name).runs("gpu")
            if run.key in found
        ]
        for name in catalogue.MODULES
    }


def test_committed_verdicts_are_those_of_the_committed_records(records):
    published = (RESULTS / "claims.json").read_text()
    found = ledger.to_json(ledger.verdicts(records), "gpu")
    # The last digit depends on the CPU.
    assert NUMBER.sub("", found) == NUMBER.sub("", published)
    numbers = ([float(number) for number in NUMBER.findall(text)] for text in (found, published))
    assert next(numbers) == pytest.approx(next(numbers), abs=2e-6)


def test_without_records_every_verdict_is_not_run():
    entries = ledger.verdicts({name: [] for name in catalogue.MODULES})
    assert {entry.verdict for entry in entries} == {"not run"}


def test_no_verdict_survives_a_shuffling_of_its_records(records):
    for name in catalogue.MODULES:
        experiment = catalogue.load(name)
        found = verdicts(experiment, records[name])
        for claim in [c for c, verdict in found.items() if verdict == "reproduced" and SHUFFLED[c]]:
            for trial in range(3):
                moved = shuffled(records[name], SHUFFLED[claim], random.Random(trial))
                assert verdicts(experiment, moved)[claim] != "reproduced", claim

"""Records are read by label, seed and role; what is missing is left out."""

import math
from typing import Any

import pytest

from learnable_multipliers.experiments import readings
from learnable_multipliers.experiments.record import Labelled, Record


def _record(**fields: Any) -> Record:
    values: dict[str, Any] = {
        "key": "k",
        "config": {},
        "ledger": {},
        "outcome": "finished",
        "loss": 3.0,
        "bits_per_byte": None,
        "train": {},
        "held_out": {},
        "weights": [],
        "readings": [],
        "signals": [],
        "drift": [],
        "tokens": 1,
        "seconds": 1.0,
        "tokens_per_second": 1.0,
        "device": "cpu",
        "torch": "",
    }
    return Record(**(values | fields))


def _arms(losses: dict[tuple[str, int], float | None]) -> list[Labelled]:
    return [
        Labelled(labels={"arm": arm, "seed": seed}, record=_record(loss=loss))
        for (arm, seed), loss in losses.items()
    ]


def test_pairs_are_of_the_seeds_that_all_arms_have():
    records = _arms({("a", 0): 3.0, ("b", 0): 2.5, ("a", 1): 3.5, ("b", 2): 2.0})
    arms = readings.by_seed(records, arm="a"), readings.by_seed(records, arm="b")
    assert readings.paired(lambda a, b: a.loss - b.loss, *arms) == {0: 0.5}
    assert readings.paired(lambda a: None, arms[0]) == {}


def test_labels_that_leave_two_records_of_a_seed_are_rejected():
    records = _arms({("a", 0): 3.0, ("b", 0): 2.5})
    with pytest.raises(ValueError, match="two records of seed 0"):
        readings.by_seed(records)


def test_a_sweep_collects_runs_by_a_label():
    records = [
        Labelled(labels={"scale": scale, "seed": seed}, record=_record(loss=scale + seed))
        for seed in (0, 1)
        for scale in (8.0, 1.0)
    ]
    assert readings.sweep(records, "scale", readings.loss) == {1.0: [1.0, 2.0], 8.0: [8.0, 9.0]}
    assert readings.distinct(records, "scale") == [1.0, 8.0]


def test_a_diverged_run_stays_in_a_comparison():
    records = _arms({("a", 0): None, ("b", 0): 2.5})
    arms = readings.by_seed(records, arm="a"), readings.by_seed(records, arm="b")
    difference = readings.paired(lambda a, b: readings.loss(a) - readings.loss(b), *arms)
    assert difference == {0: math.inf}


def test_roles_are_read_in_geometric_mean_over_layers():
    weights = {
        "step": 4,
        "roles": {"0.up": "up", "1.up": "up", "in": "ssm-z/ssm-x"},
        "raw_rms": {"0.up": 0.1, "1.up": 0.4, "in": 0.3},
        "multipliers": {"0.up": {"scalar": [2.0] * 7}, "1.up": {"scalar": [-8.0] * 7}},
    }
    record = _record(weights=[{"step": 1}, weights])
    assert readings.role_rms(record, "up") == pytest.approx(0.2)
    assert readings.role_rms(record, "ssm-x") == pytest.approx(0.3)
    assert readings.role_rms(record, "up", key="predicted_rms") is None
    assert readings.role_rms(record, "down") is None
    assert readings.role_multiplier(record, "up") == pytest.approx(4.0)
    assert readings.role_multiplier(record, "ssm-x") is None


def test_signals_are_read_over_layers_and_steps():
    first = {"step": 1, "activations": {"logits": 2.0, "mlp_out": [1.0, 4.0]}}
    record = _record(signals=[first, {"step": 9, "activations": {"mlp_out": [9.0, 1.0]}}])
    assert readings.activation(record, "mlp_out") == pytest.approx(3.0)
    assert readings.activation(record, "logits") is None
    found = readings.over_steps(
        record.signals, lambda s: readings.activation(record, "logits", signals=s)
    )
    assert found == {1: pytest.approx(2.0)}


def test_readings_are_found_by_part_and_role():
    found = [
        {"name": "in", "part": "weight", "role": "ssm-z/ssm-x"},
        {"name": "up", "part": "row", "role": "up"},
    ]
    record = _record(readings=found)
    assert readings.diagnoses(record, role="ssm-x") == found[:1]
    assert readings.diagnoses(record, part="row", role="ssm-x") == []


def test_exponents_of_a_power_law_are_exact():
    rows = [(lr, wd) for lr in (1.0, 2.0, 4.0) for wd in (0.5, 1.0)]
    values = [3 * lr**0.5 * wd**-0.25 for lr, wd in rows]
    assert readings.exponents(rows, values) == pytest.approx([0.5, -0.25], abs=1e-12)
    assert readings.exponents(rows[:1], values[:1]) is None
    assert readings.exponents([], []) is None


def test_spread_is_the_largest_over_the_smallest():
    assert readings.spread([2.0, 8.0, 4.0]) == 4.0
    assert readings.spread([2.0]) is None

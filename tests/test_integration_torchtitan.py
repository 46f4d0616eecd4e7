"""torchtitan's trainer with multipliers, on two ranks with FSDP2 and its own checkpoints."""

import math

import pytest
import torch

import learnable_multipliers as lrm
import titan
from ranks import Ranks

pytest.importorskip("torchtitan")
pytest.importorskip("tensorboard")
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
"""Two ranks add gradients up in another order than one process."""
RATES = [8e-4 * factor for factor in (0.5, 1.0, 2 / 3, 1 / 3)]
"""Of torchtitan's schedule in the debug config: two steps of warmup, then linear to 0."""


@pytest.fixture(scope="module")
def ranks():
    found = Ranks(2)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """Return the folder, start and end of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    start, end = ranks.run(titan.train, folder)[0]
    return folder, start, end


@pytest.fixture(scope="module")
def reference(ranks, whole):
    """Return the end and the readings of a plain loop from the same start."""
    settings = {"weight_decay": 0.1, "betas": (0.9, 0.95)}
    return ranks.run(titan.plain, whole[1]["weights"], RATES, lrm.AdamW, settings)[0]


def logged(folder):
    """Return what torchtitan wrote to TensorBoard: by name, the values of all steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in sorted(folder.glob("tb/*/events*")):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({e.step: e.value for e in events.Scalars(tag)})
    return found


def assert_same(ours, theirs, **tolerance):
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    for part in ("weights", "raw"):
        assert ours[part].keys() == theirs[part].keys()
        for name, value in ours[part].items():
            torch.testing.assert_close(value, theirs[part][name], **tolerance)
    assert ours["multipliers"].keys() == theirs["multipliers"].keys()
    for name, parts in ours["multipliers"].items():
        for part, value in parts.items():
            torch.testing.assert_close(value, theirs["multipliers"][name][part], **tolerance)
            assert bool((value != 1).any())


def test_torchtitan_trains_as_a_plain_loop(whole, reference):
    assert whole[2]["step"] == titan.STEPS
    assert len(whole[2]["multipliers"]) == 11
    assert_same(whole[2], reference[0], **TOLERANCE)

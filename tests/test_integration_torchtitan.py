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
RATES = [8e-4 * factor for factor in (0.5, 1.0, 1.0, 0.5)]
"""Of torchtitan's schedule in the debug config."""


@pytest.fixture(scope="module")
def ranks():
    workers = Ranks(2)
    yield workers
    workers.stop()


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

    by_tag = {}
    for file in sorted(folder.glob("tb/*/events*")):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            by_tag.setdefault(tag, {}).update({e.step: e.value for e in events.Scalars(tag)})
    return by_tag


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
    assert len(whole[2]["multipliers"]) == 12
    assert_same(whole[2], reference[0], **TOLERANCE)


def test_torchtitan_clips_the_raw_norm_and_logs_it(whole, reference):
    metrics = logged(whole[0])
    raw, effective = ([reading[i] for reading in reference[1]] for i in (0, 1))
    assert min(raw) > titan.CLIP
    assert list(metrics["raw_grad_norm"].values()) == pytest.approx(raw, rel=1e-5)
    # What torchtitan logs as grad_norm is another norm once multipliers have moved.
    assert list(metrics["grad_norm"].values()) == pytest.approx(effective, rel=1e-4)
    assert raw[0] == pytest.approx(effective[0], rel=1e-6)
    assert raw[-1] != pytest.approx(effective[-1], rel=1e-3)


def test_torchtitan_resumes_bit_for_bit(ranks, whole, tmp_path):
    ranks.run(titan.train, tmp_path, 2)
    start, end = ranks.run(titan.train, tmp_path)[0]
    assert start["step"] == 0
    assert end["step"] == titan.STEPS
    assert_same(end, whole[2])
    assert end["health"] == whole[2]["health"]
    assert end["monitor"] == whole[2]["monitor"]
    assert not math.isnan(end["health"]["noise/matrices"])


def test_torchtitan_logs_health_with_its_metrics(whole, reference):
    metrics = logged(whole[0])
    for step, (_, _, health) in enumerate(reference[1], start=1):
        for name, value in health.items():
            assert metrics[name][step] == pytest.approx(value, rel=0.02, abs=1e-3), name
    assert metrics["loss_metrics/global_avg_loss"].keys() == metrics["noise/matrices"].keys()


def test_torchtitan_trains_with_muon(ranks, tmp_path):
    _, end = ranks.run(titan.train, tmp_path, 1, "Muon")[0]
    moved = [value for parts in end["multipliers"].values() for value in parts.values()]
    assert all(bool((value != 1).any()) for value in moved)


def test_torchtitan_rejects_what_would_train_without_multipliers(ranks, tmp_path):
    groups, parts = ranks.run(titan.stock, tmp_path)[0]
    assert "param_groups make optimizers without multipliers" in groups
    assert "pipeline parallelism is not supported" in parts

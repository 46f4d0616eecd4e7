"""Accelerate needs nothing of ours: prepare, accumulate, save, load and shard as with torch's."""

import pytest
import torch

import learnable_multipliers as lrm
from accelerated_training import batches, build, fsdp2, loss_of, plain, snapshot

accelerate = pytest.importorskip("accelerate")

KINDS = ["adamw", "muon", "SGD", "AdamW"]


@pytest.fixture
def fresh():
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def two_ranks():
    from ranks import Ranks

    workers = Ranks(2)
    yield workers
    workers.stop()


def train(accelerator, model, optimizer, steps, parts=1):
    for batch in steps:
        for part in batch.chunk(parts):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, part))
                optimizer.step()
                optimizer.zero_grad()


def assert_equal(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, msg=name, **tolerance)


EXACT = {"rtol": 0, "atol": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_trains_and_clips_as_a_plain_loop(kind, fresh):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*build(kind))
    train(accelerator, model, optimizer, batches())
    expected = plain(kind)
    # Above the bound, so that every step was clipped.
    assert expected["norm"] > 0.05
    assert_equal(snapshot(model, optimizer), expected, **EXACT)


def test_accumulated_gradients_are_those_of_the_whole_batch(fresh):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*build("adamw"))
    train(accelerator, model, optimizer, batches(), parts=2)
    assert_equal(snapshot(model, optimizer), plain("adamw"), rtol=1e-5, atol=1e-6)


def test_clipping_by_hand_takes_the_prepared_optimizer(fresh):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*build("adamw", max_grad_norm=None))
    norms = []
    for batch in batches():
        accelerator.backward(loss_of(model, batch))
        norms.append(lrm.clip_grad_norm_(optimizer, 0.05))
        optimizer.step()
        optimizer.zero_grad()
    expected = plain("adamw")
    torch.testing.assert_close(norms[-1], expected.pop("norm"), rtol=1e-5, atol=0)
    actual = snapshot(model, optimizer)
    del actual["norm"]
    assert_equal(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_save_state_and_load_state_resume_bit_for_bit(kind, precision, tmp_path, fresh):
    def start():
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        return accelerator, *accelerator.prepare(*build(kind))

    accelerator, model, optimizer = start()
    train(accelerator, model, optimizer, batches()[:2])
    accelerator.save_state(tmp_path)
    train(accelerator, model, optimizer, batches()[2:])
    expected = snapshot(model, optimizer)
    accelerator, model, optimizer = start()
    accelerator.load_state(tmp_path)
    train(accelerator, model, optimizer, batches()[2:])
    assert_equal(snapshot(model, optimizer), expected, **EXACT)


def test_mixed_precision_is_autocast_around_float32_weights(fresh):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(*build("adamw"))
    train(accelerator, model, optimizer, batches())
    other, expected = build("adamw")
    for batch in batches():
        with torch.autocast("cpu", torch.bfloat16):
            out = other(batch)
        (out.float() - batch.flip(-1)).square().mean().backward()
        expected.step()
        expected.zero_grad()
    assert_equal(snapshot(model, optimizer), snapshot(other, expected), **EXACT)


def test_health_of_a_prepared_optimizer_is_that_of_a_plain_loop(fresh):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*build("adamw"))
    monitor = lrm.Monitor(optimizer)
    train(accelerator, model, optimizer, batches())
    other, expected = build("adamw")
    followed = lrm.Monitor(expected)
    train(accelerator, other, expected, batches())
    metrics = monitor.health().metrics()
    assert metrics == followed.health().metrics()
    assert metrics["multipliers/largest"] > 1.01
    accelerator.log(metrics)  # What trackers get.
    assert lrm.diagnose(optimizer).readings == lrm.diagnose(expected).readings


@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_trains_all_as_one_process_does_and_resumes(kind, tmp_path, two_ranks):
    expected, start = plain(kind), snapshot_at_start(kind)
    whole, *_ = two_ranks.run(fsdp2, kind, str(tmp_path))
    actual, health, num_sharded = whole
    assert num_sharded == 6
    assert_equal(actual, expected, rtol=2e-5, atol=1e-6)
    # Norms and biases as well: all have moved far more than the tolerance.
    for name, value in start.items():
        assert (actual[name] - value).abs().max() > 1e-4, name
    assert health["multipliers/largest"] == pytest.approx(
        max(v.max().item() for n, v in expected.items() if n.startswith(("row", "col")))
    )
    two_ranks.run(fsdp2, kind, str(tmp_path), 2)
    resumed, *_ = two_ranks.run(fsdp2, kind, str(tmp_path), None, True)
    assert_equal(resumed[0], actual, **EXACT)


def snapshot_at_start(kind):
    model, _ = build(kind)
    return {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}

"""Ranks that hold replicas of all parameters skip the same steps, and notice when they differ."""

import gc
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers.optim._replicas import CHECK_EVERY, ReplicasDifferError
from parallel_training import (
    Collectives,
    backward,
    batch,
    fresh,
    largest_difference,
    make,
    mesh_of,
    parallelize,
    reference,
    results,
    train,
)


def started(optimizer, *, seen=True, group=False):
    """Return a DDP model, its optimizer, and this rank's part; None on ranks that have none.

    Its ranks show by the model itself (`seen`), by the process group that is given, or not at all.
    """
    mesh = mesh_of("ddp 2")
    if mesh is None:
        return None
    model, plan = fresh("row+col")
    model, part, parts = parallelize(model, "ddp 2")
    more = {"process_group": mesh.get_group()} if group else {}
    made = make(optimizer, model if seen else model.module, plan, **more)
    return model, made, (part, parts)


def apart(tensor):
    """Return how far the tensors of two ranks are apart."""
    group = mesh_of("ddp 2").get_group()
    ends = torch.stack((tensor, -tensor))
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    return ends.sum(0).abs().max().item()


def assert_equal_replicas(model, made):
    distances = {name: apart(value.double()) for name, value in results(model, made).items()}
    del distances["norm"]
    assert set(distances.values()) == {0.0}


def spoilt_step(model, made, part, step, value):
    """Take a step with a number in one rank's gradient that came after the all-reduce."""
    backward(model, batch(step, *part))
    if dist.get_rank() == 1:
        model.module.up.weight.grad[3, 1] = value
    made.step()
    made.zero_grad()


WAYS = {
    "adamw, DDP is seen": ("adamw", {}),
    "adamw, group is given": ("adamw", {"seen": False, "group": True}),
    "muon, DDP is seen": ("muon", {}),
    "muon, group is given": ("muon", {"seen": False, "group": True}),
    "wrapped, DDP is seen": ("wrapped", {}),
    "wrapped, group is given": ("wrapped", {"seen": False, "group": True}),
}


def skips(way):
    optimizer, how = WAYS[way]
    run = started(optimizer, **how)
    if run is None:
        return
    model, made, part = run
    for step in range(10):
        value = {3: math.nan, 5: math.inf, 7: -math.inf}.get(step)
        if value is not None:
            spoilt_step(model, made, part, step, value)
            assert bool(made.skipped_last)
        train(model, made, *part, steps=[step])
        assert not made.skipped_last
    assert made.num_skipped == 3
    assert_equal_replicas(model, made)
    largest_difference(results(model, made), results(*reference(optimizer, "row+col")))


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_one_replica_sees_after_the_all_reduce_is_skipped_on_all(way, ranks):
    ranks.run(skips, way)


def unseen():
    """Skip a step on one rank where nothing shows that there are others."""
    run = started("adamw", seen=False)
    if run is None:
        return
    model, made, part = run
    train(model, made, *part, steps=[0])
    spoilt_step(model, made, part, 1, math.nan)
    assert made.num_skipped == int(dist.get_rank() == 1)
    assert apart(model.module.up.weight.detach()) > 1e-3


def test_without_a_group_replicas_diverge(ranks):
    ranks.run(unseen)


# -- replicas that differ -----------------------------------------------------------------------


def differ(optimizer, what, changed_after):
    """Change one rank's replica between two checks; return the step that reports it, and how."""
    run = started(optimizer)
    if run is None:
        return None
    model, made, part = run
    train(model, made, *part, steps=range(changed_after))
    if dist.get_rank() == 1:
        if what == "weight":
            with torch.no_grad():
                model.module.down.weight[2, 4] += 1e-2
            made.sync_from_model_()
        else:
            with made.rewriting(["up.weight"]) as (state,):
                state.multipliers["row"][1] *= 1.1
    return first_report(lambda step: train(model, made, *part, steps=[step]), changed_after)


def first_report(take_step, start=0):
    for step in range(start, start + CHECK_EVERY):
        try:
            take_step(step)
        except ReplicasDifferError as error:
            return step, str(error)
    return None


@pytest.mark.parametrize(
    ("optimizer", "what", "name", "changed_after", "reported_at", "since"),
    [
        ("adamw", "weight", "down.weight", 1, 2, 2),
        ("muon", "multiplier", "up.weight", 3, 100, 98),
        ("adamw", "weight", "down.weight", 101, 200, 100),
    ],
)
def test_replicas_that_differ_are_reported_within_a_hundred_steps(
    optimizer, what, name, changed_after, reported_at, since, ranks
):
    assert CHECK_EVERY == 100
    for step, error in ranks.run(differ, optimizer, what, changed_after)[:2]:
        assert step == reported_at
        assert error.startswith(f"the replicas of {name} ")
        assert f"in the last {since} steps a rank was changed alone" in error
        assert "restart from a checkpoint" in error


def never_averaged(warmup):
    """Train replicas on different data without DDP; return the step that reports it, and how."""
    mesh = mesh_of("ddp 2")
    if mesh is None:
        return None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    made = lrm.AdamW.from_model(model, lr=1e-2, process_group=mesh.get_group())
    torch.manual_seed(1 + dist.get_rank())

    def take_step(step):
        if warmup:
            for group in made.param_groups:
                group["lr"] = 1e-2 * step / warmup
        model(torch.randn(2, 3)).square().sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        try:
            made.step()
        except ReplicasDifferError:
            assert all(map(torch.equal, model.parameters(), before))
            raise
        made.zero_grad()

    return first_report(take_step)


@pytest.mark.parametrize("warmup", [0, 50])
def test_gradients_that_are_not_averaged_are_reported_after_the_second_step(warmup, ranks):
    for step, error in ranks.run(never_averaged, warmup)[:2]:
        assert step == 2
        assert (
            "rms: either gradients were not averaged over the ranks (wrap the model in "
            "DistributedDataParallel, or all_reduce gradients before the step), or in the last 2 "
            "steps a rank was changed alone"
        ) in error


def differ_at_start():
    mesh = mesh_of("ddp 2")
    if mesh is None:
        return None
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    made = lrm.AdamW.from_model(model, "none", lr=1e-2, process_group=mesh.get_group())
    model(torch.ones(2, 3)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ReplicasDifferError, match="did not start from the same weights"):
        made.step()
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_replicas_with_different_initial_weights_raise_at_the_first_step(ranks):
    assert ranks.run(differ_at_start)[:2] == [True, True]


def differ_by_rounding():
    run = started("adamw")
    if run is None:
        return None
    model, made, part = run
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.module.down.weight.mul_(1 + 1e-9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, made, *part, steps=range(CHECK_EVERY + 1))
    return [str(one.message) for one in caught]


def test_replicas_that_differ_by_rounding_warn_once(ranks):
    for messages in ranks.run(differ_by_rounding)[:2]:
        (one,) = messages
        assert "replicas of down.weight differ between ranks, by " in one
        assert "round differently" in one


# -- what it costs ------------------------------------------------------------------------------


def sent(optimizer, seen):
    """Return what the second and third step send, and whether one rank alone can show its state."""
    run = started(optimizer, seen=seen)
    if run is None:
        return None
    model, made, part = run
    train(model, made, *part, steps=[0])
    seen_by_steps = []
    for step in (1, 2):
        backward(model, batch(step, *part))
        with Collectives() as collectives:
            made.step()
        seen_by_steps.append(collectives.seen)
    return seen_by_steps


def test_agreement_costs_one_message_of_four_numbers(ranks):
    for messages in ranks.run(sent, "adamw", True)[:2]:
        assert messages == [[("allreduce_", 32)]] * 2
    for messages in ranks.run(sent, "adamw", False)[:2]:
        assert messages == [[], []]


def groups_outlive_ddp():
    mesh = mesh_of("ddp 2")
    if mesh is None:
        return None
    model, plan = fresh("row+col")
    groups = lrm.param_groups(parallelize(model, "ddp 2")[0], plan)
    gc.collect()
    made = lrm.AdamW(groups, lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    with Collectives() as collectives:
        made.step()
    return collectives.seen


def test_groups_keep_the_process_group_of_a_deleted_ddp_model(ranks):
    for messages in ranks.run(groups_outlive_ddp)[:2]:
        assert messages == [("allreduce_", 32)]


def shown_alone():
    """Look at the state on one rank, as tools do that save on the first rank alone."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    run = started("adamw")
    if run is None:
        return
    model, made, part = run
    if dist.get_rank() == 0:
        assert get_optimizer_state_dict(model, made)["state"]
    train(model, made, *part, steps=range(2))
    assert_equal_replicas(model, made)


def test_one_rank_may_read_the_state_alone(ranks):
    ranks.run(shown_alone)

"""Copies of a sharded optimizer's state: deepcopy, torch.save and asynchronous checkpoints."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import learnable_multipliers as lrm

MADE = {
    "adamw": lambda model: lrm.AdamW.from_model(model, lr=1e-2),
    "muon": lambda model: lrm.Muon.from_model(model, lr=1e-2),
    "wrapped": lambda model: lrm.LearnableMultipliers.from_model(
        torch.optim.SGD, model, lr=0.1, momentum=0.9
    ),
}


@pytest.fixture
def mesh():
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(kind, mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    fully_shard(model, mesh=mesh)
    return model, MADE[kind](model)


def train(model, optimizer, steps):
    for step in steps:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def numbers(model, optimizer):
    tensors = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    for name, raw in lrm.optim.raw_weights(optimizer).items():
        tensors[f"{name} raw"] = raw.clone()
    for name, parts in lrm.multipliers(optimizer).items():
        tensors |= {f"{name} {part}": value for part, value in parts.items()}
    return tensors


def check_continues(saved, other):
    """Check that both runs, trained alike, hold the same numbers to the last bit."""
    for run in (saved, other):
        train(*run, range(4, 8))
    expected, actual = numbers(*saved), numbers(*other)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())


def by_deepcopy(state):
    return copy.deepcopy(state)


def by_pickle(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
@pytest.mark.parametrize("kind", MADE)
def test_a_sharded_state_that_was_copied_continues_bitwise(kind, copied, mesh):
    run, other = sharded(kind, mesh), sharded(kind, mesh)
    train(*run, range(4))
    states = copied([part.state_dict() for part in run])
    for part, state in zip(other, states, strict=True):
        part.load_state_dict(state)
    check_continues(run, other)


@pytest.mark.parametrize("kind", MADE)
def test_a_sharded_state_that_was_saved_asynchronously_continues_bitwise(kind, mesh, tmp_path):
    run, other = sharded(kind, mesh), sharded(kind, mesh)
    train(*run, range(4))
    dcp.async_save(
        dict(zip(("model", "optimizer"), get_state_dict(*run), strict=True)), checkpoint_id=tmp_path
    ).result()
    state = dict(zip(("model", "optimizer"), get_state_dict(*other), strict=True))
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check_continues(run, other)


def test_a_sharded_state_loads_into_other_groups_with_from_plan(mesh):
    model, optimizer = sharded("adamw", mesh)
    train(model, optimizer, range(4))
    rules = [lrm.Rule("0.weight", lr_scale=0.1)]
    again = lrm.AdamW.from_model(model, rules=rules, lr=1e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()), from_plan=optimizer.plan)
    expected, actual = numbers(model, optimizer), numbers(model, again)
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())


@pytest.mark.parametrize("kind", MADE)
def test_a_sharded_state_of_other_shapes_raises(kind, mesh):
    model, optimizer = sharded(kind, mesh)
    train(model, optimizer, range(1))
    other = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8))
    fully_shard(other, mesh=mesh)
    again = MADE[kind](other)
    with pytest.raises(ValueError, match=r"^0\.weight: saved 16x8, here 12x8: start with fresh"):
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("kind", MADE)
def test_a_sharded_state_is_what_the_next_step_writes(kind, mesh):
    """The state shows packed multipliers themselves; looking at them binds nothing anew."""
    model, optimizer = sharded(kind, mesh)
    train(model, optimizer, range(2))
    kept = optimizer.state[model[0].weight]
    binding = optimizer._cached_binding()
    before = kept["row"].to_local().clone()
    train(model, optimizer, range(2, 3))
    assert optimizer._cached_binding() is binding
    state = next(state for state in binding.states if state.name == "0.weight")
    assert optimizer.state[model[0].weight]["row"] is kept["row"]
    assert torch.equal(kept["row"].to_local(), state.multipliers["row"])
    assert (kept["row"].to_local() - before).abs().max() > 1e-4
    # A number set through the state is what the next step trains.
    with torch.no_grad():
        kept["col"].to_local().fill_(2.0)
    assert (state.multipliers["col"] == 2.0).all()


def test_a_write_to_a_sharded_weight_raises_after_its_state_was_copied(mesh):
    model, optimizer = sharded("adamw", mesh)
    train(model, optimizer, range(2))
    copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 3))
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"0\.weight was changed since the last step"):
        train(model, optimizer, range(3, 4))

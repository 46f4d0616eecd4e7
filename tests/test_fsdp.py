"""Sharded state: FSDP2 on two ranks equals one process."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import learnable_multipliers as lrm
from paths import Toy, backward, toy_plan

STEPS = 5


def run(model, plan, steps=STEPS):
    optimizer = lrm.AdamW(lrm.param_groups(model, plan), lr=1e-2, max_grad_norm=0.3)
    for step in range(steps):
        backward(model, torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(step)))
        optimizer.step()
        norm = optimizer.grad_norm
        optimizer.zero_grad()
    return optimizer, norm


def fresh(kind):
    torch.manual_seed(0)
    model = Toy().double()
    # One output feature: with two ranks the second one holds nothing of it.
    model.single = torch.nn.Linear(6, 1, bias=False).double()
    inner = model.forward
    model.forward = lambda ids: inner(ids) + model.single(model.embed(ids))
    return model, toy_plan(model, kind)


def worker(rank, port, kind, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, plan = fresh(kind)
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh)
        optimizer, norm = run(model, plan)
        weights = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
        state = {
            n: {k: v.full_tensor() for k, v in optimizer.state[p].items() if k != "step"}
            for n, p in model.named_parameters()
            if p.requires_grad
        }
        mults = lrm.multipliers(optimizer)
        readings = lrm.diagnose(optimizer, lrs=[1e-2] * STEPS).to_dict()
        # State dicts load back, and the run goes on.
        optimizer.load_state_dict(optimizer.state_dict())
        run(model, plan, 1)
        if rank == 0:
            torch.save((weights, state, mults, norm, readings), path)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["row+col", "scalar", "blocks"])
def test_two_ranks_equal_one_process(kind, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "sharded"
    mp.spawn(worker, (port, kind, path), nprocs=2)
    weights, state, mults, norm, readings = torch.load(path, weights_only=True)

    model, plan = fresh(kind)
    optimizer, expected_norm = run(model, plan)
    # Sums in another order: the last bits differ, and Adam makes steps of small gradients.
    tight = {"rtol": 1e-8, "atol": 1e-9}
    torch.testing.assert_close(norm, expected_norm, **tight)
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), **tight)
        if p.requires_grad:
            for key, value in optimizer.state[p].items():
                if key != "step":
                    torch.testing.assert_close(state[name][key], value, **tight)
    for name, values in lrm.multipliers(optimizer).items():
        for key, value in values.items():
            torch.testing.assert_close(mults[name][key], value, **tight)
    expected = lrm.diagnose(optimizer, lrs=[1e-2] * STEPS).to_dict()
    for one, other in zip(readings["readings"], expected["readings"], strict=True):
        if one["name"] == "single.weight":
            # The same for all logits, so that its gradients are rounding alone.
            one["indicator"] = other["indicator"]
        close = {k: v if isinstance(v, str | None) else pytest.approx(v) for k, v in other.items()}
        assert one == close

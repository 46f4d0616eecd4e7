"""What ranks send each other in a step, who does which work, and when all of them hold still."""

import math
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import learnable_multipliers as lrm
from learnable_multipliers.optim import _batches as batches
from learnable_multipliers.optim import _sharding
from learnable_multipliers.optim._distributed_batches import assign_owners, newton_schulz_cost
from learnable_multipliers.optim._muon import is_hidden
from learnable_multipliers.optim._packed_multipliers import PackedMultipliers
from learnable_multipliers.optim._packed_sums import PackedSums
from learnable_multipliers.optim._sharding import (
    Chunk,
    local,
    local_gradient,
    process_group_of,
    shard_from_chunks,
)
from parallel_training import (
    STEPS,
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
from ranks import Ranks

slow = pytest.mark.slow


def started(layout, optimizer, kind="row+col", steps=1):
    """Train a little; return model, optimizer and this rank's part of the batch."""
    model, plan = fresh(kind)
    model, part, parts = parallelize(model, layout)
    made = make(optimizer, model, plan)
    train(model, made, part, parts, steps=range(steps))
    return model, made, (part, parts)


# -- what travels -------------------------------------------------------------------------------


def collectives(layout, optimizer):
    if mesh_of(layout) is None:
        return None
    model, made, part = started(layout, optimizer)
    backward(model, batch(1, *part))
    with Collectives() as clipping:
        lrm.clip_grad_norm_(made, 1.0)
    with Collectives() as step:
        made.step()
    return clipping.seen, step.seen


def test_adamw_sends_one_packed_sum(ranks):
    # Columns and squared norms, and whether all is finite. Rows stay where they are, and the
    # columns of a stack, which is cut between its matrices.
    model, plan = fresh("row+col")
    carrying = [entry.matrix for entry in plan.entries if entry.carries]
    columns = sum(matrix.num_in for matrix in carrying if not matrix.stack)
    trained = sum(p.requires_grad for p in model.parameters())
    expected = [("allreduce_", 8 * (columns + trained + 1))]
    for clipping, step in ranks.run(collectives, "fsdp 4", "adamw"):
        assert clipping == step == expected


@slow
@pytest.mark.parametrize("layout", ["hsdp", "fsdp x tp", "tp 2"])
def test_sums_over_several_axes_travel_together(layout, ranks):
    for traffic in ranks.run(collectives, layout, "adamw"):
        if traffic is not None:
            assert [name for name, _ in traffic[1]] == ["allreduce_"]


@slow
@pytest.mark.parametrize("layout", ["fsdp 3", "hsdp", "fsdp x tp"])
def test_muon_sends_updates_to_their_owners_and_back(layout, ranks):
    steps = [some[1] for some in ranks.run(collectives, layout, "muon") if some is not None]
    for seen in steps:
        assert [name for name, _ in seen] == ["allreduce_", *["alltoall_base_"] * 2]
    if layout == "fsdp x tp":
        return
    # Each number goes to its owner once, and from there to all who hold it; both ends count.
    numbers = sum(math.prod(matrix.shape) for matrix in hidden_with_gradients("row+col"))
    there, back = (sum(seen[at][1] for seen in steps) for at in (1, 2))
    assert there == 2 * 8 * numbers
    assert back == there * (2 if layout == "hsdp" else 1)


def hidden_with_gradients(kind):
    _, plan = fresh(kind)
    trained = [e for e in plan.entries if not e.name.startswith(("unused", "frozen"))]
    return [entry.matrix for entry in trained if is_hidden(entry.matrix)]


def shapes(preset):
    """Return the matrices of a model, and its number of parameters, without its weights."""
    # Not above: the ranks have no need of it.
    from learnable_multipliers.pretrain.model.hybrid import HybridLM
    from learnable_multipliers.pretrain.model.presets import PRESETS

    with torch.device("meta"):
        model = HybridLM(PRESETS[preset])
    plan = lrm.plan(model, "full")
    entries = {entry.name: entry for entry in plan.entries}
    return [(p.shape, entries[n].matrix) for n, p in model.named_parameters()]


def message(parameters, chunks):
    """Return how many numbers a step sends, with the chunks that are taken of each matrix."""
    shards = [shard_from_chunks(shape, matrix, chunks(matrix)) for shape, matrix in parameters]
    carrying = {i: m for i, (_, m) in enumerate(parameters) if m is not None and m.carries}
    device = torch.device("cpu")
    packed = {torch.float32: PackedMultipliers(carrying, shards, torch.float32, device)}
    group = types.SimpleNamespace(size=lambda: 16)
    return PackedSums(group, shards, packed, torch.float32, device).size


def test_a_half_billion_model_sends_less_than_two_megabytes():
    parameters = shapes("falcon-h1-0.5b")
    carrying = [matrix for _, matrix in parameters if matrix is not None and matrix.carries]
    columns = sum(matrix.num_in for matrix in carrying)
    fsdp = message(parameters, lambda matrix: [Chunk(0, 8, 0)])
    assert fsdp == 1 + len(parameters) + columns
    assert 4 * fsdp == 1_480_976

    def by_rows(matrix):
        ends = ("attention-out", "down", "ssm-out")
        return matrix is not None and matrix.blocks[0].role in ends

    rows = sum(matrix.num_out for matrix in carrying if by_rows(matrix))
    # Tensor parallelism cuts what feeds the residual stream along its input features.
    both = message(parameters, lambda m: [Chunk(1 if by_rows(m) else 0, 2, 0), Chunk(0, 8, 0)])
    assert both == fsdp + rows
    assert 4 * both == 1_923_344


# -- who orthogonalizes -------------------------------------------------------------------------


def orthogonalized(layout):
    """Return the shapes this rank orthogonalizes in one step."""
    if mesh_of(layout) is None:
        return []
    model, plan = fresh("blocks")
    model, part, parts = parallelize(model, layout)
    group = {"process_group": mesh_of(layout).get_group()} if layout == "ddp 2" else {}
    made = make("muon", model, plan, **group)
    seen, inner = [], batches.orthogonalize

    def counted(batch, *settings):
        seen.extend([tuple(batch.shape[1:])] * len(batch))
        return inner(batch, *settings)

    batches.orthogonalize = counted
    try:
        train(model, made, part, parts, steps=range(1))
    finally:
        batches.orthogonalize = inner
    return seen


@slow
@pytest.mark.parametrize("layout", ["fsdp 2", "fsdp 4", "hsdp", "tp 2", "fsdp x tp", "ddp 2"])
def test_each_matrix_is_orthogonalized_once_on_one_rank(layout, ranks):
    expected = [
        shape
        for matrix in hidden_with_gradients("blocks")
        for shape in batches.partition_shapes(matrix, "blocks") * math.prod(matrix.stack)
    ]
    by_rank = ranks.run(orthogonalized, layout)
    assert sorted(shape for rank in by_rank for shape in rank) == sorted(expected)
    assert all(by_rank[: mesh_size(layout)])


def mesh_size(layout):
    return int(layout.split()[1]) if layout[-1].isdigit() else 4


def test_newton_schulz_of_a_model_is_shared_evenly():
    matrices = [m for _, m in shapes("falcon-h1-0.5b") if is_hidden(m)]
    costs = [newton_schulz_cost(matrix, "blocks") for matrix in matrices]
    for number in (2, 3, 8, 16):
        loads = [0] * number
        for cost, owner in zip(costs, assign_owners(costs, number), strict=True):
            loads[owner] += cost
        assert max(loads) < 1.02 * sum(costs) / number


# -- numbers that are not finite ----------------------------------------------------------------


def spoil(model, layout, value):
    """Put a number into a gradient on the last rank of a layout alone."""
    mesh = mesh_of(layout)
    last = mesh.get_rank() == mesh.size() - 1
    inner = getattr(model, "module", model)
    grad = local(inner.up.weight.grad)
    if last:
        assert grad.numel()
        grad.view(-1)[0] = value
    return last


def skips(layout, optimizer):
    mesh = mesh_of(layout)
    if mesh is None:
        return
    model, plan = fresh("row+col")
    model, part, parts = parallelize(model, layout)
    made = make(optimizer, model, plan)
    for step in range(STEPS):
        value = {3: math.nan, 5: math.inf, 7: -math.inf}.get(step)
        if value is not None:
            before = {k: v.clone() for k, v in results(model, made).items() if k != "norm"}
            hook = None
            if layout == "ddp 2" and mesh.get_rank() == 1:
                # Spoilt before replicas are averaged: afterwards it is on all ranks.
                hook = model.module.up.weight.register_hook(lambda g, v=value: g * v)
            backward(model, batch(step, part, parts))
            if layout == "ddp 2":
                if hook is not None:
                    hook.remove()
            else:
                spoil(model, layout, value)
            made.step()
            made.zero_grad()
            after = results(model, made)
            assert all(torch.equal(after[name], value) for name, value in before.items())
        train(model, made, part, parts, steps=[step])
    assert made.num_skipped == 3
    largest_difference(results(model, made), results(*reference(optimizer, "row+col")))


@slow
@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("fsdp 3", "adamw"),
        ("fsdp 3", "muon"),
        ("fsdp 2", "wrapped"),
        ("hsdp", "adamw"),
        ("tp 2", "muon"),
        ("fsdp x tp", "adamw"),
        ("ddp 2", "adamw"),
    ],
)
def test_a_gradient_not_finite_on_one_rank_is_skipped_on_all(layout, optimizer, ranks):
    ranks.run(skips, layout, optimizer)


def row_overflows():
    """Let a row's gradient overflow on one rank, where everything that travels is finite."""
    mesh = mesh_of("fsdp 4")
    model = nn.Sequential(nn.Linear(3, 8, bias=False))
    with torch.no_grad():
        model[0].weight[7, 0] = 1e30
    plan = lrm.plan(model, "full", [lrm.Rule("0", "row", role="up")])
    fully_shard(model, mesh=mesh)
    optimizer = lrm.AdamW(lrm.param_groups(model, plan), lr=1e-2)
    weight = model[0].weight
    before = weight.full_tensor().clone()
    weight.grad = distribute_tensor(torch.full((8, 3), 1e10), mesh, [Shard(0)])
    optimizer.step()
    assert optimizer.grad_norm.isfinite()
    assert optimizer.num_skipped == 1
    assert torch.equal(weight.full_tensor(), before)


def test_a_row_that_overflows_on_one_rank_is_skipped_on_all(ranks):
    ranks.run(row_overflows)


# -- state --------------------------------------------------------------------------------------


def resumes(optimizer, full):
    if mesh_of("fsdp 3") is None:
        return
    options = StateDictOptions(full_state_dict=full)
    model, made, (part, parts) = started("fsdp 3", optimizer, "blocks", steps=STEPS // 2)
    saved = get_optimizer_state_dict(model, made, options=options)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    model, plan = fresh("blocks")
    parallelize(model, "fsdp 3")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    made = make(optimizer, model, plan)
    set_optimizer_state_dict(model, made, saved, options=options)
    train(model, made, part, parts, steps=range(STEPS // 2, STEPS))
    largest_difference(results(model, made), results(*reference(optimizer, "blocks")))


@slow
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "wrapped"])
def test_state_survives_a_distributed_checkpoint(optimizer, full, ranks):
    ranks.run(resumes, optimizer, full)


def moves():
    """Take the whole state of four ranks under FSDP2 over to two that cut matrices."""
    options = StateDictOptions(full_state_dict=True)
    model, made, (part, parts) = started("fsdp 4", "muon", "row+col", steps=STEPS // 2)
    saved = get_optimizer_state_dict(model, made, options=options)
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}

    model, plan = fresh("row+col")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    if mesh_of("tp 2") is None:
        return
    model, part, parts = parallelize(model, "tp 2")
    made = make("muon", model, plan)
    set_optimizer_state_dict(model, made, saved, options=options)
    train(model, made, part, parts, steps=range(STEPS // 2, STEPS))
    largest_difference(results(model, made), results(*reference("muon", "row+col")))


@slow
def test_state_moves_to_another_layout(ranks):
    ranks.run(moves)


def files_move(optimizer, before, after, path):
    """Save on four ranks, and continue in another layout."""
    model, made, _ = started(before, optimizer, steps=STEPS // 2)
    dcp.save(content(model, made), checkpoint_id=path)
    mesh = mesh_of(after)
    if mesh is None:
        return
    model, plan = fresh("row+col")
    model, part, parts = parallelize(model, after)
    made = make(optimizer, model, plan)
    loaded = content(model, made)
    group = mesh.get_group() if mesh.ndim == 1 else None
    dcp.load(loaded, checkpoint_id=path, process_group=group)
    set_optimizer_state_dict(model, made, loaded["optimizer"])
    train(model, made, part, parts, steps=range(STEPS // 2, STEPS))
    largest_difference(results(model, made), results(*reference(optimizer, "row+col")))


def content(model, optimizer):
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


@slow
@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        ("muon", "fsdp 4", "fsdp 3"),
        ("adamw", "fsdp 4", "fsdp x tp"),
        ("adamw", "fsdp x tp", "fsdp 3"),
        ("muon", "hsdp", "tp 2"),
    ],
)
def test_checkpoint_files_load_in_another_layout(optimizer, before, after, ranks, tmp_path):
    ranks.run(files_move, optimizer, before, after, tmp_path)


def state_lies_like_the_parameter():
    model, made, _ = started("fsdp x tp", "adamw")
    for name, row, col in [
        ("up.weight", model.up.weight.placements, [Replicate(), Replicate()]),
        ("down.weight", [Shard(0), Replicate()], [Replicate(), Shard(0)]),
    ]:
        state = made.state[model.get_parameter(name)]
        assert list(state["row"].placements) == list(row)
        assert list(state["row_exp_avg_sq"].placements) == list(row)
        assert list(state["col"].placements) == list(col)


def test_rows_and_columns_are_sharded_like_the_features(ranks):
    ranks.run(state_lies_like_the_parameter)


def starts_anew():
    """Set a row that lies on one rank to zero and write to the model."""
    if mesh_of("fsdp 2") is None:
        return
    model, made, _ = started("fsdp 2", "adamw")
    weight = model.up.weight
    if mesh_of("fsdp 2").get_rank() == 0:
        made.state[weight]["row"].to_local()[0] = 0.0
    with torch.no_grad():
        weight.copy_(torch.ones_like(weight))
    made.sync_from_model_()
    learned = lrm.multipliers(made)["up.weight"]
    assert all((value == 1).all() for value in learned.values())
    assert (lrm.multipliers(made)["down.weight"]["col"] != 1).any()


def test_ranks_agree_on_multipliers_that_restart(ranks):
    ranks.run(starts_anew)


def gradient_as_a_sum():
    """Give a copy's gradient as parts of a sum, as sequence parallelism does for norms."""
    mesh = mesh_of("tp 2")
    if mesh is None:
        return
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    part = torch.full((4,), 1.0 + mesh.get_rank())
    weight.grad = torch.distributed.tensor.DTensor.from_local(part, mesh, [Partial()])
    later = weight.grad.redistribute(placements=[Replicate()], async_op=True)
    assert type(local_gradient(weight, later)) is torch.Tensor
    optimizer = lrm.AdamW.from_model(nn.ParameterDict({"norm": weight}), "none", lr=1e-2)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(6.0)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"].to_local(), torch.full((4,), 0.3))


def test_partial_gradients_are_reduced(ranks):
    ranks.run(gradient_as_a_sum)


def apart():
    """Put parameters on meshes of which none holds the other."""
    from parallel_training import meshes

    mesh = meshes()["fsdp x tp"]
    one, other = (
        nn.Parameter(distribute_tensor(torch.ones(4), mesh[name], [Shard(0)]))
        for name in ("data", "model")
    )
    one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
    with pytest.raises(ValueError, match="one of the device meshes must hold them all"):
        lrm.AdamW.from_model(nn.ParameterDict({"one": one, "other": other}), "none").step()


def test_parameters_without_a_common_mesh_raise(ranks):
    ranks.run(apart)


def uneven():
    """Start a run whose ten rows two axes of the mesh cut, as under a torch that mixes them up."""
    if mesh_of("fsdp x tp") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sharding, "GATHERS_UNEVEN", False)
        with pytest.raises(ValueError, match="whose 10 rows .* cut into 4 parts, and would save"):
            started("fsdp x tp", "adamw")


def test_uneven_parts_raise_where_torch_gathers_them_wrongly(ranks):
    ranks.run(uneven)


def some_ranks():
    """Make the group of a mesh of two axes that leaves a rank out."""

    class Mesh:
        ndim, mesh = 2, torch.tensor([[0, 1, 2]])
        size = staticmethod(lambda axis: 2)

    if torch.distributed.get_rank() == 3:
        return
    parameter = types.SimpleNamespace(device_mesh=Mesh(), placements=())
    known = {}
    group = process_group_of([parameter], known)
    assert group is process_group_of([parameter], known)
    number = torch.ones(())
    torch.distributed.all_reduce(number, group=group)
    assert number == group.size() == 3


def test_ranks_outside_a_mesh_are_not_needed_for_its_group():
    # Ranks of their own: torch names such a group by how many others its members are in.
    ranks = Ranks()
    try:
        ranks.run(some_ranks)
    finally:
        ranks.stop()


def test_muon_takes_no_group_for_sharded_parameters(ranks):
    ranks.run(group_and_shards)


def group_and_shards():
    mesh = mesh_of("fsdp 4")
    model, plan = fresh("row+col")
    parallelize(model, "fsdp 4")
    made = make("muon", model, plan, process_group=mesh.get_group())
    backward(model, batch(0))
    with pytest.raises(ValueError, match="leave it out"):
        made.step()

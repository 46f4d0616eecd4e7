"""Spread over ranks in any way, a run is what it is in one process."""

import pytest
import torch

import learnable_multipliers as lrm
from learnable_multipliers.optim._sharding import GATHERS_UNEVEN
from parallel_training import (
    STEPS,
    fresh,
    largest_difference,
    make,
    mesh_of,
    parallelize,
    reference,
    results,
    train,
)

pytestmark = pytest.mark.slow
# One of the matrices has ten rows, which four ranks cannot divide evenly.
FSDP_X_TP = pytest.param(
    "fsdp x tp",
    marks=pytest.mark.skipif(not GATHERS_UNEVEN, reason="needs torch 2.10, see GATHERS_UNEVEN"),
)
LAYOUTS = ["fsdp 1", "fsdp 2", "fsdp 3", "fsdp 4", "hsdp", "tp 2", FSDP_X_TP, "ddp 2"]
KINDS = {
    "adamw": ["row+col", "blocks", "scalar", "per head"],
    "muon": ["row+col", "blocks"],
    "muon by heads": ["blocks"],
}


def run(layout, optimizer, kind, clip_multipliers=False, **settings):
    """Train on this rank's part; return model and optimizer."""
    model, plan = fresh(kind)
    model, part, parts = parallelize(model, layout, **settings)
    shared = layout == "ddp 2" and optimizer.startswith("muon")
    group = mesh_of(layout).get_group() if shared else None
    given = {"process_group": group} if group else {}
    made = make(optimizer, model, plan, clip_multipliers=clip_multipliers, **given)
    train(model, made, part, parts)
    return model, made


def compare(layout, optimizer, kinds):
    if mesh_of(layout) is None:
        return None
    # Shards stay gathered after the forward pass on four ranks.
    settings = {"reshard_after_forward": False} if layout == "fsdp 4" else {}
    actual = [results(*run(layout, optimizer, kind, **settings)) for kind in kinds]
    expected = [results(*reference(optimizer, kind)) for kind in kinds]
    return max(map(largest_difference, actual, expected))


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_equal_one_process(layout, optimizer, ranks):
    ranks.run(compare, layout, optimizer, KINDS[optimizer])


def clipped(layout):
    """Compare runs whose clip norm counts multipliers."""
    if mesh_of(layout) is None:
        return
    for kind in KINDS["adamw"]:
        actual = results(*run(layout, "adamw", kind, clip_multipliers=True))
        expected = results(*reference("adamw", kind, clip_multipliers=True))
        largest_difference(actual, expected)


@pytest.mark.parametrize("layout", ["fsdp 3", "hsdp", "tp 2", FSDP_X_TP, "ddp 2"])
def test_clip_norms_with_multipliers_are_those_of_one_process(layout, ranks):
    ranks.run(clipped, layout)


@pytest.mark.parametrize("layout", ["fsdp 3", "hsdp", FSDP_X_TP, "ddp 2"])
def test_ranks_equal_one_process_around_another_optimizer(layout, ranks):
    ranks.run(compare, layout, "wrapped", ["row+col"])


def copies_without_a_group():
    if mesh_of("ddp 2") is None:
        return
    model, plan = fresh("blocks")
    model, part, parts = parallelize(model, "ddp 2")
    optimizer = make("muon", model, plan)
    train(model, optimizer, part, parts)
    largest_difference(results(model, optimizer), results(*reference("muon", "blocks")))


def test_muon_on_replicas_needs_no_group(ranks):
    ranks.run(copies_without_a_group)


def in_float32(optimizer):
    if mesh_of("fsdp 3") is None:
        return None
    model, plan = fresh("row+col", torch.float32)
    model, part, parts = parallelize(model, "fsdp 3")
    made = make(optimizer, model, plan)
    train(model, made, part, parts)
    expected = results(*reference(optimizer, "row+col", dtype=torch.float32))
    return largest_difference(results(model, made), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float32_ranks_equal_one_process_to_rounding(optimizer, ranks):
    ranks.run(in_float32, optimizer)


def mixed(optimizer):
    """Train the model's float32 weights with passes in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    runs = []
    for layout in ("fsdp 2", "fsdp 1"):
        if mesh_of(layout) is None:
            continue
        model, plan = fresh("row+col", torch.float32)
        model, part, parts = parallelize(model, layout, mp_policy=policy)
        made = make(optimizer, model, plan)
        # One rank takes as micro-batches what two take as parts: the same passes in bfloat16.
        train(model, made, part, parts, micro=2 // parts)
        runs.append(results(model, made))
    if len(runs) == 2:
        assert all(value.dtype == torch.float32 for value in runs[0].values())
        return largest_difference(*runs, rtol=1e-4, atol=2e-6)
    return None


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_mixed_precision_ranks_equal_one_rank(optimizer, ranks):
    ranks.run(mixed, optimizer)


def readings(optimizer):
    if mesh_of("fsdp 3") is None:
        return
    actual, expected = (
        lrm.diagnose(made, lrs=[1e-2] * STEPS).to_dict()["readings"]
        for _, made in (run("fsdp 3", optimizer, "blocks"), reference(optimizer, "blocks"))
    )
    for one, other in zip(actual, expected, strict=True):
        assert one == {
            key: value if isinstance(value, str | None) else pytest.approx(value)
            for key, value in other.items()
        }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_diagnosis_is_that_of_one_process(optimizer, ranks):
    ranks.run(readings, optimizer)

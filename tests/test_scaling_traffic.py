"""The collectives that ranks were counted to issue are those that the formulas say."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.distributed import Axes, init_world
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from learnable_multipliers.pretrain.model.parallelize import parallelize
from learnable_multipliers.pretrain.scaling.exchange import muon_work
from learnable_multipliers.pretrain.scaling.traffic import (
    fsdp_backward,
    fsdp_forward,
    packed_sums,
    tensor_backward,
    tensor_forward,
)
from learnable_multipliers.pretrain.scaling.weights import weights_of
from parallel_training import Collectives
from ranks import Ranks
from runs import HYBRID, LLAMA

HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "intermediate_size": 24}
# No number of ranks divides the vocabulary; 2 heads of the mixer are fewer than 4 ranks.
MODELS = {
    "hybrid": replace(HYBRID, vocab_size=257, **HEADS),
    "tied": replace(HYBRID, vocab_size=257, **HEADS, tie_embeddings=True),
    "llama": replace(LLAMA, vocab_size=257, **HEADS),
    "frozen norms": replace(LLAMA, vocab_size=257, **HEADS, freeze_norms=True),
}
FOUR = {
    "FSDP2": Axes(1, 4, 1),
    "HSDP": Axes(2, 2, 1),
    "TP": Axes(1, 1, 4),
    "FSDP2 x TP": Axes(1, 2, 2),
    "DDP x TP": Axes(2, 1, 2),
}
TWO = {"FSDP2": Axes(1, 2, 1), "TP": Axes(1, 1, 2)}
SEQUENCES, LENGTH = 2, 19
KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
}


@pytest.fixture(scope="module")
def pair():
    """Two ranks."""
    found = Ranks(2)
    yield found
    found.stop()


def counted(seen):
    """Return the kinds and buffer bytes of counted collectives, in a fixed order."""
    return sorted((KINDS[name], size) for name, size in seen if name in KINDS)


def buffers(collectives, axes):
    """Return what counting sees of predicted ones: the whole tensor, and a shard beside it."""
    found = []
    for one in collectives:
        shard = 0 if one.kind == "all-reduce" else one.num_bytes // axes.shard
        found.append((one.kind, one.num_bytes + shard))
    return sorted(found)


def train_step(model, axes, optimizer, placement, autocast):
    """Return the collectives of forward, backward and optimizer step, the second of a run."""
    world = init_world(**axes._asdict(), timeout=60, device_type="cpu")
    model = build(MODELS[model])
    shared = parallelize(model, world)
    made = optimizer.from_model(model, placement, lr=1e-3, max_grad_norm=1.0)
    tokens = torch.randint(257, (SEQUENCES, LENGTH + 1))
    # The first step also asks whether all ranks hold the weights they were made with.
    _counted_step(shared, made, tokens, autocast)
    found = _counted_step(shared, made, tokens, autocast)
    world.destroy()
    return found


def _counted_step(shared, optimizer, tokens, autocast):
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with Collectives() as forward, cast:
        losses = shared.loss(tokens, 0.0)
    with Collectives() as backward:
        losses.total.backward()
    with Collectives() as step:
        optimizer.step()
    optimizer.zero_grad()
    return [counted(part.seen) for part in (forward, backward, step)]


def predicted(model, axes, optimizer, placement, rank, width):
    """Return the same from the formulas."""
    config = MODELS[model]
    with torch.device("meta"):
        whole = HybridLM(config)
    weights = weights_of(whole, lrm.plan(whole, placement))
    tensor_rank, tokens = rank % axes.tensor, SEQUENCES * LENGTH
    forward = fsdp_forward(weights, axes, tensor_rank)
    backward = fsdp_backward(weights, axes, tensor_rank)
    forward += tensor_forward(config, axes, tokens, width)
    backward += tensor_backward(config, axes, tokens)
    step = buffers(packed_sums(weights, axes), axes)
    if optimizer is lrm.Muon:
        work = muon_work(weights, axes)
        # Newton-Schulz, and so the exchange, is in float32 on a CPU.
        step += [
            ("all-to-all", 4 * sum(n * pair.count(rank) for pair, n in one.numbers.items()))
            for one in (work.there, work.back)
        ]
    return [buffers(forward, axes), buffers(backward, axes), sorted(step)]


def check(ranks, model, axes, optimizer, placement, autocast=False):
    found = ranks.run(train_step, model, axes, optimizer, placement, autocast)
    for rank, seen in enumerate(found):
        width = 2 if autocast else 4
        assert seen == predicted(model, axes, optimizer, placement, rank, width)


@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.parametrize("optimizer", [lrm.Muon, lrm.AdamW], ids=["muon", "adamw"])
def test_four_ranks_send_what_the_formulas_say(ranks, layout, optimizer):
    check(ranks, "hybrid", FOUR[layout], optimizer, "full")


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.parametrize("placement", ["none", "scalar", "symmetry-aware"])
def test_any_placement_sends_what_the_formulas_say(ranks, layout, placement):
    check(ranks, "hybrid", FOUR[layout], lrm.Muon, placement)


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.parametrize("model", ["tied", "llama", "frozen norms"])
def test_any_model_sends_what_the_formulas_say(ranks, layout, model):
    check(ranks, model, FOUR[layout], lrm.Muon, "full")


@pytest.mark.parametrize("layout", TWO)
@pytest.mark.parametrize("optimizer", [lrm.Muon, lrm.AdamW], ids=["muon", "adamw"])
def test_two_ranks_send_what_the_formulas_say(pair, layout, optimizer):
    check(pair, "hybrid", TWO[layout], optimizer, "full")


@pytest.mark.parametrize("layout", ["FSDP2", "TP"])
def test_bfloat16_products_halve_activations_alone(ranks, layout):
    # Weights, their gradients and the gradients of activations stay float32.
    check(ranks, "llama", FOUR[layout], lrm.AdamW, "full", autocast=True)


def test_each_number_goes_to_one_owner_and_back_to_every_copy():
    with torch.device("meta"):
        whole = HybridLM(MODELS["llama"])
    weights = weights_of(whole, lrm.plan(whole, "full"))
    hidden = sum(math.prod(w.shape) for w in weights if ".layers." in w.name and len(w.shape) == 2)
    for data in (1, 2, 8):
        work = muon_work(weights, Axes(data, 4, 1))
        assert sum(work.there.numbers.values()) == hidden
        assert sum(work.back.numbers.values()) == data * hidden

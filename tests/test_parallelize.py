"""A model under tensor parallelism is the whole model: logits, losses and gradients."""

import gc
import os
from dataclasses import replace
from multiprocessing.context import ForkServerProcess as SpawnedRank
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from learnable_multipliers.pretrain.distributed import init_world
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.parallelize import (
    parallelize,
    rank_shape,
    tensor_parallelize,
)
from ranks import Ranks
from runs import HYBRID, LLAMA

FACTORS = {"mup_embedding": 5.7, "mup_head": 0.4, "mup_key": 0.4, "mup_down": 0.59}
HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "intermediate_size": 24}
# A vocabulary that four ranks have 65, 65, 65 and 62 tokens of.
SHAPES = {
    "hybrid": replace(HYBRID, vocab_size=257, **HEADS, **FACTORS),
    "tied": replace(HYBRID, vocab_size=257, **HEADS, tie_embeddings=True),
    "llama": replace(LLAMA, vocab_size=257, **HEADS, **FACTORS),
    "state space alone": replace(HYBRID, vocab_size=257, num_heads=0, intermediate_size=0),
}
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
Z_LOSS = 0.1


def some_tokens():
    return torch.randint(257, (2, 19), generator=torch.Generator().manual_seed(3))


def fresh(config):
    """Return a model in float64 whose logits are far from uniform."""
    model = build(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def computed(model):
    """Return logits, losses and gradients in full."""
    tensors = {"logits": model(some_tokens()).detach()}
    losses = model.loss(some_tokens(), Z_LOSS)
    losses.total.backward()
    tensors |= {"total": losses.total.detach(), "cross-entropy": losses.cross_entropy}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        tensors[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return tensors


def parallel(config, axes):
    """Compute the same on a mesh of (FSDP2, tensor parallel) ranks."""
    model = fresh(config)
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("shard", "tensor"))
    tensor_parallelize(model, mesh["tensor"])
    if axes[0] > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        register_fsdp_forward_method(model, "loss")
    rows = model.lm_head.weight.to_local().shape[0]
    assert rows < 257
    if config.tie_embeddings:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    return computed(model)


@pytest.mark.parametrize("axes", [(1, 4), (2, 2)], ids=["TP", "FSDP x TP"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sharded_model_is_the_whole_model(ranks, shape, axes):
    expected = computed(fresh(SHAPES[shape]))
    for actual in ranks.run(parallel, SHAPES[shape], axes):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name], value, **CLOSE, msg=lambda text, n=name: f"{n}: {text}"
            )


def wrongly_parallel(styles):
    """Return what a model says that torch's own styles were applied to."""
    model = fresh(SHAPES["hybrid"])
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(model, mesh, styles)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - compared by the caller
        model.loss(some_tokens())
    return str(error.value)


@pytest.mark.parametrize(
    "styles",
    [
        {"model.layers.0.feed_forward.gate_proj": ColwiseParallel()},
        {"model.layers.1.feed_forward.down_proj": RowwiseParallel()},
        {"model.layers.1.self_attn.q_proj": ColwiseParallel()},
        {"model.layers.0.mamba.out_proj": RowwiseParallel()},
        {"lm_head": ColwiseParallel()},
    ],
    ids=lambda styles: next(iter(styles)).rpartition(".")[2],
)
def test_styles_for_single_linears_raise(ranks, styles):
    for message in ranks.run(wrongly_parallel, styles):
        assert "never call Linear.forward" in message
        assert "tensor_parallelize" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "tensor=4 does not divide model.num_kv_heads=2"),
        ({"intermediate_size": 26}, "tensor=4 does not divide model.intermediate_size=26"),
        ({"vocab_size": 6}, "leaves a rank without any of model.vocab_size=6"),
    ],
)
def test_a_model_that_cannot_be_sharded_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        rank_shape(replace(SHAPES["hybrid"], **changes), 4)


def join_and_leave(times):
    """Return the number of threads of this process before and after worlds came and went."""

    def num_threads():
        # Those of a group end with the last model or mesh that refers to it.
        gc.collect()
        return len(list(Path("/proc/self/task").iterdir()))

    before = num_threads()
    for _ in range(times):
        world = init_world(data=2, shard=1, tensor=2, timeout=60.0, device_type="cpu")
        model = fresh(SHAPES["llama"])
        run = parallelize(model, world)
        run.loss(some_tokens(), 0.0).total.backward()
        grad = model.lm_head.weight.grad
        # Specs that torch has cached must not lead to groups of an earlier world.
        assert (grad + grad.detach()).full_tensor().shape == (257, 32)
        world.destroy()
        world.destroy()
        del world, model, run, grad
    return before, num_threads()


def test_a_world_leaves_no_threads_behind(ranks):
    ranks.run(join_and_leave, 1)
    for before, after in ranks.run(join_and_leave, 3):
        assert after == before


def fail_on_one_rank():
    if torch.distributed.get_rank() == 2:
        os._exit(1)
    torch.distributed.barrier()


def world_size():
    return torch.distributed.get_world_size()


def test_ranks_start_again_after_one_has_died_or_failed_to_start(monkeypatch):
    ranks = Ranks(3)
    start = SpawnedRank.start

    def start_the_first(process):
        if ranks._processes:
            raise BlockingIOError("Resource temporarily unavailable")
        start(process)

    with monkeypatch.context() as patch:
        patch.setattr(SpawnedRank, "start", start_the_first)
        with pytest.raises(OSError, match="temporarily"):
            ranks.run(world_size)
    with pytest.raises((EOFError, ConnectionError, AssertionError)):
        ranks.run(fail_on_one_rank)
    try:
        assert ranks.run(world_size) == [3, 3, 3]
    finally:
        ranks.stop()

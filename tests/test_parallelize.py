"""A model under tensor parallelism is the whole model: logits, losses and gradients."""

import threading
from dataclasses import replace
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

from learnable_multipliers.pretrain.distributed import join
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.parallelize import tensor_parallelize
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
    found = {"logits": model(some_tokens()).detach()}
    losses = model.loss(some_tokens(), Z_LOSS)
    losses.total.backward()
    found |= {"total": losses.total.detach(), "cross-entropy": losses.cross_entropy}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


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
    for found in ranks.run(parallel, SHAPES[shape], axes):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, **CLOSE, msg=lambda text, n=name: f"{n}: {text}"
            )

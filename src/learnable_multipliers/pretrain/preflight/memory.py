"""What each rank of a run holds in memory, from shapes alone.

Weights, gradients and optimizer state are counted by parameter. Activations are what autograd keeps
of a pass without numbers; where layers are compiled, what is left of them once the compiler has
chosen what to compute again on the way back. On an H200, for 8 sequences of 2048 tokens, that is
41.6 GiB for `falcon-h1-0.5b` and 23.0 GiB for `llama-0.5b`, where runs took 40.0 and 21.4 at most
(`results/pretrain-h200.json`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule

from learnable_multipliers._multiplier import initial_values
from learnable_multipliers._plan import Plan
from learnable_multipliers.optim._muon import is_hidden
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.loss import Losses, head_loss
from learnable_multipliers.pretrain.model.parallelize import rank_shape
from learnable_multipliers.pretrain.model.rotation import Angles
from learnable_multipliers.pretrain.trainer.device import Device
from learnable_multipliers.pretrain.trainer.optimizer import make_plan

# Weights, raw weights, multipliers and all moments are float32.
_FLOAT = 4
_ALONE = Axes(1, 1, 1)


def rank_bytes(config: TrainConfig, device: Device, axes: Axes = _ALONE) -> dict[str, int]:
    """Return the bytes that one rank needs, by what needs them."""
    config = replace(config, model=rank_shape(config.model, axes.tensor))
    with torch.device("meta"):
        model = HybridLM(config.model)
    rows = state_bytes(config, model, make_plan(model, config.optimizer), axes.shard)
    rows |= _exchanged(model, axes)
    kept = ", as the compiler keeps them" if device.compiled else ""
    rows[f"activations of a micro-batch{kept}"] = activation_bytes(config, device, axes)
    return rows


def state_bytes(
    config: TrainConfig, model: HybridLM, plan: Plan, shards: int = 1
) -> dict[str, int]:
    """Return the bytes of everything that lasts from step to step, and of the gradients.

    Args:
        shards: Ranks that every parameter is cut among, along its first dimension.
    """
    matrices = {entry.name: entry.matrix for entry in plan.entries}
    kinds = ("weights", "gradients", "raw weights", "moments", "multipliers and their moments")
    sizes: dict[str, int] = dict.fromkeys(kinds, 0)
    for name, parameter in model.named_parameters():
        size = _FLOAT * _largest_shard(parameter, shards)
        sizes["weights"] += size
        if not parameter.requires_grad:
            continue
        matrix = matrices[name]
        sizes["gradients"] += size
        # Muon keeps one moment of a hidden matrix and an average over it, AdamW two moments; both
        # count steps.
        one = config.optimizer.kind == "muon" and is_hidden(matrix)
        sizes["moments"] += size + 2 * _FLOAT if one else 2 * size + _FLOAT
        if matrix is not None and matrix.carries:
            carried = sum(value.numel() for value in initial_values(matrix).values())
            sizes["raw weights"] += size
            # As if whole on every rank: column multipliers are, and all together are next to none.
            sizes["multipliers and their moments"] += 3 * _FLOAT * carried
    return sizes


def activation_bytes(config: TrainConfig, device: Device, axes: Axes = _ALONE) -> int:
    """Return the bytes autograd keeps for one micro-batch, from a pass without numbers."""
    one, two = (
        _kept(config, replace(config.model, num_layers=layers), device, axes) for layers in (1, 2)
    )
    # Layers are alike; tracing them all would take as many times as long.
    return one + (config.model.num_layers - 1) * (two - one)


def micro_batch(config: TrainConfig, dp_degree: int) -> int:
    """Return the sequences that a rank has in one pass, at most."""
    share = max(1, config.data.batch_sequences // dp_degree)
    return min(config.data.micro_batch_sequences or share, share)


def _largest_shard(parameter: Tensor, shards: int) -> int:
    first, *rest = parameter.shape
    return math.ceil(first / shards) * math.prod(rest)


def _exchanged(model: HybridLM, axes: Axes) -> dict[str, int]:
    """Return the bytes of what ranks gather and send, beside what they keep."""
    if axes.dp_degree == 1:
        return {}
    if axes.shard == axes.tensor == 1:
        # DistributedDataParallel copies gradients into buckets.
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return {"gradients on their way": _FLOAT * trained}
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    outside = model.num_parameters - layer * len(model.model.layers)
    # FSDP2 gathers a layer while it computes another; what lies outside of layers stays gathered
    # from the first to the last moment of a pass.
    return {
        "gathered weights": _FLOAT * (outside + 2 * layer),
        "gradients on their way": _FLOAT * max(outside, layer),
    }


def _kept(config: TrainConfig, shape: ModelConfig, device: Device, axes: Axes) -> int:
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
            # Held on to, so that no other tensor takes its place in memory and in the count.
            alive.append(tensor)
        return tensor

    # Fake tensors know their device, so autocast and kernels choose as they would in training.
    with FakeTensorMode(), device.device:
        model = HybridLM(shape)
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        if device.compiled:
            _partition_(model)
        length = config.data.sequence_length
        tokens = torch.zeros(micro_batch(config, axes.dp_degree), length + 1, dtype=torch.long)
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with device.autocast(), hooks:
            model.loss(tokens, config.z_loss)
    return sum(kept.values())


def _partition_(model: HybridLM) -> None:
    """Let layers and head keep for the way back what they would keep compiled."""
    model.model.layers = nn.ModuleList(_Partitioned(layer) for layer in model.model.layers)

    def loss(
        features: Tensor, head: Tensor, mup_head: float, targets: Tensor, z_loss: float
    ) -> Losses:
        cut = _partitioned(lambda f, w, t: head_loss(f, w, mup_head, t, z_loss))
        return cut(features, head, targets)

    model.head_loss = loss


class _Partitioned(nn.Module):
    """A layer that is cut into its way there and its way back."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self._cut = _partitioned(lambda weights, h, by: functional_call(layer, weights, (h, by)))

    def forward(self, h: Tensor, by: Angles) -> Tensor:
        return self._cut(dict(self.layer.named_parameters()), h, by)


def _partitioned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that autograd sees as torch.compile would show it, computed as it is.

    The compiler traces both ways as one graph and cuts it where least has to be kept: cheap
    operations, norms and activation functions among them, are computed again on the way back.
    """
    from functorch.compile import (
        aot_function,
        make_boxed_func,
        min_cut_rematerialization_partition,
    )
    from torch._inductor.decomposition import select_decomp_table

    def as_it_is(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    return aot_function(
        function,
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )

"""Several projections in one matrix product.

Queries, keys, values and the state-space input read the same features, as gate and up do; the
outputs of attention and of the state-space mixer are summed. One wide product is faster than
several narrow ones, and its gradient with respect to the input is one product as well. The
weights stay separate parameters, under Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return `factor * x`."""
    return x if factor == 1.0 else x * factor


def weight_of(module: nn.Linear | nn.Embedding) -> Tensor:
    """Return a module's weight, or this rank's shard of it if its block is tensor parallel.

    Raises:
        ValueError: The weight is a DTensor, but its block was not prepared for that.
    """
    weight = module.weight
    if not isinstance(weight, DTensor):
        return weight
    if not getattr(module, "computes_on_local_shard", False):
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} is a DTensor with the placements "
            f"{weight.placements}, but its block computes on whole weights: "
            "projections are joined and never call Linear.forward, so styles on single linears, "
            "such as ColwiseParallel, would train a wrong model without an error. Use "
            "tensor_parallelize in learnable_multipliers.pretrain.model.parallelize, and call an "
            "FSDP2 model through its own forward or loss"
        )
    return weight.to_local()


def project(x: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """Apply linears to the same features; return their outputs side by side.

    Split the result only once: each nested split concatenates and copies gradients again.
    """
    weights = [weight_of(linear) for linear in linears]
    return F.linear(x, weights[0] if len(weights) == 1 else torch.cat(weights))


def project_sum(xs: Sequence[Tensor], linears: Sequence[nn.Linear]) -> Tensor:
    """Apply each linear to its own features and sum the outputs."""
    weights = [weight_of(linear) for linear in linears]
    if len(weights) == 1:
        return F.linear(xs[0], weights[0])
    return F.linear(torch.cat(tuple(xs), -1), torch.cat(weights, 1))

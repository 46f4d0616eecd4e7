"""Several projections in one matrix product.

Queries, keys, values and the state-space input read the same features, as gate and up do; the
outputs of attention and of the state-space mixer are summed. One wide product is faster than
several narrow ones, and its gradient with respect to the input is one product as well. The
weights stay apart, under the names that Hugging Face has for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return `factor * x`."""
    return x if factor == 1.0 else x * factor


def project(x: Tensor, *groups: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Apply linears to the same features; return one tensor for each group, its outputs joined."""
    linears = [linear for group in groups for linear in group]
    if len(linears) == 1:
        return (linears[0](x),)
    joined = F.linear(x, torch.cat([linear.weight for linear in linears]))
    return joined.split([sum(linear.out_features for linear in group) for group in groups], -1)


def project_sum(xs: Sequence[Tensor], linears: Sequence[nn.Linear]) -> Tensor:
    """Apply each of `linears` to features of its own and add up what comes out."""
    if len(linears) == 1:
        return linears[0](xs[0])
    weight = torch.cat([linear.weight for linear in linears], 1)
    return F.linear(torch.cat(tuple(xs), -1), weight)

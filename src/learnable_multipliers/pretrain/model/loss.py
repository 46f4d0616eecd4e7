"""The training loss: cross-entropy, and a z-loss that keeps the softmax's normalizer near 1."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from learnable_multipliers.pretrain.model.projections import scaled


class Losses(NamedTuple):
    """What a batch costs, averaged over its tokens."""

    total: Tensor
    """What training minimizes."""
    cross_entropy: Tensor
    """Its part without the z-loss, in nats per token."""


def head_loss(
    features: Tensor, head: Tensor, mup_head: float, targets: Tensor, z_loss: float
) -> Losses:
    """Return cross-entropy + z_loss * (log sum exp of the logits)^2, both averaged."""
    logits = head_logits(features, head, mup_head)
    return losses_of(logits.logsumexp(-1), target_logits(logits, targets), z_loss)


def head_logits(features: Tensor, head: Tensor, mup_head: float) -> Tensor:
    """Return logits in float32 or wider."""
    logits = scaled(F.linear(features, head), mup_head)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the logit of each target; 0 for one outside of the vocabulary."""
    # A masked sum, not a gather: compiled, it is fused with the normalizer's pass over the
    # logits, where a gather's gradient would be a tensor of zeros as large as they are.
    others = torch.arange(logits.shape[-1], device=logits.device) != targets[..., None]
    return logits.masked_fill(others, 0.0).sum(-1)


def losses_of(normalizer: Tensor, target: Tensor, z_loss: float) -> Losses:
    """Return the losses, given the log sum exp and the target's logit at each position."""
    cross_entropy = (normalizer - target).mean()
    total = cross_entropy
    if z_loss:
        total = total + z_loss * normalizer.square().mean()
    return Losses(total, cross_entropy.detach())

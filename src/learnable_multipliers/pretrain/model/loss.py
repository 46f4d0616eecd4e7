"""The training loss: cross-entropy, and a z-loss that keeps the softmax's normalizer near 1."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from learnable_multipliers.kernels._backend import HAS_TRITON, Backend, use_triton
from learnable_multipliers.pretrain.model.projections import scaled
from learnable_multipliers.pretrain.model.triton_support import unsupported_dtype

if HAS_TRITON:
    from learnable_multipliers.pretrain.model import loss_kernels as kernels
else:
    kernels = None

CHUNK_BYTES = 256 << 20
"""Logits that the kernels hold at a time: fewer make matrix products too small for an H200."""


class Losses(NamedTuple):
    """What a batch costs, averaged over its tokens."""

    total: Tensor
    """What training minimizes."""
    cross_entropy: Tensor
    """Its part without the z-loss, in nats per token."""


def head_loss(
    features: Tensor,
    head: Tensor,
    mup_head: float,
    targets: Tensor,
    z_loss: float,
    backend: Backend = "auto",
) -> Losses:
    """Return cross-entropy + z_loss * (log sum exp of the logits)^2, both averaged.

    Uses PyTorch or Triton, by device and `backend`.
    """
    device = features.device.type
    dtype = torch.promote_types(features.dtype, head.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if not use_triton(backend, features.device, unsupported_dtype(dtype)) or kernels is None:
        return head_loss_reference(features, head, mup_head, targets, z_loss)
    gradient = torch.is_grad_enabled() and (features.requires_grad or head.requires_grad)
    total, cross_entropy, *_ = kernels.head_loss(
        features.flatten(0, -2),
        head,
        targets.flatten(),
        mup_head,
        z_loss,
        dtype,
        gradient,
        CHUNK_BYTES,
    )
    return Losses(total, cross_entropy.detach())


def head_loss_reference(
    features: Tensor, head: Tensor, mup_head: float, targets: Tensor, z_loss: float
) -> Losses:
    """Return the same with PyTorch's own operators."""
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

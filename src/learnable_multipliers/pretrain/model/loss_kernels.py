"""Head and loss without the logits of a whole batch in memory.

Logits are computed for a chunk of positions at a time and replaced in place by their gradients. The
gradients of features and head are computed right away, so the backward pass only scales them.
"""

# Triton's constants are upper case.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROUND = 128
"""Positions in a chunk are a multiple of this."""
_BLOCK = 4096
"""Logits that a program reads at a time."""


@triton.jit
def loss_kernel(
    logits,
    targets,
    normalizers,
    target_logits,
    factor,
    z_loss,
    share,
    vocab,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce one row of logits; with GRADIENT replace it by the gradient of the loss.

    The gradient of log sum exp - x_target + z (log sum exp)^2 is p (1 + 2 z log sum exp) - target.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocab
    target = tl.load(targets + row)
    # Before the first reduction, so every thread has read it before any of them writes.
    known = (target >= 0) & (target < vocab)
    target_logit = tl.load(start + target, mask=known, other=0.0).to(tl.float32) * factor
    offsets = tl.arange(0, BLOCK)
    largest, total = -float("inf"), 0.0
    for first in range(0, vocab, BLOCK):
        at = first + offsets
        x = tl.load(start + at, mask=at < vocab, other=0.0).to(tl.float32) * factor
        x = tl.where(at < vocab, x, -float("inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    normalizer = largest + tl.log(total)
    tl.store(normalizers + row, normalizer)
    tl.store(target_logits + row, target_logit)
    if GRADIENT:
        pull = 1.0 + 2.0 * z_loss * normalizer
        for first in range(0, vocab, BLOCK):
            at = first + offsets
            x = tl.load(start + at, mask=at < vocab, other=0.0).to(tl.float32) * factor
            gradient = (tl.exp(x - normalizer) * pull - tl.where(at == target, 1.0, 0.0)) * share
            tl.store(start + at, gradient.to(logits.dtype.element_ty), mask=at < vocab)


@torch.library.custom_op("learnable_multipliers::head_loss", mutates_args=())
def head_loss(
    features: Tensor,
    head: Tensor,
    targets: Tensor,
    mup_head: float,
    z_loss: float,
    dtype: torch.dtype,
    gradient: bool,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return total loss and cross-entropy, and the gradients of the total.

    Args:
        features: (positions, features)
        head: (vocabulary, features)
        targets: (positions,)
        dtype: Of the matrix products.
        gradient: Whether to compute gradients; without, they are empty.
        chunk_bytes: Size of the logits computed at a time.
    """
    x, weight = features.to(dtype), head.to(dtype)
    num, vocab = len(x), len(weight)
    rows = max(_ROUND, chunk_bytes // (vocab * dtype.itemsize) // _ROUND * _ROUND)
    logits = x.new_empty(min(rows, num), vocab)
    normalizers, own = x.new_empty(2, num, dtype=torch.float32).unbind()
    dx = torch.empty_like(x if gradient else x[:0])
    dhead = torch.zeros_like(weight if gradient else weight[:0], dtype=torch.float32)
    for start in range(0, num, rows):
        part = slice(start, min(start + rows, num))
        some = logits[: part.stop - start]
        torch.mm(x[part], weight.T, out=some)
        loss_kernel[(len(some),)](
            some,
            targets[part],
            normalizers[part],
            own[part],
            mup_head,
            z_loss,
            mup_head / num,
            vocab,
            GRADIENT=gradient,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
            num_warps=8,
        )
        if gradient:
            torch.mm(some, weight, out=dx[part])
            dhead += some.T @ x[part]
    cross_entropy = (normalizers - own).mean()
    total = cross_entropy + z_loss * normalizers.square().mean()
    return total, cross_entropy, dx.to(features.dtype), dhead.to(head.dtype)


@head_loss.register_fake
def _(
    features: Tensor,
    head: Tensor,
    targets: Tensor,
    mup_head: float,
    z_loss: float,
    dtype: torch.dtype,
    gradient: bool,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses = features.new_empty(2, dtype=torch.float32).unbind()
    empty = slice(None if gradient else 0)
    return *losses, torch.empty_like(features[empty]), torch.empty_like(head[empty])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[2:])


def _backward(ctx: Any, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dhead = ctx.saved_tensors
    return dx * dtotal, dhead * dtotal, None, None, None, None, None, None


head_loss.register_autograd(_backward, setup_context=_setup_context)

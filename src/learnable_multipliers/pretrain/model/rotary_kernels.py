"""Triton kernel of the rotary positions, as an operator that is opaque to torch.compile.

Each pass reads and writes every number once. The gradient is written to one tensor, like the
projection: concatenated by the compiler, it takes several times as long.
"""

# Triton's constants are upper case.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnable_multipliers.pretrain.model.triton_support import last_dim_contiguous

_BLOCK = 2048
"""Pairs of features in one program."""
_VECTOR = 8


@triton.jit
def rotary_kernel(
    x,
    y,
    cos,
    sin,
    scale,
    length,
    x_batch,
    x_time,
    x_head,
    y_batch,
    y_time,
    y_head,
    DIRECTION: tl.constexpr,
    ALIGN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
):
    """Rotate one head over BLOCK_TIME positions.

    DIRECTION is 1 for forward, -1 for backward, and 0 without rotation.
    """
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    time = tl.program_id(0) * BLOCK_TIME + tl.arange(0, BLOCK_TIME)
    pair = tl.arange(0, HALF)
    inside = (time < length)[:, None]
    # Starts and strides are multiples of ALIGN, which Triton cannot infer from products.
    x_row = tl.multiple_of(batch * x_batch + head * x_head + time.to(tl.int64) * x_time, ALIGN)
    y_row = tl.multiple_of(batch * y_batch + head * y_head + time.to(tl.int64) * y_time, ALIGN)
    from_ = x + x_row[:, None] + pair[None, :]
    to = y + y_row[:, None] + pair[None, :]
    first = tl.load(from_, mask=inside, other=0.0).to(tl.float32) * scale
    second = tl.load(from_ + HALF, mask=inside, other=0.0).to(tl.float32) * scale
    if DIRECTION != 0:
        angle = time[:, None] * HALF + pair[None, :]
        b_cos = tl.load(cos + angle, mask=inside, other=0.0)
        b_sin = tl.load(sin + angle, mask=inside, other=0.0) * DIRECTION
        rotated = first * b_cos - second * b_sin
        second = second * b_cos + first * b_sin
        first = rotated
    tl.store(to, first.to(y.dtype.element_ty), mask=inside)
    tl.store(to + HALF, second.to(y.dtype.element_ty), mask=inside)


@torch.library.custom_op("learnable_multipliers::split_heads_rotary", mutates_args=())
def split_heads_rotary(
    projected: Tensor, cos: Tensor, sin: Tensor, counts: list[int], scales: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values, (batch, length, heads, head_dim) each.

    `projected` may be a strided view; `counts` are the heads of each of the three.
    """
    parts = _parts(last_dim_contiguous(projected), counts)
    made = [part.new_empty(part.shape) for part in parts]
    for part, out, scale, direction in zip(parts, made, scales, (1, 1, 0), strict=True):
        _launch(part, out, cos, sin, scale, direction)
    return made[0], made[1], made[2]


@split_heads_rotary.register_fake
def _(
    projected: Tensor, cos: Tensor, sin: Tensor, counts: list[int], scales: list[float]
) -> tuple[Tensor, ...]:
    batch, length, _ = projected.shape
    return tuple(projected.new_empty(batch, length, n, 2 * cos.shape[1]) for n in counts)


@torch.library.custom_op("learnable_multipliers::split_heads_rotary_backward", mutates_args=())
def split_heads_rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, scales: list[float]
) -> Tensor:
    """Return the gradient of the projection."""
    grads = [last_dim_contiguous(grad) for grad in (dq, dk, dv)]
    counts = [grad.shape[2] for grad in grads]
    made = dq.new_empty(*dq.shape[:2], sum(counts) * dq.shape[3])
    parts = _parts(made, counts)
    for grad, out, scale, direction in zip(grads, parts, scales, (-1, -1, 0), strict=True):
        _launch(grad, out, cos, sin, scale, direction)
    return made


@split_heads_rotary_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, scales: list[float]) -> Tensor:
    features = (dq.shape[2] + dk.shape[2] + dv.shape[2]) * dq.shape[3]
    return dq.new_empty(dq.shape[0], dq.shape[1], features)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, _, ctx.scales = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    grad = split_heads_rotary_backward(dq, dk, dv, *ctx.saved_tensors, ctx.scales)
    return grad, None, None, None, None


split_heads_rotary.register_autograd(_backward, setup_context=_setup_context)


def _parts(joined: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """Return views of a joined tensor: (batch, length, heads, head_dim) each."""
    return joined.unflatten(-1, (sum(counts), -1)).split(counts, 2)


def _launch(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, scale: float, direction: int) -> None:
    batch, length, heads, dim = x.shape
    strides = *x.stride()[:3], *y.stride()[:3]
    aligned = not any(n % _VECTOR for n in (*strides, x.storage_offset(), y.storage_offset()))
    align = _VECTOR if aligned else 1
    block = max(1, _BLOCK // (dim // 2))
    constants = {"DIRECTION": direction, "ALIGN": align, "HALF": dim // 2, "BLOCK_TIME": block}
    rotary_kernel[(triton.cdiv(length, block), heads, batch)](
        x, y, cos, sin, scale, length, *strides, num_warps=4, **constants
    )

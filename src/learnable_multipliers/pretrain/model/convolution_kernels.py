"""Triton kernels of the causal convolution: one pass over memory forward, one backward.

A program iterates over time for a few channels and keeps the previous rows in registers, so nothing
is read twice; rows are prefetched. The backward pass recomputes the pre-activation instead of
saving it. Gradients of taps and bias are summed over programs in a fixed order, so results are
deterministic.

The output is three tensors, the x, B and C of the mixer, and their gradients are three inputs: one
launch computes all of them, without copies to split or concatenate.
"""

# Triton's constants are upper case.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnable_multipliers.pretrain.model.triton_support import last_dim_contiguous

_BLOCK_TIME = 64
_BLOCK_CHANNELS = 128
# Rows are prefetched by hand: no pipelining by the compiler.
_CONSTANTS = {
    "BLOCK_TIME": _BLOCK_TIME,
    "BLOCK_CHANNELS": _BLOCK_CHANNELS,
    "num_warps": 1,
    "num_stages": 1,
}
_VECTOR = 8
"""Numbers loaded at once if strides allow: 16 bytes of 16-bit numbers."""


@triton.jit
def _row(pointer, time, length, stride, channel, mask, ALIGN: tl.constexpr):
    """Load the row at a time step; zeros outside the sequence."""
    inside = _between(time, 0, length, channel) & mask
    place = tl.multiple_of(time.to(tl.int64) * stride, ALIGN)
    return tl.load(pointer + place + channel, mask=inside, other=0.0)


@triton.jit
def _between(time, first, end, channel):
    """Return a mask over channels: whether a time step is in [first, end)."""
    times = tl.full(channel.shape, 0, tl.int32) + time
    return (times >= first) & (times < end)


@triton.jit
def _taps(weight, bias, channel, mask):
    w0 = tl.load(weight + channel * 4, mask=mask, other=0.0)
    w1 = tl.load(weight + channel * 4 + 1, mask=mask, other=0.0)
    w2 = tl.load(weight + channel * 4 + 2, mask=mask, other=0.0)
    w3 = tl.load(weight + channel * 4 + 3, mask=mask, other=0.0)
    return w0, w1, w2, w3, tl.load(bias + channel, mask=mask, other=0.0)


@triton.jit
def _part(first, second, third, size0, size1, size2, BLOCK_CHANNELS: tl.constexpr):
    """Return which of three tensors this program works on, its size, where it begins, and the
    program's channels in it."""
    block = tl.program_id(1)
    blocks0, blocks1 = tl.cdiv(size0, BLOCK_CHANNELS), tl.cdiv(size1, BLOCK_CHANNELS)
    tensor, size, start = first, size0, 0
    if block >= blocks0 + blocks1:
        tensor, size, start = third, size2, size0 + size1
        block -= blocks0 + blocks1
    elif block >= blocks0:
        tensor, size, start = second, size1, size0
        block -= blocks0
    return tensor, size, start, block * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)


@triton.jit
def convolve_kernel(
    x,
    weight,
    bias,
    y0,
    y1,
    y2,
    length,
    size0,
    size1,
    size2,
    stride_batch,
    stride_time,
    ALIGN: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Compute BLOCK_TIME rows of one y; each is contiguous."""
    batch = tl.program_id(2).to(tl.int64)
    y, channels, first, channel = _part(y0, y1, y2, size0, size1, size2, BLOCK_CHANNELS)
    x += tl.multiple_of(batch * stride_batch, ALIGN) + tl.multiple_of(first, ALIGN)
    y += tl.multiple_of(batch * length * channels, ALIGN)
    mask = channel < channels
    start = tl.program_id(0) * BLOCK_TIME
    w0, w1, w2, w3, b = _taps(weight, bias, first + channel, mask)
    x1 = _row(x, start - 3, length, stride_time, channel, mask, ALIGN).to(tl.float32)
    x2 = _row(x, start - 2, length, stride_time, channel, mask, ALIGN).to(tl.float32)
    x3 = _row(x, start - 1, length, stride_time, channel, mask, ALIGN).to(tl.float32)
    next0 = _row(x, start, length, stride_time, channel, mask, ALIGN)
    next1 = _row(x, start + 1, length, stride_time, channel, mask, ALIGN)
    next2 = _row(x, start + 2, length, stride_time, channel, mask, ALIGN)
    next3 = _row(x, start + 3, length, stride_time, channel, mask, ALIGN)
    for i in range(BLOCK_TIME):
        time = start + i
        x4 = next0.to(tl.float32)
        next0, next1, next2 = next1, next2, next3
        next3 = _row(x, time + 4, length, stride_time, channel, mask, ALIGN)
        u = b + w0 * x1 + w1 * x2 + w2 * x3 + w3 * x4
        b_y = (u / (1.0 + tl.exp(-u))).to(y.dtype.element_ty)
        inside = _between(time, 0, length, channel) & mask
        place = tl.multiple_of(time.to(tl.int64) * channels, ALIGN)
        tl.store(y + place + channel, b_y, mask=inside)
        x1, x2, x3 = x2, x3, x4


@triton.jit
def convolve_backward_kernel(
    x,
    weight,
    bias,
    dy0,
    dy1,
    dy2,
    dx,
    parts,
    length,
    size0,
    size1,
    size2,
    stride_batch,
    stride_time,
    ALIGN: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Compute BLOCK_TIME rows of dx, and their parts of the gradients of taps and bias.

    du = dy silu'(u), dx_t = w0 du_{t+3} + w1 du_{t+2} + w2 du_{t+1} + w3 du_t; parts are
    (programs over batch and time, taps + 1, channels), the bias last. Each dy, and dx, is
    contiguous.
    """
    batch = tl.program_id(2).to(tl.int64)
    dy, own, first, channel = _part(dy0, dy1, dy2, size0, size1, size2, BLOCK_CHANNELS)
    channels = size0 + size1 + size2
    x += tl.multiple_of(batch * stride_batch, ALIGN) + tl.multiple_of(first, ALIGN)
    dy += tl.multiple_of(batch * length * own, ALIGN)
    dx += tl.multiple_of(batch * length * channels, ALIGN) + tl.multiple_of(first, ALIGN)
    mask = channel < own
    start = tl.program_id(0) * BLOCK_TIME
    w0, w1, w2, w3, b = _taps(weight, bias, first + channel, mask)
    x1 = _row(x, start - 3, length, stride_time, channel, mask, ALIGN).to(tl.float32)
    x2 = _row(x, start - 2, length, stride_time, channel, mask, ALIGN).to(tl.float32)
    x3 = _row(x, start - 1, length, stride_time, channel, mask, ALIGN).to(tl.float32)
    x_next0 = _row(x, start, length, stride_time, channel, mask, ALIGN)
    x_next1 = _row(x, start + 1, length, stride_time, channel, mask, ALIGN)
    x_next2 = _row(x, start + 2, length, stride_time, channel, mask, ALIGN)
    x_next3 = _row(x, start + 3, length, stride_time, channel, mask, ALIGN)
    d_next0 = _row(dy, start, length, own, channel, mask, ALIGN)
    d_next1 = _row(dy, start + 1, length, own, channel, mask, ALIGN)
    d_next2 = _row(dy, start + 2, length, own, channel, mask, ALIGN)
    d_next3 = _row(dy, start + 3, length, own, channel, mask, ALIGN)
    # Separate zeros: Triton treats variables that share an initial value and only exchange values
    # as loop-invariant.
    du1 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    du2 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    du3 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum0 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum1 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum2 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum3 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum_b = tl.zeros([BLOCK_CHANNELS], tl.float32)
    # Three more rows: the last rows of dx need the du after them.
    for i in range(BLOCK_TIME + 3):
        time = start + i
        x4, b_dy = x_next0.to(tl.float32), d_next0.to(tl.float32)
        x_next0, x_next1, x_next2 = x_next1, x_next2, x_next3
        d_next0, d_next1, d_next2 = d_next1, d_next2, d_next3
        x_next3 = _row(x, time + 4, length, stride_time, channel, mask, ALIGN)
        d_next3 = _row(dy, time + 4, length, own, channel, mask, ALIGN)
        u = b + w0 * x1 + w1 * x2 + w2 * x3 + w3 * x4
        gate = 1.0 / (1.0 + tl.exp(-u))
        du = b_dy * gate * (1.0 + u * (1.0 - gate))
        counted = tl.where(time < start + BLOCK_TIME, du, 0.0)
        sum0 += counted * x1
        sum1 += counted * x2
        sum2 += counted * x3
        sum3 += counted * x4
        sum_b += counted
        grad = (w0 * du + w1 * du1 + w2 * du2 + w3 * du3).to(dx.dtype.element_ty)
        at = time - 3
        inside = _between(at, start, length, channel) & mask
        place = tl.multiple_of(at.to(tl.int64) * channels, ALIGN)
        tl.store(dx + place + channel, grad, mask=inside)
        x1, x2, x3 = x2, x3, x4
        du1, du2, du3 = du, du1, du2
    row = (batch * tl.num_programs(0) + tl.program_id(0)) * 5
    to_parts = parts + row * channels + first + channel
    tl.store(to_parts, sum0, mask=mask)
    tl.store(to_parts + channels, sum1, mask=mask)
    tl.store(to_parts + 2 * channels, sum2, mask=mask)
    tl.store(to_parts + 3 * channels, sum3, mask=mask)
    tl.store(to_parts + 4 * channels, sum_b, mask=mask)


@torch.library.custom_op("learnable_multipliers::convolve_silu", mutates_args=())
def convolve_silu(
    x: Tensor, weight: Tensor, bias: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activated convolution in three parts, of `sizes` channels.

    weight and bias are float32, x may be a strided view.
    """
    x = last_dim_contiguous(x)
    y = _empty_parts(x, sizes)
    convolve_kernel[_grid(x, sizes)](
        *(x, weight.contiguous(), bias.contiguous(), *y),
        *(x.shape[1], *sizes, *x.stride()[:2]),
        ALIGN=_alignment(sizes, x, *y),
        **_CONSTANTS,
    )
    return y


@convolve_silu.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_parts(x, sizes)


@torch.library.custom_op("learnable_multipliers::convolve_silu_backward", mutates_args=())
def convolve_silu_backward(
    dy0: Tensor, dy1: Tensor, dy2: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and those of taps and bias in rows, the bias last."""
    x, dy = last_dim_contiguous(x), [part.contiguous() for part in (dy0, dy1, dy2)]
    sizes = [part.shape[2] for part in dy]
    dx = x.new_empty(x.shape)
    programs, _, batch = grid = _grid(x, sizes)
    parts = weight.new_empty(batch * programs, 5, x.shape[2])
    convolve_backward_kernel[grid](
        *(x, weight.contiguous(), bias.contiguous(), *dy, dx, parts),
        *(x.shape[1], *sizes, *x.stride()[:2]),
        ALIGN=_alignment(sizes, x, *dy, dx),
        **_CONSTANTS,
    )
    return dx, parts.sum(0)


@convolve_silu_backward.register_fake
def _(
    dy0: Tensor, dy1: Tensor, dy2: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(5, x.shape[2])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, rows = convolve_silu_backward(*dy, *ctx.saved_tensors)
    return dx, rows[:-1].T, rows[-1], None


convolve_silu.register_autograd(_backward, setup_context=_setup_context)


def _empty_parts(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (x.new_empty(*x.shape[:2], size) for size in sizes)
    return first, second, third


def _grid(x: Tensor, sizes: Sequence[int]) -> tuple[int, int, int]:
    blocks = sum(triton.cdiv(size, _BLOCK_CHANNELS) for size in sizes)
    return triton.cdiv(x.shape[1], _BLOCK_TIME), blocks, x.shape[0]


def _alignment(sizes: Sequence[int], *tensors: Tensor) -> int:
    """Return the common alignment of all sizes, strides and offsets, up to that of wide loads."""
    places = [place for t in tensors for place in (*t.stride()[:2], t.storage_offset())]
    return 1 if any(place % _VECTOR for place in (*sizes, *places)) else _VECTOR

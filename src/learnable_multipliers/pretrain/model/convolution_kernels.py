"""Triton kernels of the causal convolution: one pass over memory forward, one backward.

A program walks through time with a few channels, and keeps what the taps reach back to in
registers, so that nothing is read twice; rows are fetched ahead of their use. The backward pass
computes the pre-activation again instead of keeping it. Gradients of taps and bias are summed
over programs in a fixed order, so that results repeat bit for bit.
"""

# Triton's constants are upper case.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_TIME = 64
_BLOCK_CHANNELS = 128
# Rows are fetched ahead by hand; the compiler is not to do it a second time.
_CONSTANTS = {
    "BLOCK_TIME": _BLOCK_TIME,
    "BLOCK_CHANNELS": _BLOCK_CHANNELS,
    "num_warps": 1,
    "num_stages": 1,
}
_VECTOR = 8
"""Numbers that are loaded at once where strides allow: 16 bytes in 16 bits."""


@triton.jit
def _row(pointer, time, length, stride, channel, mask, ALIGN: tl.constexpr):
    """Load the row at a time; zeros outside the sequence."""
    inside = _between(time, 0, length, channel) & mask
    place = tl.multiple_of(time.to(tl.int64) * stride, ALIGN)
    return tl.load(pointer + place + channel, mask=inside, other=0.0)


@triton.jit
def _between(time, first, end, channel):
    """Return for every channel whether a time lies in [first, end)."""
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
def convolve_kernel(
    x,
    weight,
    bias,
    y,
    length,
    channels,
    stride_batch,
    stride_time,
    ALIGN: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Compute BLOCK_TIME rows of y, which is contiguous."""
    batch = tl.program_id(2).to(tl.int64)
    x += tl.multiple_of(batch * stride_batch, ALIGN)
    y += tl.multiple_of(batch * length * channels, ALIGN)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    mask = channel < channels
    start = tl.program_id(0) * BLOCK_TIME
    w0, w1, w2, w3, b = _taps(weight, bias, channel, mask)
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
    dy,
    dx,
    parts,
    length,
    channels,
    stride_batch,
    stride_time,
    dy_stride_batch,
    dy_stride_time,
    ALIGN: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Compute BLOCK_TIME rows of dx, and their parts of the gradients of taps and bias.

    du = dy silu'(u), dx_t = w0 du_{t+3} + w1 du_{t+2} + w2 du_{t+1} + w3 du_t; parts are
    (programs over batch and time, taps + 1, channels), the bias last.
    """
    batch = tl.program_id(2).to(tl.int64)
    x += tl.multiple_of(batch * stride_batch, ALIGN)
    dy += tl.multiple_of(batch * dy_stride_batch, ALIGN)
    dx += tl.multiple_of(batch * length * channels, ALIGN)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    mask = channel < channels
    start = tl.program_id(0) * BLOCK_TIME
    w0, w1, w2, w3, b = _taps(weight, bias, channel, mask)
    x1 = _row(x, start - 3, length, stride_time, channel, mask, ALIGN).to(tl.float32)
    x2 = _row(x, start - 2, length, stride_time, channel, mask, ALIGN).to(tl.float32)
    x3 = _row(x, start - 1, length, stride_time, channel, mask, ALIGN).to(tl.float32)
    x_next0 = _row(x, start, length, stride_time, channel, mask, ALIGN)
    x_next1 = _row(x, start + 1, length, stride_time, channel, mask, ALIGN)
    x_next2 = _row(x, start + 2, length, stride_time, channel, mask, ALIGN)
    x_next3 = _row(x, start + 3, length, stride_time, channel, mask, ALIGN)
    d_next0 = _row(dy, start, length, dy_stride_time, channel, mask, ALIGN)
    d_next1 = _row(dy, start + 1, length, dy_stride_time, channel, mask, ALIGN)
    d_next2 = _row(dy, start + 2, length, dy_stride_time, channel, mask, ALIGN)
    d_next3 = _row(dy, start + 3, length, dy_stride_time, channel, mask, ALIGN)
    # Zeros of their own: Triton takes variables that start as one value and are handed on among
    # themselves for variables that the loop leaves alone.
    du1 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    du2 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    du3 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum0 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum1 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum2 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum3 = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum_b = tl.zeros([BLOCK_CHANNELS], tl.float32)
    # Three rows more: the last rows of dx need the du behind them.
    for i in range(BLOCK_TIME + 3):
        time = start + i
        x4, b_dy = x_next0.to(tl.float32), d_next0.to(tl.float32)
        x_next0, x_next1, x_next2 = x_next1, x_next2, x_next3
        d_next0, d_next1, d_next2 = d_next1, d_next2, d_next3
        x_next3 = _row(x, time + 4, length, stride_time, channel, mask, ALIGN)
        d_next3 = _row(dy, time + 4, length, dy_stride_time, channel, mask, ALIGN)
        u = b + w0 * x1 + w1 * x2 + w2 * x3 + w3 * x4
        gate = 1.0 / (1.0 + tl.exp(-u))
        du = b_dy * gate * (1.0 + u * (1.0 - gate))
        own = tl.where(time < start + BLOCK_TIME, du, 0.0)
        sum0 += own * x1
        sum1 += own * x2
        sum2 += own * x3
        sum3 += own * x4
        sum_b += own
        grad = (w0 * du + w1 * du1 + w2 * du2 + w3 * du3).to(dx.dtype.element_ty)
        at = time - 3
        inside = _between(at, start, length, channel) & mask
        place = tl.multiple_of(at.to(tl.int64) * channels, ALIGN)
        tl.store(dx + place + channel, grad, mask=inside)
        x1, x2, x3 = x2, x3, x4
        du1, du2, du3 = du, du1, du2
    to_parts = parts + (batch * tl.num_programs(0) + tl.program_id(0)) * 5 * channels + channel
    tl.store(to_parts, sum0, mask=mask)
    tl.store(to_parts + channels, sum1, mask=mask)
    tl.store(to_parts + 2 * channels, sum2, mask=mask)
    tl.store(to_parts + 3 * channels, sum3, mask=mask)
    tl.store(to_parts + 4 * channels, sum_b, mask=mask)


@torch.library.custom_op("learnable_multipliers::convolve_silu", mutates_args=())
def convolve_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the activated convolution; weight and bias are float32, x may be a strided view."""
    x = _readable(x)
    y = x.new_empty(x.shape)
    tensors = x, weight.contiguous(), bias.contiguous(), y
    strides = x.stride()[:2]
    convolve_kernel[_grid(x)](
        *tensors, *x.shape[1:], *strides, ALIGN=_alignment(x, y), **_CONSTANTS
    )
    return y


@convolve_silu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("learnable_multipliers::convolve_silu_backward", mutates_args=())
def convolve_silu_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    x, dy = _readable(x), _readable(dy)
    dx = x.new_empty(x.shape)
    programs, _, batch = grid = _grid(x)
    parts = weight.new_empty(batch * programs, 5, x.shape[2])
    tensors = x, weight.contiguous(), bias.contiguous(), dy, dx, parts
    strides = *x.stride()[:2], *dy.stride()[:2]
    convolve_backward_kernel[grid](
        *tensors, *x.shape[1:], *strides, ALIGN=_alignment(x, dy, dx), **_CONSTANTS
    )
    *taps, shift = parts.sum(0)
    return dx, torch.stack(taps, 1), shift.clone()


@convolve_silu_backward.register_fake
def _(dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return convolve_silu_backward(dy, *ctx.saved_tensors)


convolve_silu.register_autograd(_backward, setup_context=_keep)


def _grid(x: Tensor) -> tuple[int, int, int]:
    batch, length, channels = x.shape
    return triton.cdiv(length, _BLOCK_TIME), triton.cdiv(channels, _BLOCK_CHANNELS), batch


def _alignment(*tensors: Tensor) -> int:
    """Return what all strides and starts are multiples of, as far as wide loads need it."""
    places = [place for t in tensors for place in (*t.stride()[:2], t.storage_offset())]
    return 1 if any(place % _VECTOR for place in places) else _VECTOR


def _readable(tensor: Tensor) -> Tensor:
    """Return a tensor whose channels lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

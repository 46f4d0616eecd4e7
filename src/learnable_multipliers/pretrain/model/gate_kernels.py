"""Triton kernels of the MLP's gate, as operators that are opaque to torch.compile.

Each pass reads and writes every number once. The gradients of gate and up are written to one
tensor, as their joined projection needs them; the compiler would compute both halves twice.
"""

# Triton's constants are upper case.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Features in one program."""


@triton.jit
def gate_kernel(joined, y, factor, half, BLOCK: tl.constexpr):
    """Compute up * silu(factor * gate) for one position."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < half
    from_ = joined + row * 2 * half + at
    gate = tl.load(from_, mask=inside, other=0.0).to(tl.float32) * factor
    up = tl.load(from_ + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * half + at, (up * gate * tl.sigmoid(gate)).to(y.dtype.element_ty), inside)


@triton.jit
def gate_backward_kernel(dy, joined, djoined, factor, half, BLOCK: tl.constexpr):
    """Compute the gradients of gate and up for one position."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < half
    from_ = joined + row * 2 * half + at
    gate = tl.load(from_, mask=inside, other=0.0).to(tl.float32) * factor
    up = tl.load(from_ + half, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * half + at, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    dgate = grad * up * factor * open_ * (1.0 + gate * (1.0 - open_))
    to = djoined + row * 2 * half + at
    tl.store(to, dgate.to(djoined.dtype.element_ty), inside)
    tl.store(to + half, (grad * gate * open_).to(djoined.dtype.element_ty), inside)


@torch.library.custom_op("learnable_multipliers::gate", mutates_args=())
def gate(joined: Tensor, factor: float) -> Tensor:
    """Return up * silu(factor * gate) of gate and up side by side."""
    joined = joined.contiguous()
    half = joined.shape[-1] // 2
    y = joined.new_empty(*joined.shape[:-1], half)
    _launch(gate_kernel, (joined, y), factor, half)
    return y


@gate.register_fake
def _(joined: Tensor, factor: float) -> Tensor:
    return joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)


@torch.library.custom_op("learnable_multipliers::gate_backward", mutates_args=())
def gate_backward(dy: Tensor, joined: Tensor, factor: float) -> Tensor:
    """Return the gradient of gate and up, side by side."""
    joined = joined.contiguous()
    djoined = torch.empty_like(joined)
    _launch(gate_backward_kernel, (dy.contiguous(), joined, djoined), factor, dy.shape[-1])
    return djoined


@gate_backward.register_fake
def _(dy: Tensor, joined: Tensor, factor: float) -> Tensor:
    return joined.new_empty(joined.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    joined, ctx.factor = inputs
    ctx.save_for_backward(joined)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (joined,) = ctx.saved_tensors
    return gate_backward(dy, joined, ctx.factor), None


gate.register_autograd(_backward, setup_context=_setup_context)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], factor: float, half: int) -> None:
    block = min(_BLOCK, triton.next_power_of_2(half))
    rows = tensors[0].numel() // tensors[0].shape[-1]
    kernel[(rows, triton.cdiv(half, block))](*tensors, factor, half, BLOCK=block, num_warps=4)

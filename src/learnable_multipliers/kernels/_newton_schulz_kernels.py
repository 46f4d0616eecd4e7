"""The kernels of Newton-Schulz in Triton.

A symmetric product computes one triangle and mirrors it when it is stored. Tensor descriptors load
and store its blocks: they read zeros outside of a matrix and store nothing there, so no masks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from learnable_multipliers.kernels._newton_schulz import result_dtype


class Launch(NamedTuple):
    """Tile sizes and launch settings of a kernel."""

    block: int
    block_inner: int
    warps: int
    stages: int


PRODUCT = Launch(128, 64, 4, 3)
"""The fastest of seven on one H200, by benchmarks/newton_schulz.py."""
_BLOCK = 4096
_MAX_PARTS = 64
"""Parts of a matrix for the sum of squares: enough to fill a GPU with few matrices."""


@triton.jit
def square_kernel(x, squares, size, part_size, BLOCK: tl.constexpr):
    """Sum the squares of a part of a matrix."""
    part, batch, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    start = part.to(tl.int64) * part_size
    stop = tl.minimum(start + part_size, size)
    x += batch.to(tl.int64) * size
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        b_x = tl.load(x + at, mask=at < stop, other=0.0).to(tl.float32)
        total += b_x * b_x
    tl.store(squares + batch * num_parts + part, tl.sum(total, 0))


@triton.jit
def divide_kernel(
    x, squares, out, size, margin, eps, num_parts, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Divide a block of a matrix by its norm, given the squares of its parts."""
    block, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    parts = tl.arange(0, PARTS)
    b_squares = tl.load(squares + batch * num_parts + parts, mask=parts < num_parts, other=0.0)
    norm = tl.sqrt(tl.sum(b_squares, 0)) * margin
    # Not tl.maximum: a NaN norm must stay NaN.
    norm = tl.where(norm < eps, eps, norm)
    at = block * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + batch * size + at, mask=at < size, other=0.0).to(tl.float32) / norm
    tl.store(out + batch * size + at, b_x.to(out.dtype.element_ty), mask=at < size)


def divided_by_norm(batch: Tensor, margin: float, eps: float) -> Tensor:
    """Return matrices over their Frobenius norm times a margin, in `result_dtype`."""
    batch = batch.contiguous()
    out = torch.empty_like(batch, dtype=result_dtype(batch.dtype))
    count, size = len(batch), batch[0].numel() if len(batch) else 0
    if not out.numel():
        return out
    part_size = triton.cdiv(triton.cdiv(size, _MAX_PARTS), _BLOCK) * _BLOCK
    num_parts = triton.cdiv(size, part_size)
    squares = torch.empty(count, num_parts, dtype=torch.float32, device=batch.device)
    square_kernel[(num_parts, count)](batch, squares, size, part_size, BLOCK=_BLOCK, num_warps=8)
    divide_kernel[(triton.cdiv(size, _BLOCK), count)](
        batch, squares, out, size, margin, eps, num_parts, PARTS=_MAX_PARTS, BLOCK=_BLOCK
    )
    return out


@triton.jit
def symmetric_product_kernel(
    a,
    b,
    add,
    out,
    inner,
    alpha,
    beta,
    diagonal,
    TRANSPOSED: tl.constexpr,
    HAS_ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """Compute a tile on or below the diagonal of alpha a b^T + beta add + diagonal I."""
    tile, batch = tl.program_id(0), tl.program_id(1)
    # Tiles (i, j), j <= i, are counted row by row: tile = i (i + 1) / 2 + j.
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    row, col = i * BLOCK, (tile - i * (i + 1) // 2) * BLOCK
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, inner, BLOCK_INNER):
        if TRANSPOSED:
            b_a = a.load([batch, k, row]).reshape(BLOCK_INNER, BLOCK).T
            b_b = b.load([batch, k, col]).reshape(BLOCK_INNER, BLOCK)
        else:
            b_a = a.load([batch, row, k]).reshape(BLOCK, BLOCK_INNER)
            b_b = b.load([batch, col, k]).reshape(BLOCK, BLOCK_INNER).T
        total = tl.dot(b_a, b_b, total)
    total *= alpha
    if HAS_ADD:
        total += beta * add.load([batch, row, col]).reshape(BLOCK, BLOCK).to(tl.float32)
    offsets = tl.arange(0, BLOCK)
    on_diagonal = (row + offsets)[:, None] == (col + offsets)[None, :]
    total += tl.where(on_diagonal, diagonal, 0.0)
    b_out = total.to(out.dtype)
    out.store([batch, row, col], b_out.reshape(1, BLOCK, BLOCK))
    if row != col:
        out.store([batch, col, row], b_out.T.reshape(1, BLOCK, BLOCK))


def symmetric_product(
    a: Tensor,
    b: Tensor,
    add: Tensor | None,
    alpha: float,
    beta: float,
    diagonal: float,
    launch: Launch = PRODUCT,
) -> Tensor:
    """Return alpha a b^T + beta add + diagonal I, given matrices (batch, size, inner).

    `a` and `b` may both be transposed views.
    """
    count, size, inner = a.shape
    block, block_inner, num_warps, num_stages = launch
    out = torch.empty(count, size, size, dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    transposed = not a.is_contiguous() and a.mT.is_contiguous() and b.mT.is_contiguous()
    if transposed:
        operands = [TensorDescriptor.from_tensor(x.mT, [1, block_inner, block]) for x in (a, b)]
    else:
        operands = [
            TensorDescriptor.from_tensor(x.contiguous(), [1, block, block_inner]) for x in (a, b)
        ]
    square = TensorDescriptor.from_tensor(out, [1, block, block])
    side = triton.cdiv(size, block)
    symmetric_product_kernel[(side * (side + 1) // 2, count)](
        *operands,
        square if add is None else TensorDescriptor.from_tensor(add, [1, block, block]),
        square,
        inner,
        alpha,
        beta,
        diagonal,
        TRANSPOSED=transposed,
        HAS_ADD=add is not None,
        BLOCK=block,
        BLOCK_INNER=block_inner,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out

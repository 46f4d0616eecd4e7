"""Rotary positions: splits a projection into queries, keys and values and rotates the first two.

`split_heads` chooses between PyTorch and Triton, by device and by the `backend` asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from learnable_multipliers.kernels._backend import HAS_TRITON, Backend, takes_triton

if HAS_TRITON:
    from learnable_multipliers.pretrain.model import rotation_kernels as kernels
else:
    kernels = None

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class Angles(NamedTuple):
    """Cosines and sines by position and pair of features, (length, head_dim / 2) each."""

    cos: Tensor
    sin: Tensor


def angles(length: int, head_dim: int, theta: float, device: torch.device) -> Angles:
    """Return the angles by which each pair of features turns at each position."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequencies = theta ** (-pairs / head_dim)
    turns = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return Angles(turns.cos(), turns.sin())


def split_heads(
    projected: Tensor,
    by: Angles,
    num_heads: int,
    num_kv_heads: int,
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, turned, and values, each (batch, length, heads, head_dim), scaled.

    `projected` is (batch, length, features).
    """
    obstacle = _obstacle(projected, 2 * by.cos.shape[1])
    if not takes_triton(backend, projected.device, obstacle) or kernels is None:
        return split_heads_reference(projected, by, num_heads, num_kv_heads, scales)
    counts = [num_heads, num_kv_heads, num_kv_heads]
    return kernels.split_and_turn(projected, by.cos, by.sin, counts, list(scales))


def split_heads_reference(
    projected: Tensor, by: Angles, num_heads: int, num_kv_heads: int, scales: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by PyTorch's own operators."""
    heads = projected.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    parts = heads.split((num_heads, num_kv_heads, num_kv_heads), 2)
    q, k, v = (part * s if s != 1.0 else part for part, s in zip(parts, scales, strict=True))
    return turn(q, by), turn(k, by), v


def turn(x: Tensor, by: Angles) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of every head of x, (batch, length, heads, head_dim)."""
    cos, sin = (part[:, None].to(x.dtype) for part in by)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def kernels_take(head_dim: int) -> bool:
    """Return whether the kernels serve heads of this size."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def _obstacle(projected: Tensor, head_dim: int) -> str | None:
    """Return why the kernels cannot serve these tensors, or None if they can."""
    if projected.dtype not in _KERNEL_TYPES:
        return f"the kernels do not take {projected.dtype}"
    if not kernels_take(head_dim):
        return f"head_dim is {head_dim}, not a power of two of at least 16"
    return None

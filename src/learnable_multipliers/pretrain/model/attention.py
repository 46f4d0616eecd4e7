"""Grouped-query attention with rotary positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnable_multipliers.kernels._backend import HAS_TRITON, Backend, use_triton
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.projections import project, project_sum, scaled
from learnable_multipliers.pretrain.model.triton_support import unsupported_dtype

if HAS_TRITON:
    from learnable_multipliers.pretrain.model import rotary_kernels as kernels
else:
    kernels = None


class RotaryTable(NamedTuple):
    """Cosines and sines by position and pair of features, (length, head_dim / 2) each."""

    cos: Tensor
    sin: Tensor


class Attention(nn.Module):
    """Attention; a layer with two mixers may compute their projections together."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        inner, kv_inner = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.mup_attention_in, self.mup_key = config.mup_attention_in, config.mup_key
        self.mup_attention_out = config.mup_attention_out
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.joinable = True
        """Whether a layer may join these projections with those of another mixer."""

    @property
    def inputs(self) -> tuple[nn.Linear, ...]:
        """The projections that feed `attend`, in its order."""
        return self.q_proj, self.k_proj, self.v_proj

    @property
    def input_size(self) -> int:
        """The features of `inputs` together."""
        return sum(linear.out_features for linear in self.inputs)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """Return what attention adds to the residual stream."""
        return project_sum([self.attend(project(x, self.inputs), rotary)], [self.o_proj])

    def attend(self, projected: Tensor, rotary: RotaryTable) -> Tensor:
        """Return the heads' outputs side by side, (batch, length, num_heads * head_dim)."""
        scales = (
            self.mup_attention_in,
            self.mup_attention_in * self.mup_key,
            self.mup_attention_in,
        )
        heads = split_heads(projected, rotary, self.num_heads, self.num_kv_heads, scales)
        q, k, v = (part.transpose(1, 2) for part in heads)
        grouped = self.num_kv_heads < self.num_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        y = _ContiguousGradient.apply(y.transpose(1, 2).flatten(-2))
        return scaled(y, self.mup_attention_out)


class _ContiguousGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient.

    torch caches cuDNN's backward plans by the strides of q, k and v, not of the gradient: a plan
    made for a slice of a joined gradient misreads a contiguous one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def rotary_table(length: int, head_dim: int, theta: float, device: torch.device) -> RotaryTable:
    """Return cosines and sines of the angle of each pair of features at each position."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequencies = theta ** (-pairs / head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return RotaryTable(angles.cos(), angles.sin())


def split_heads(
    projected: Tensor,
    rotary: RotaryTable,
    num_heads: int,
    num_kv_heads: int,
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values, each (batch, length, heads, head_dim), scaled.

    `projected` is (batch, length, features). Uses PyTorch or Triton, by device and
    `backend`.
    """
    reason = _unsupported_reason(projected, 2 * rotary.cos.shape[1])
    if not use_triton(backend, projected.device, reason) or kernels is None:
        return split_heads_reference(projected, rotary, num_heads, num_kv_heads, scales)
    counts = [num_heads, num_kv_heads, num_kv_heads]
    return kernels.split_heads_rotary(projected, rotary.cos, rotary.sin, counts, list(scales))


def split_heads_reference(
    projected: Tensor,
    rotary: RotaryTable,
    num_heads: int,
    num_kv_heads: int,
    scales: tuple[float, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same with PyTorch's own operators."""
    heads = projected.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    parts = heads.split((num_heads, num_kv_heads, num_kv_heads), 2)
    q, k, v = (scaled(part, scale) for part, scale in zip(parts, scales, strict=True))
    return apply_rotary(q, rotary), apply_rotary(k, rotary), v


def apply_rotary(x: Tensor, rotary: RotaryTable) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of each head of x (batch, length, heads, head_dim)."""
    cos, sin = (part[:, None].to(x.dtype) for part in rotary)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rotary_kernels_support(head_dim: int) -> bool:
    """Return whether the kernels support heads of this size."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def _unsupported_reason(projected: Tensor, head_dim: int) -> str | None:
    """Return why the kernels do not support these tensors, or None if they do."""
    if not rotary_kernels_support(head_dim):
        return f"head_dim is {head_dim}, not a power of two of at least 16"
    return unsupported_dtype(projected.dtype)

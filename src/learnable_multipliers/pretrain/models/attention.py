"""Grouped-query attention with rotary positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnable_multipliers.pretrain.models.config import ModelConfig
from learnable_multipliers.pretrain.models.projections import scaled

Rotation = tuple[Tensor, Tensor]
"""Cosines, and sines with the sign of their place, (length, 2, head_dim / 2) each."""


def rotation(length: int, config: ModelConfig, device: torch.device) -> Rotation:
    """Return the angles by which each pair of features turns at each position."""
    pairs = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequencies = config.rope_theta ** (-pairs / config.head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, cos), 1), torch.stack((-sin, sin), 1)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of every head; x is (batch, length, heads, head_dim).

    (a, b) -> (a cos - b sin, b cos + a sin), with the pair's halves on an axis of their own:
    flipping an axis compiles to better code than cutting and joining halves.
    """
    cos, sin = (part[:, None].to(x.dtype) for part in by)
    halves = x.unflatten(-1, (2, -1))
    return (halves * cos + halves.flip(-2) * sin).flatten(-2)


class Attention(nn.Module):
    """Attention without its input and output products, which a layer shares between mixers."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        inner, kv_inner = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.mup_attention_in, self.mup_key = config.mup_attention_in, config.mup_key
        self.mup_attention_out = config.mup_attention_out
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    @property
    def inputs(self) -> tuple[nn.Linear, ...]:
        """The projections that feed `forward`, in its order."""
        return self.q_proj, self.k_proj, self.v_proj

    @property
    def output(self) -> nn.Linear:
        """The projection of what `forward` returns."""
        return self.o_proj

    def forward(self, projected: Sequence[Tensor], by: Rotation) -> Tensor:
        """Return the heads' outputs side by side, (batch, length, num_heads * head_dim)."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        q, v = scaled(q, self.mup_attention_in), scaled(v, self.mup_attention_in)
        k = scaled(k, self.mup_attention_in * self.mup_key)
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, by), rotate(k, by), v))
        grouped = self.num_kv_heads < self.num_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return scaled(y.transpose(1, 2).flatten(-2), self.mup_attention_out)

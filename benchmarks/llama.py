"""A Llama small enough to read, large enough to time: 432M parameters by default."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Shape of the model."""

    width: int = 1024
    hidden: int = 3584
    heads: int = 16
    layers: int = 24
    vocabulary: int = 32768


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(size.width, size.width, bias=False))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return the block's output."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(turn(q, angles), turn(k, angles), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of channels by position."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, size: Size):
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.hidden, bias=False)
        self.up_proj = nn.Linear(size.width, size.hidden, bias=False)
        self.down_proj = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm layer."""

    def __init__(self, size: Size):
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.mlp = MLP(size)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return the residual stream behind the layer."""
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The model; called with token ids, it returns the loss of predicting the next one."""

    def __init__(self, size: Size):
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        head_dim = self.size.width // self.size.heads
        place = torch.arange(ids.shape[1], device=ids.device)[:, None]
        wave = torch.arange(head_dim // 2, device=ids.device) / (head_dim // 2)
        angles = place * 10000.0**-wave
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

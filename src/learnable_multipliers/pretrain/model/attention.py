"""Grouped-query attention with rotary positions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.projections import project, project_sum, scaled
from learnable_multipliers.pretrain.model.rotation import Angles, split_heads


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

    def forward(self, x: Tensor, by: Angles) -> Tensor:
        """Return what attention adds to the residual stream."""
        (projected,) = project(x, self.inputs)
        return project_sum([self.attend(projected, by)], [self.o_proj])

    def attend(self, projected: Tensor, by: Angles) -> Tensor:
        """Return the heads' outputs side by side, (batch, length, num_heads * head_dim)."""
        scales = (
            self.mup_attention_in,
            self.mup_attention_in * self.mup_key,
            self.mup_attention_in,
        )
        heads = split_heads(projected, by, self.num_heads, self.num_kv_heads, scales)
        q, k, v = (part.transpose(1, 2) for part in heads)
        grouped = self.num_kv_heads < self.num_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return scaled(y.transpose(1, 2).flatten(-2), self.mup_attention_out)

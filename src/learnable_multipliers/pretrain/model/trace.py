"""The forward pass with every activation named, for measurements.

`Layer.forward` joins projections and is compiled; here each step runs separately and eagerly, with
the same modules. Training does not use this path, so measurements cost it nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from learnable_multipliers.pretrain.model.attention import Attention, RotaryTable, rotary_table
from learnable_multipliers.pretrain.model.hybrid import MLP, HybridLM, Layer
from learnable_multipliers.pretrain.model.mamba import Mamba
from learnable_multipliers.pretrain.model.projections import project, project_sum, scaled
from learnable_multipliers.roles import SSM_ROLES

Named = Generator[tuple[str, Tensor], None, Tensor]
"""Yields activations by name and returns what goes into the residual stream."""

INPUTS: dict[str, str] = {
    **dict.fromkeys(("query", "key", "value", *SSM_ROLES), "mixer_input"),
    "attention-out": "attention_inner",
    "ssm-out": "ssm_inner",
    "gate": "mlp_input",
    "up": "mlp_input",
    "down": "mlp_inner",
    "head": "head_input",
}
"""The activation that the matrix of each role reads."""


@torch.no_grad()
def trace(model: HybridLM, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the activations of a forward pass by name, layer after layer.

    `residual` is the residual stream before each layer and before the final norm. A role names
    what its matrix returns, before the fixed factor on it, and `INPUTS` what the matrix reads.
    `head` comes sequence by sequence: the logits of all together may not fit into memory.
    """
    backbone, config = model.model, model.config
    rotary = rotary_table(tokens.shape[1], config.head_dim, config.rope_theta, tokens.device)
    h = scaled(backbone.embed_tokens(tokens), backbone.mup_embedding)
    for layer in backbone.layers:
        assert isinstance(layer, Layer)
        yield "residual", h
        h = yield from _layer(layer, h, rotary)
    yield "residual", h
    features = backbone.final_layernorm(h)
    yield "head_input", features
    for sequence in features:
        yield "head", project(sequence, [model.lm_head])


def _layer(layer: Layer, h: Tensor, rotary: RotaryTable) -> Named:
    x = layer.input_layernorm(h)
    yield "mixer_input", x
    if layer.self_attn is not None:
        h = h + (yield from _attention(layer.self_attn, x, rotary))
    if layer.mamba is not None:
        h = h + (yield from _mamba(layer.mamba, x))
    if layer.feed_forward is not None and layer.pre_ff_layernorm is not None:
        h = h + (yield from _mlp(layer.feed_forward, layer.pre_ff_layernorm(h)))
    return h


def _attention(attention: Attention, x: Tensor, rotary: RotaryTable) -> Named:
    projected = project(x, attention.inputs)
    sizes = [linear.out_features for linear in attention.inputs]
    yield from zip(("query", "key", "value"), projected.split(sizes, -1), strict=True)
    inner = attention.attend(projected, rotary)
    yield "attention_inner", inner
    out = project_sum([inner], [attention.o_proj])
    yield "attention-out", out
    return out


def _mamba(mamba: Mamba, x: Tensor) -> Named:
    projected = project(x, [mamba.in_proj])
    yield from zip(SSM_ROLES, projected.split(mamba.block_sizes, -1), strict=True)
    inner = mamba.mix(*projected.split(mamba.input_sizes, -1))
    yield "ssm_inner", inner
    out = project_sum([inner], [mamba.out_proj])
    yield "ssm-out", out
    return out


def _mlp(mlp: MLP, x: Tensor) -> Named:
    yield "mlp_input", x
    gate, up = project(x, (mlp.gate_proj, mlp.up_proj)).chunk(2, -1)
    yield "gate", gate
    yield "up", up
    inner = up * F.silu(scaled(gate, mlp.mup_gate))
    yield "mlp_inner", inner
    down = project_sum([inner], [mlp.down_proj])
    yield "down", down
    return scaled(down, mlp.mup_down)

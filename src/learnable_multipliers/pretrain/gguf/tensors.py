"""A model as llama.cpp wants it: settings, names, layouts, and no fixed factors.

Nothing here needs the package gguf.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import torch
from torch import Tensor

from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.roles import SSM_ROLES

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "pre_ff_layernorm.weight": "ffn_norm.weight",
    "feed_forward.gate_proj.weight": "ffn_gate.weight",
    "feed_forward.up_proj.weight": "ffn_up.weight",
    "feed_forward.down_proj.weight": "ffn_down.weight",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm.weight": "ssm_norm.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
}
_LAYER = "model.layers."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def architecture(config: ModelConfig) -> Literal["falcon-h1", "llama"]:
    """Return what llama.cpp calls a model of this shape."""
    return "falcon-h1" if config.has_ssm else "llama"


def settings(config: ModelConfig) -> dict[str, int | float]:
    """Return the metadata that describe the shape."""
    shape: dict[str, int | float] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_length,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
    }
    if config.has_ssm:
        shape |= {
            "ssm.conv_kernel": config.ssm_conv_size,
            "ssm.inner_size": config.ssm_size,
            "ssm.state_size": config.ssm_state_size,
            "ssm.time_step_rank": config.num_ssm_heads,
            "ssm.group_count": config.ssm_groups,
        }
    return {f"{architecture(config)}.{key}": value for key, value in shape.items()}


def tensor_name(name: str, config: ModelConfig) -> str:
    """Return what llama.cpp calls a parameter of ours."""
    if not name.startswith(_LAYER):
        return _NAMES[name]
    index, _, leaf = name.removeprefix(_LAYER).partition(".")
    theirs = _NAMES[leaf]
    if config.has_ssm and theirs == "ffn_norm.weight":
        # The one norm that it looks up without a suffix, in this architecture only.
        theirs = "ffn_norm"
    return f"blk.{index}.{theirs}"


def tensors(model: HybridLM) -> dict[str, Tensor]:
    """Return the tensors of a file under llama.cpp's names, in float32."""
    config, factors = model.config, row_factors(model)
    state = {name: value.detach() for name, value in model.state_dict().items()}
    if config.tie_embeddings and config.mup_embedding == config.mup_head:
        # Without a head of its own llama.cpp takes the embedding. With other factors it has one.
        del state[_HEAD]
    return {
        tensor_name(name, config): laid_out(name, scaled_rows(value, factors.get(name)), config)
        for name, value in state.items()
    }


def is_matrix(name: str) -> bool:
    """Return whether llama.cpp takes a tensor in half precision; it wants the rest in float32."""
    kept = ("_norm.weight", "ssm_conv1d.weight")
    return name.endswith(".weight") and not name.endswith(kept)


def row_factors(model: HybridLM) -> dict[str, Tensor]:
    """Return the product of the fixed factors on each row of each matrix that has any, in float64.

    All of them scale what a matrix takes in or gives out, so all can go into its weights.
    """
    by_role: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for field, factor in model.config.mup_factors.items():
        for name, role in model.factor_targets(field):
            by_role[name][role] = by_role[name].get(role, 1.0) * factor
    num_rows = {name: len(value) for name, value in model.state_dict().items()}
    sizes: dict[str, int] = dict(zip(SSM_ROLES, model.config.ssm_block_sizes, strict=True))
    return {
        name: torch.cat(
            [
                torch.full((sizes.get(role, num_rows[name]),), factor, dtype=torch.float64)
                for role, factor in roles.items()
            ]
        )
        for name, roles in by_role.items()
        if any(factor != 1.0 for factor in roles.values())
    }


def scaled_rows(value: Tensor, factors: Tensor | None) -> Tensor:
    """Return a matrix with its rows scaled; each product is rounded once."""
    return value if factors is None else (value.double() * factors[:, None]).to(value.dtype)


def laid_out(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    """Return a parameter in the layout that llama.cpp reads."""
    leaf = ".".join(name.split(".")[3:])
    if leaf == "mamba.A_log":
        return -torch.exp(value)[:, None]
    if leaf == "mamba.D":
        return value[:, None]
    if leaf == "mamba.conv1d.weight":
        return value.squeeze(1)
    if leaf == "mamba.norm.weight":
        return value.unflatten(0, (config.ssm_groups, -1))
    if not config.has_ssm and leaf in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        return paired(value, config.head_dim)
    return value


def paired(weight: Tensor, head_dim: int) -> Tensor:
    """Return the rows of queries or keys in the order in which a `llama` rotates them.

    We rotate the pairs (i, i + head_dim / 2) of a head, llama.cpp (2i, 2i + 1); in a `falcon-h1` it
    uses our order.
    """
    heads = weight.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).flatten(0, 2)

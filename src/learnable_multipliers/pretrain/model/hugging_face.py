"""Export to Hugging Face: hybrids become `FalconH1ForCausalLM`, others `LlamaForCausalLM`.

Works on plain dictionaries (a config.json, a state dict), so nothing here needs transformers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM

ExportDtype = Literal["float32", "bfloat16", "float16"]

# Names that differ in a Llama; all others are the same.
_LLAMA_NAMES = {
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "model.final_layernorm.": "model.norm.",
}
# Hugging Face's names of settings, and ours.
_SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_length",
    # Beside rope_parameters: read by releases before 5.0, and by vLLM and llama.cpp.
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
}
_FALCON_SETTINGS = {
    "mamba_d_ssm": "ssm_size",
    "mamba_d_head": "ssm_head_dim",
    "mamba_n_groups": "ssm_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "ssm_conv_size",
    "mamba_chunk_size": "ssm_chunk_size",
    "mamba_rms_norm": "ssm_norm",
    "embedding_multiplier": "mup_embedding",
    "lm_head_multiplier": "mup_head",
    "attention_in_multiplier": "mup_attention_in",
    "key_multiplier": "mup_key",
    "attention_out_multiplier": "mup_attention_out",
    "ssm_in_multiplier": "mup_ssm_in",
    "ssm_out_multiplier": "mup_ssm_out",
}
_FALCON_LISTS = {
    "mlp_multipliers": ("mup_gate", "mup_down"),
    "ssm_multipliers": ("mup_z", "mup_x", "mup_B", "mup_C", "mup_dt"),
}
# Settings of a published model that ours has no counterpart for, and the one value it can have.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}
_FIXED_FALCON = {"mamba_conv_bias": True, "mamba_proj_bias": False, "projectors_bias": False}


def unsupported_reason(config: ModelConfig) -> str | None:
    """Return why Hugging Face has no class for a model of this shape, or None if it has."""
    if not config.has_attention or not config.has_mlp:
        return (
            "Hugging Face has no model of this shape: it takes attention and an MLP (a Llama), or "
            "those and a state-space mixer (a Falcon-H1)"
        )
    if not config.has_ssm and config.hidden_size % config.num_heads:
        return (
            f"Hugging Face's Llama wants a hidden_size ({config.hidden_size}) that num_heads "
            f"({config.num_heads}) divides, even where head_dim is given"
        )
    return None


def to_config(config: ModelConfig, *, eos_token_id: int | None = None) -> dict[str, Any]:
    """Return the contents of config.json for a model of this shape."""
    reason = unsupported_reason(config)
    if reason is not None:
        raise ValueError(reason)
    shared = {
        **{theirs: getattr(config, ours) for theirs, ours in _SETTINGS.items()},
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
        "dtype": "float32",
        **_FIXED,
    }
    if not config.has_ssm:
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shared}
    return {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        **shared,
        **_FIXED_FALCON,
        **{theirs: getattr(config, ours) for theirs, ours in _FALCON_SETTINGS.items()},
        **{theirs: [getattr(config, n) for n in ours] for theirs, ours in _FALCON_LISTS.items()},
        "mamba_n_heads": config.num_ssm_heads,
        "mamba_norm_before_gate": False,
    }


def to_state_dict(model: HybridLM) -> dict[str, Tensor]:
    """Return the weights under Hugging Face's names.

    A Llama has no fixed factors: those of ours go into its weights.
    """
    config = model.config
    state = {name: value.detach() for name, value in model.state_dict().items()}
    if config.tie_embeddings:
        del state["lm_head.weight"]
    if config.has_ssm:
        return state
    for field, factor in config.mup_factors.items():
        if factor == 1.0:
            continue
        for name, _ in model.factor_targets(field):
            if config.tie_embeddings and field in ("mup_embedding", "mup_head"):
                raise ValueError(
                    f"{field} = {factor:g} cannot go into a tied embedding, and a Llama has no "
                    "place for it: train untied, or with the factor at 1"
                )
            state[name] = state[name] * factor
    return {_their_name(name, config): value for name, value in state.items()}


def cast(name: str, value: Tensor, dtype: ExportDtype) -> Tensor:
    """Return a weight in the dtype of a file; refuse one that does not fit."""
    kind: torch.dtype = getattr(torch, dtype)
    narrow = value.to(kind)
    if not narrow.isfinite().all() and value.isfinite().all():
        raise ValueError(
            f"{name} has values up to {value.abs().max().item():.3g}, and {dtype} ends at "
            f"{torch.finfo(kind).max:.3g}: export in bfloat16 or float32"
        )
    return narrow


def _their_name(name: str, config: ModelConfig) -> str:
    """Return what Hugging Face calls a parameter of ours."""
    for ours, theirs in _LLAMA_NAMES.items() if not config.has_ssm else ():
        name = name.replace(ours, theirs)
    return name

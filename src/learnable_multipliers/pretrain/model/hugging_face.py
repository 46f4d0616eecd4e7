"""To Hugging Face and back: hybrids are `FalconH1ForCausalLM`, others `LlamaForCausalLM`.

Works on plain dictionaries (a config.json, a state dict), so nothing here needs transformers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, empty_model, factor_targets

# What is called otherwise in a Llama; the rest of the names are the same.
_LLAMA_NAMES = (
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"^model\.final_layernorm\.", "model.norm."),
)
_FALCON_FACTORS = {
    "embedding_multiplier": "mup_embedding",
    "lm_head_multiplier": "mup_head",
    "attention_in_multiplier": "mup_attention_in",
    "key_multiplier": "mup_key",
    "attention_out_multiplier": "mup_attention_out",
    "ssm_in_multiplier": "mup_ssm_in",
    "ssm_out_multiplier": "mup_ssm_out",
}
_FALCON_FACTOR_LISTS = {
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
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_REQUIRED_FALCON = ("mamba_n_heads", "mamba_d_state")
_FIXED_FALCON = {"mamba_conv_bias": True, "mamba_proj_bias": False, "projectors_bias": False}


def obstacle(config: ModelConfig) -> str | None:
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
    why_not = obstacle(config)
    if why_not is not None:
        raise ValueError(why_not)
    shared = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        # Read by releases before 5.0, and by vLLM and llama.cpp.
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
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
        "mamba_d_ssm": config.ssm_size,
        "mamba_n_heads": config.num_ssm_heads,
        "mamba_d_head": config.ssm_head_dim,
        "mamba_n_groups": config.ssm_groups,
        "mamba_d_state": config.ssm_state_size,
        "mamba_d_conv": config.ssm_conv_size,
        "mamba_chunk_size": config.ssm_chunk_size,
        "mamba_rms_norm": config.ssm_norm,
        "mamba_norm_before_gate": False,
        **{theirs: getattr(config, ours) for theirs, ours in _FALCON_FACTORS.items()},
        **{
            theirs: [getattr(config, field) for field in ours]
            for theirs, ours in _FALCON_FACTOR_LISTS.items()
        },
    }


def from_config(config: Mapping[str, Any]) -> ModelConfig:
    """Return the shape that a config.json describes; refuse what this model cannot express."""
    kind = config.get("model_type")
    if kind not in ("llama", "falcon_h1"):
        raise ValueError(
            f"a model of type {kind!r} cannot be read: this model is a Llama (llama) or a "
            "Falcon-H1 (falcon_h1)"
        )
    is_hybrid = kind == "falcon_h1"
    _refuse_inexpressible(config, is_hybrid)
    required = _REQUIRED + (_REQUIRED_FALCON if is_hybrid else ())
    missing = [field for field in required if config.get(field) is None]
    if missing:
        raise ValueError(f"config.json does not set {', '.join(missing)}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads = config["num_attention_heads"]
    # Where config.json is silent, each class has values of its own.
    norm_eps, kv_heads = (1e-5, 8) if is_hybrid else (1e-6, heads)
    shape: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "max_length": config.get("max_position_embeddings", 2048),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", kv_heads) or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        "intermediate_size": config["intermediate_size"],
        "norm_eps": config.get("rms_norm_eps", norm_eps),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "init_std": config.get("initializer_range", 0.02),
    }
    if is_hybrid:
        shape |= _ssm_shape(config)
    return ModelConfig(**shape)


def _refuse_inexpressible(config: Mapping[str, Any], is_hybrid: bool) -> None:
    """Raise a ValueError for a setting that this model has no counterpart for."""
    fixed = _FIXED | (_FIXED_FALCON if is_hybrid else {})
    for field, value in fixed.items():
        if config.get(field, value) != value:
            raise ValueError(f"config.json sets {field} to {config[field]!r}; only {value!r} works")
    for rope in (config.get("rope_parameters") or {}, config.get("rope_scaling") or {}):
        # "type" is what it was called at first.
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rotary positions of type {kind!r} are not supported")
    if not is_hybrid:
        return
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise ValueError("config.json normalizes before the gate; only the other order works")
    least, most = config.get("time_step_limit") or (0.0, math.inf)
    if least != 0 or _number(most) != math.inf:
        raise ValueError(
            f"config.json limits time steps to [{least}, {most}]; only steps without limits work"
        )


def _ssm_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state-space half of a Falcon-H1's shape."""
    size = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
    shape: dict[str, Any] = {
        "ssm_size": size,
        "ssm_head_dim": size // config["mamba_n_heads"],
        "ssm_state_size": config["mamba_d_state"],
        "ssm_groups": config.get("mamba_n_groups", 1),
        "ssm_conv_size": config.get("mamba_d_conv", 4),
        "ssm_chunk_size": config.get("mamba_chunk_size", 128),
        "ssm_norm": bool(config.get("mamba_rms_norm", False)),
    }
    for theirs, ours in _FALCON_FACTORS.items():
        factor = config.get(theirs)
        shape[ours] = 1.0 if factor is None else factor
    for theirs, ours in _FALCON_FACTOR_LISTS.items():
        values = config.get(theirs) or [1.0] * len(ours)
        shape |= dict(zip(ours, values, strict=True))
    return shape


def _number(value: Any) -> float:
    """Return a number as config.json may write it: JSON itself has no infinity."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


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
        for name, _ in factor_targets(field, config):
            if name not in state or (config.tie_embeddings and "embed_tokens" in name):
                raise ValueError(
                    f"{field} = {factor:g} cannot go into a tied embedding, and a Llama has no "
                    "place for it: train untied, or with the factor at 1"
                )
            state[name] = state[name] * factor
    return {_renamed(name): value for name, value in state.items()}


def from_state_dict(model: HybridLM, state: Mapping[str, Tensor]) -> None:
    """Load weights that have Hugging Face's names."""
    ours = {}
    for name in model.state_dict():
        theirs = name if model.config.has_ssm else _renamed(name)
        if name == "lm_head.weight" and model.config.tie_embeddings:
            # A head of its own that a file holds all the same is not what is used there either.
            theirs = "model.embed_tokens.weight"
        if theirs not in state:
            raise ValueError(f"the weights hold no {theirs}; is config.json that of this model?")
        ours[name] = state[theirs]
    known = {name if model.config.has_ssm else _renamed(name) for name in ours}
    extra = sorted(name for name in state if name not in known and "rotary_emb" not in name)
    if extra:
        raise ValueError(
            f"the weights hold {', '.join(extra[:3])}, which this model has no place for; is "
            "config.json that of this model?"
        )
    model.load_state_dict(ours)


def load(folder: Path) -> HybridLM:
    """Return the model in a Hugging Face folder: config.json and safetensors."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no model folder: it holds no config.json")
    config = from_config(json.loads(path.read_text(encoding="utf8")))
    state = {}
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            state |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    model = empty_model(config)
    from_state_dict(model, state)
    return model


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights; others of their kind may lie beside them."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values())
        # Names alone: an index has no business outside its folder.
        files = [folder / Path(name).name for name in sorted(names)]
    else:
        files = [whole]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{folder} holds no {', '.join(missing)}; other weight files are not read")
    return files


def _renamed(name: str) -> str:
    for pattern, replacement in _LLAMA_NAMES:
        name = re.sub(pattern, replacement, name)
    return name

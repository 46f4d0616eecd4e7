"""To Hugging Face and back: hybrids are `FalconH1ForCausalLM`, others `LlamaForCausalLM`.

Works on plain dictionaries (a config.json, a state dict), so nothing here needs transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, empty_model

ExportDtype = Literal["float32", "bfloat16", "float16"]

# What is called otherwise in a Llama; the rest of the names are the same.
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
# Those that have no default here.
_REQUIRED = tuple(_SETTINGS)[:5]
_REQUIRED_FALCON = ("mamba_n_heads", "mamba_d_state")


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
    heads = config["num_attention_heads"]
    # Where config.json is silent, each class has values of its own; the others are those of ours.
    fallback: dict[str, Any] = {
        "head_dim": config["hidden_size"] // heads,
        "num_kv_heads": 8 if is_hybrid and "num_key_value_heads" not in config else heads,
        "norm_eps": 1e-5 if is_hybrid else 1e-6,
    }
    names, given = _SETTINGS, dict(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or 1e4)
    if is_hybrid:
        names = names | _FALCON_SETTINGS
        size = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
        given |= {"mamba_d_ssm": size, "mamba_d_head": size // config["mamba_n_heads"]}
        for theirs, ours in _FALCON_LISTS.items():
            fallback.update(zip(ours, config.get(theirs) or [1.0] * len(ours), strict=True))
    shape = {ours: given[name] for name, ours in names.items() if given.get(name) is not None}
    return ModelConfig(**fallback | shape)


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
    # JSON itself has no infinity.
    limit = float(most["__float__"] if isinstance(most, Mapping) else most)
    if least != 0 or limit != math.inf:
        raise ValueError(
            f"config.json limits time steps to [{least}, {most}]; only steps without limits work"
        )


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


def from_state_dict(model: HybridLM, state: Mapping[str, Tensor]) -> None:
    """Load weights that have Hugging Face's names."""
    names = {name: _their_name(name, model.config) for name in model.state_dict()}
    known = set(names.values())
    if model.config.tie_embeddings:
        # A head of its own that a file holds all the same is not what is used there either.
        names["lm_head.weight"] = names["model.embed_tokens.weight"]
    for theirs in names.values():
        if theirs not in state:
            raise ValueError(f"the weights hold no {theirs}; is config.json that of this model?")
    extra = sorted(name for name in state if name not in known and "rotary_emb" not in name)
    if extra:
        raise ValueError(
            f"the weights hold {', '.join(extra[:3])}, which this model has no place for; is "
            "config.json that of this model?"
        )
    model.load_state_dict({ours: state[theirs] for ours, theirs in names.items()})


def load(folder: Path) -> HybridLM:
    """Return the model in a Hugging Face folder: config.json and safetensors."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no model folder: it holds no config.json")
    config = from_config(json.loads(path.read_text(encoding="utf8")))
    state = {}
    for file in _weight_files(folder):
        state |= load_file(file)
    model = empty_model(config)
    from_state_dict(model, state)
    return model


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights; others of their kind may lie beside them."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values())
    # Names alone: an index has no business outside its folder.
    files = [folder / Path(name).name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{folder} holds no {', '.join(missing)}; other weight files are not read")
    return files


def _their_name(name: str, config: ModelConfig) -> str:
    """Return what Hugging Face calls a parameter of ours."""
    for ours, theirs in _LLAMA_NAMES.items() if not config.has_ssm else ():
        name = name.replace(ours, theirs)
    return name

"""A small model of the same architecture, made from the model's own configuration.

Only this file knows the names that configurations give to their sizes; for other names, make a
small model by hand and pass that.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from learnable_multipliers._names import unwrap

# Sizes are small, and differ where they can, so that none is mistaken for another.
_HEAD_DIM = 6
_NUM_LAYERS = 2
_LAYERS = {"num_hidden_layers", "n_layer", "num_layers"}
_SIZES = {
    ("vocab_size",): 13,
    tuple(_LAYERS): _NUM_LAYERS,
    ("hidden_size", "n_embd", "d_model"): 8,
    ("head_dim",): _HEAD_DIM,
    ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"): 7,
    ("num_local_experts", "num_experts", "n_routed_experts"): 3,
    ("num_experts_per_tok",): 2,
    ("mamba_d_ssm", "ssm_size"): 15,
    ("mamba_n_heads",): 3,
    ("mamba_d_head", "ssm_head_dim"): 5,
    ("mamba_d_state", "ssm_state_size", "state_size"): 4,
    ("mamba_chunk_size", "ssm_chunk_size", "chunk_size"): 8,
}
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


def make_proxy(model: nn.Module) -> nn.Module:
    """Return a small model of the class and architecture of `model`, with random weights."""
    bare = unwrap(model)
    config = getattr(bare, "config", None)
    advice = (
        "make a small model of the same architecture yourself and pass it instead, or pass "
        "proxy=None to search the model itself"
    )
    if config is None:
        raise ValueError(f"{type(bare).__name__} has no config to make a proxy from: {advice}")
    problems = []
    for sizes in _candidates(config):
        try:
            with torch.random.fork_rng(devices=()):
                proxy = type(bare)(_changed(config, sizes))
        except Exception as error:  # Whatever a model's own checks raise.
            problems.append(f"{type(error).__name__}: {error}")
            continue
        return proxy.float()
    raise ValueError(
        f"no small proxy of {type(bare).__name__} could be made ({problems[-1]}): {advice}"
    )


def _candidates(config: Any) -> list[dict[str, Any]]:
    """Return sizes to try, the smallest first: some models tie their width to their heads."""
    sizes: dict[str, Any] = {
        name: size for names, size in _SIZES.items() for name in names if _present(config, name)
    }
    for name in _LAYERS & sizes.keys():
        # With more layers than the model, a plan for it would leave some without multipliers.
        sizes[name] = min(_NUM_LAYERS, getattr(config, name))
    heads = next((name for name in _HEADS if _present(config, name)), None)
    grouped = next((name for name in _KV_HEADS if _present(config, name)), None)
    if heads is not None:
        sizes[heads] = 3
        if grouped is not None:
            many, few = getattr(config, heads), getattr(config, grouped)
            kv_heads = 3 if few == many else 1 if few == 1 else 2
            sizes |= {grouped: kv_heads, heads: kv_heads if few == many else 3 * kv_heads}
    for name in ("layer_types", "layers_block_type"):
        # Some configurations compute the list from others and do not let it be set.
        if isinstance(vars(config).get(name), list):
            sizes[name] = list(getattr(config, name))[:_NUM_LAYERS]
    width = next((n for n in ("hidden_size", "n_embd", "d_model") if n in sizes), None)
    tries = [sizes]
    if width is not None and heads is not None:
        inner = sizes[heads] * _HEAD_DIM
        tries.append({**sizes, width: inner})
        expand = getattr(config, "expand", None)
        if isinstance(expand, int):
            tries.insert(0, {**sizes, width: inner // expand})
    return tries


def _present(config: Any, name: str) -> bool:
    """Whether a configuration has a size; one of 0 leaves its part out, and the proxy must too."""
    size = getattr(config, name, None)
    return isinstance(size, int) and size > 0


def _changed(config: Any, sizes: dict[str, Any]) -> Any:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **sizes)
    changed = copy.deepcopy(config)
    for name, size in sizes.items():
        setattr(changed, name, size)
    return changed

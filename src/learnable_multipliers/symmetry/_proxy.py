"""Choose what to search for symmetries: the model, or a small proxy if it is large.

A proxy is a small model of the same architecture, made from the model's own configuration. Only
this file knows the names that configurations give to their sizes; for other names, make a small
model by hand and pass that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._names import unwrap
from learnable_multipliers.roles import read_roles
from learnable_multipliers.symmetry._axes import layouts
from learnable_multipliers.symmetry._model_copy import ModelCopy, map_tensors, tensors_in
from learnable_multipliers.symmetry._null_space import null_space_symmetries
from learnable_multipliers.symmetry._symmetry import Symmetries
from learnable_multipliers.symmetry._transfer import copy_like, transfer

if TYPE_CHECKING:
    from learnable_multipliers._plan import Plan

# Time grows with the cube of the number of scales: half a minute on one core for these.
_MOST_SCALES = 1500

Proxy = nn.Module | tuple[nn.Module, Any] | Literal["auto"] | None

_ADVICE = (
    "make a small model of the same architecture yourself and pass it with inputs for it, "
    "proxy=(small, inputs), or pass proxy=None to search the model itself"
)

# Sizes are small, and different where possible, so that none is mistaken for another.
_VOCABULARY = 13
_HEAD_DIM = 6
_NUM_LAYERS = 2
_LAYERS = (
    *("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers"),
)
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_SIZES = {
    ("vocab_size",): _VOCABULARY,
    _WIDTHS: 8,
    ("head_dim", "d_kv"): _HEAD_DIM,
    ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "d_ff"): 7,
    ("encoder_ffn_dim", "decoder_ffn_dim"): 7,
    ("projection_dim",): 10,
    ("embed_dim",): 6,
    ("num_conv_pos_embedding_groups",): 2,
    ("num_local_experts", "num_experts", "n_routed_experts"): 3,
    ("num_experts_per_tok",): 2,
    ("mamba_d_ssm", "ssm_size"): 15,
    ("mamba_n_heads",): 3,
    ("mamba_d_head", "ssm_head_dim"): 5,
    ("mamba_d_state", "ssm_state_size", "state_size"): 4,
    ("mamba_chunk_size", "ssm_chunk_size", "chunk_size"): 8,
}
# One for each stage of a hierarchy.
_STAGES = {"depths": 1, "num_heads": 3}
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_SIDES = ("encoder_attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_SSM_GROUPS = ("mamba_n_groups", "ssm_groups")


def find_symmetries(
    model: nn.Module, plan: Plan | None, inputs: Any = None, *, proxy: Proxy = "auto"
) -> Symmetries:
    """Return every rescaling of a model's scales that leaves its outputs unchanged.

    The scales are the multipliers that `plan` puts on matrices (all rows and columns for None) and
    the entries of norm weights, biases and other vectors. `inputs` are the arguments of the forward
    pass: a tensor, a tuple or a dict of keyword arguments; random tokens for a language model if
    not given.

    A small model is searched itself, in float64; a large one through its `proxy`, a small model of
    the same class: made from the model's config ("auto"), or given, alone or as a pair with its own
    inputs. Without these it is run on random tokens if that is possible, else on `inputs`, with
    tokens wrapped around its small vocabulary. Each symmetry of the proxy is confirmed on the model
    before it is returned. None searches the model itself, whatever its size.
    """
    carried = None
    if plan is not None:
        carried = {entry.name: entry.matrix for entry in plan.entries if entry.matrix is not None}
    return search(model, inputs, carried, proxy)[0]


def search(
    model: nn.Module,
    inputs: Any = None,
    carried: Mapping[str, Matrix] | None = None,
    proxy: Proxy = "auto",
) -> tuple[Symmetries, ModelCopy, ModelCopy | None]:
    """Return a model's symmetries, the copy of it they were confirmed on, and that of its proxy."""
    if proxy == "auto":
        parameters = layouts(model, carried).values()
        scales = sum(layout.num_entries(axis.kind) for layout in parameters for axis in layout.axes)
        proxy = make_proxy(model) if scales > _MOST_SCALES else None
    if proxy is None:
        itself = ModelCopy(model, inputs, carried)
        return null_space_symmetries(itself), itself, None
    proxy, own_inputs = proxy if isinstance(proxy, tuple) else (proxy, None)
    on_proxy = None if carried is None else _fitted(carried, proxy)
    small = _proxy_copy(proxy, own_inputs, inputs, on_proxy)
    large = copy_like(small, model, inputs, carried)
    return transfer(null_space_symmetries(small), small, large), large, small


def _proxy_copy(
    proxy: nn.Module, own_inputs: Any, inputs: Any, carried: Mapping[str, Matrix] | None
) -> ModelCopy:
    """Return a copy of the proxy with its own inputs, or with inputs adapted from the model's.

    A language model runs on random tokens, which reach all of it; others on the given inputs.
    """
    if own_inputs is not None or inputs is None:
        return ModelCopy(proxy, own_inputs, carried)
    if not any(tensor.is_floating_point() for tensor in tensors_in(inputs)):
        try:
            return ModelCopy(proxy, None, carried)
        except Exception:  # The model needs more than tokens, for a decoder for instance.
            pass
    vocabulary = getattr(getattr(proxy, "config", None), "vocab_size", _VOCABULARY)
    try:
        wrapped = map_tensors(partial(_wrap_tokens, count=vocabulary), inputs)
        return ModelCopy(proxy, wrapped, carried)
    except Exception as error:  # Whatever the model raises.
        raise ValueError(
            f"a small {type(proxy).__name__} does not run on the inputs given "
            f"({type(error).__name__}: {error}): {_ADVICE}"
        ) from error


def _wrap_tokens(tensor: Tensor, count: int) -> Tensor:
    """Return a tensor of integers modulo `count`, except negative ones; others unchanged."""
    is_integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return torch.where(tensor >= count, tensor % count, tensor) if is_integer else tensor


def _fitted(carried: Mapping[str, Matrix], proxy: nn.Module) -> dict[str, Matrix]:
    """Return the same multipliers for the proxy's matrices."""
    on_proxy = {}
    for role in read_roles(proxy).parameters:
        matrix = carried.get(role.name)
        if matrix is None:
            continue
        sizes = [part.size for part in role.parts]
        heads = [part.head_dim for part in role.parts]
        if len(matrix.blocks) == 1:
            sizes = [role.shape[-1 if role.transposed else -2] // role.repeats]
            heads = heads[:1]
        if len(sizes) != len(matrix.blocks):
            raise ValueError(
                f"{role.name} has {len(matrix.blocks)} blocks in the plan, and {len(sizes)} in "
                "a small proxy of the model: pass proxy=None to search the model itself"
            )
        blocks = [
            # Heads are smaller here too.
            replace(block, size=size, head_dim=head_dim if block.per_head else None)
            for block, size, head_dim in zip(matrix.blocks, sizes, heads, strict=True)
        ]
        on_proxy[role.name] = replace(
            matrix, shape=role.shape, blocks=tuple(blocks), repeats=role.repeats
        )
    return on_proxy


def make_proxy(model: nn.Module) -> nn.Module:
    """Return a small model of the class and architecture of `model`, with random weights."""
    bare = unwrap(model)
    config = getattr(bare, "config", None)
    if config is None:
        raise ValueError(f"{type(bare).__name__} has no config to make a proxy from: {_ADVICE}")
    problems = []
    for sizes in _candidates(config):
        try:
            with torch.random.fork_rng(devices=()):
                return type(bare)(_changed(config, sizes)).float()
        except Exception as error:  # Whatever a model's own checks raise.
            problems.append(f"{type(error).__name__}: {error}")
    raise ValueError(
        f"no small proxy of {type(bare).__name__} could be made ({problems[-1]}): {_ADVICE}"
    )


def _candidates(config: Any) -> list[dict[str, Any]]:
    """Return configurations to try: some models tie their width to the size of their heads."""
    sizes: dict[str, Any] = {
        name: size for names, size in _SIZES.items() for name in names if _present(config, name)
    }
    for name in filter(partial(_present, config), _LAYERS):
        # With more layers than the model, a plan for it would leave some without multipliers.
        sizes[name] = min(_NUM_LAYERS, getattr(config, name))
    heads = _first_present(config, _HEADS)
    grouped = _first_present(config, _KV_HEADS)
    if heads:
        sizes[heads] = 3
    if heads and grouped:
        many, few = getattr(config, heads), getattr(config, grouped)
        kv_heads = 3 if few == many else 1 if few == 1 else 2
        sizes |= {grouped: kv_heads, heads: kv_heads if few == many else 3 * kv_heads}
    shared = _first_present(config, _SSM_GROUPS)
    if shared and getattr(config, shared) > 1:
        # Heads of the state-space mixer in groups, as those of attention.
        sizes[shared] = 2
        for name in {"mamba_n_heads", "mamba_d_ssm", "ssm_size"} & sizes.keys():
            sizes[name] *= 2
    for name in filter(partial(_present, config), _SIDES):
        sizes[name] = 3
    if isinstance(getattr(config, "depths", None), list | tuple):
        sizes |= {name: [size] * min(2, len(config.depths)) for name, size in _STAGES.items()}
    if isinstance(getattr(config, "conv_dim", None), list | tuple):
        sizes["conv_dim"] = [5] * len(config.conv_dim)
    if _present(config, "vocab_size"):
        # The ids of special tokens must be in the vocabulary.
        for name, token in vars(config).items():
            if name.endswith("_token_id") and isinstance(token, int) and token >= _VOCABULARY:
                sizes[name] = token % _VOCABULARY
    for name in ("layer_types", "layers_block_type"):
        # Some configurations compute the list from others and do not let it be set.
        if isinstance(vars(config).get(name), list):
            sizes[name] = list(getattr(config, name))[:_NUM_LAYERS]
    width = _first_present(config, _WIDTHS)
    heads = heads or _first_present(config, _SIDES)
    tries = [sizes]
    if width and heads:
        inner = sizes[heads] * _HEAD_DIM
        tries.append({**sizes, width: inner})
        expand = getattr(config, "expand", None)
        if isinstance(expand, int):
            tries.insert(0, {**sizes, width: inner // expand})
    # Models of several modalities have a configuration for each.
    inside = {k: v for k, v in vars(config).items() if hasattr(v, "to_dict")}
    for name, part in inside.items():
        options = _candidates(part)
        tries = [*tries, *(tries[-1:] * (len(options) - len(tries)))]
        tries = [
            {**sizes, name: options[min(i, len(options) - 1)]} for i, sizes in enumerate(tries)
        ]
    return tries


def _first_present(config: Any, names: Sequence[str]) -> str | None:
    return next(filter(partial(_present, config), names), None)


def _present(config: Any, name: str) -> bool:
    """Return whether a configuration has a size; 0 leaves a component out, as the proxy must."""
    size = getattr(config, name, None)
    return isinstance(size, int) and size > 0


def _changed(config: Any, sizes: dict[str, Any]) -> Any:
    inside = {k: _changed(getattr(config, k), v) for k, v in sizes.items() if isinstance(v, dict)}
    sizes = {**sizes, **inside}
    if is_dataclass(config) and not isinstance(config, type):
        return replace(config, **sizes)
    changed = copy.deepcopy(config)
    for name, size in sizes.items():
        setattr(changed, name, size)
    return changed

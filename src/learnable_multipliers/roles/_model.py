"""Read every parameter of a model: groups first, then single ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from learnable_multipliers._names import class_of, named_parameters, unwrap
from learnable_multipliers.roles._heads import find_heads, is_bare_position_table, is_position_table
from learnable_multipliers.roles._mixers import (
    SSM_VECTORS,
    attention,
    bert_layer,
    mamba2,
    torch_attention,
)
from learnable_multipliers.roles._mlp import experts, mlp, sequential_mlp
from learnable_multipliers.roles._norms import final_norm
from learnable_multipliers.roles._peft import ADAPTED, is_adapter
from learnable_multipliers.roles._tree import (
    UNKNOWN,
    ModelRoles,
    ParameterRole,
    Part,
    Site,
    Tree,
    is_conv1d,
    is_embedding,
    is_flat,
    is_linear,
    is_norm,
)

_RECOGNIZERS = (torch_attention, attention, bert_layer, mamba2, experts, mlp, sequential_mlp)
_ROUTERS = ("gate", "router", "wg", "gate_layer", "shared_expert_gate")
_BIAS_TABLE = re.compile(r"relative_(position|attention)_bias|(^|_)bias(es)?(_table|_[uv])?$")
_MAGNITUDE = "weight_norm's scales: multipliers already"
_DIRECTION = "weight_norm scales it already"


def read_roles(model: nn.Module) -> ModelRoles:
    """Return the roles of each parameter of `model`, by its name without wrappers."""
    model = unwrap(model)
    tree = Tree(model)
    heads = find_heads(tree)
    groups: dict[str, ParameterRole] = {}
    for name, module in tree.modules.items():
        for recognize in _RECOGNIZERS:
            for role in recognize(Site(name, module, tree)):
                groups.setdefault(role.name, role)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    parameters = []
    for parameter, (name, *aliases) in names.items():
        role = _merge_aliases([_read(tree, groups, heads, alias) for alias in (name, *aliases)])
        frozen = not parameter.requires_grad
        parameters.append(replace(role, aliases=tuple(aliases), frozen=frozen))
    return ModelRoles(tuple(parameters), tuple(tree.assumptions))


def _read(
    tree: Tree, groups: dict[str, ParameterRole], heads: set[str], name: str
) -> ParameterRole:
    """Return the role of a parameter under one of its names."""
    owner_name, _, leaf = name.rpartition(".")
    owner = tree.modules[owner_name]
    shape = tuple(owner.get_parameter(leaf).shape)
    if note := _weight_norm(owner, leaf):
        if note == _MAGNITUDE:
            return ParameterRole(name=name, shape=shape, note=note)
        return _whole(name, shape, UNKNOWN, note, opaque=True, reparametrized=True)
    if note := _vector(owner_name, owner, leaf, shape):
        return ParameterRole(name=name, shape=shape, note=note)
    if is_adapter(tree, name):
        return _whole(name, shape, "adapter", "adapter: a low-rank update", opaque=len(shape) != 2)
    if (adapted := name.replace(f".{ADAPTED}.", ".")) in groups:
        return replace(groups[adapted], name=name)
    if ".parametrizations." in f".{name}":
        note = "parametrized by other means"
        return _whole(name, shape, UNKNOWN, note, opaque=True, reparametrized=True)
    if is_embedding(owner):
        positions = is_position_table(owner_name, owner)
    else:
        positions = len(shape) == 2 and not is_linear(owner) and is_bare_position_table(leaf)
    if positions:
        return _whole(name, shape, "position-embedding", "rows are positions")
    if is_embedding(owner):
        return _whole(name, shape, "embedding", "rows are tokens")
    if _is_router(tree, owner_name):
        return _whole(name, shape, "router", "chooses experts")
    if is_linear(owner) and leaf == "weight":
        if owner_name in heads:
            note = "gives the logits"
            return _whole(name, shape, "head", note, column_norm=final_norm(tree))
        note = f"{class_of(owner).__name__} in no recognized group"
        if is_conv1d(owner):
            parts = (Part(UNKNOWN, shape[1]),)
            return ParameterRole(name=name, shape=shape, parts=parts, transposed=True, note=note)
        return _whole(name, shape, UNKNOWN, note)
    if len(shape) == 2:
        note = f"a bare parameter of {class_of(owner).__name__}, taken as (out, in)"
        return _whole(name, shape, UNKNOWN, note)
    what = "a convolution" if hasattr(owner, "kernel_size") else f"{len(shape)} unknown axes"
    return _whole(name, shape, UNKNOWN, what, opaque=True)


def _merge_aliases(seen: list[ParameterRole]) -> ParameterRole:
    """Merge the roles that a shared parameter has under each of its names."""
    first = seen[0]
    roles = {tuple(part.role for part in role.parts) for role in seen}
    if len(roles) == 1:
        return first
    if roles == {("embedding",), ("head",)}:
        part = Part("tied-embedding", first.shape[0])
        return replace(first, parts=(part,), note="one matrix is both embedding and head")
    names = " and ".join(sorted("/".join(role) for role in roles))
    parts = (Part(UNKNOWN, first.shape[0]),)
    return replace(first, parts=parts, repeats=1, note=f"shared by parameters named like {names}")


def _whole(name: str, shape: tuple[int, ...], role: str, note: str, **more: Any) -> ParameterRole:
    return ParameterRole(name=name, shape=shape, parts=(Part(role, shape[0]),), note=note, **more)


def _is_router(tree: Tree, name: str) -> bool:
    own, *holders = [*tree.lineage(name)][:3]
    names = [class_of(module).__name__ for module in (own, *holders[:1])]
    if any(re.search(r"(Router|Gating)$", class_name) for class_name in names):
        return True
    if not any(hasattr(holder, "experts") for holder in holders):
        return False
    return name.rpartition(".")[2] in _ROUTERS and not is_norm(own)


def _weight_norm(owner: nn.Module, leaf: str) -> str:
    """Return the role of a parameter in `weight_norm`, new or old form; empty if it has none."""
    names = {"weight_g": _MAGNITUDE, "weight_v": _DIRECTION}
    if isinstance(owner, ParametrizationList):
        is_normed = type(owner[0]).__name__ == "_WeightNorm"
        names = {"original0": _MAGNITUDE, "original1": _DIRECTION} if is_normed else {}
    elif not names.keys() <= owner._parameters.keys():
        return ""
    return names.get(leaf, "")


def _vector(owner_name: str, owner: nn.Module, leaf: str, shape: tuple[int, ...]) -> str:
    """Return why a parameter is a vector; empty if it is not."""
    if leaf.endswith("bias"):
        return "bias"
    if is_embedding(owner):
        is_bias = re.search(r"relative|bias", owner_name.rpartition(".")[2]) is not None
    else:
        is_bias = len(shape) > 1 and _BIAS_TABLE.search(leaf) is not None
    if is_bias:
        return "a table of attention biases"
    if is_norm(owner):
        return "norm: its weight scales what it feeds"
    if leaf in SSM_VECTORS:
        return "one value per head or channel"
    if isinstance(owner, nn.Conv1d) and owner.groups == owner.in_channels > 1:
        # More than a row multiplier: it mixes a few steps in time too (paper app. C).
        return "one filter per channel: a row multiplier with a short memory"
    is_layer = is_linear(owner) or is_embedding(owner)
    return "vector" if len(shape) < 2 or (not is_layer and is_flat(shape)) else ""

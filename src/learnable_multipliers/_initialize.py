"""Apply the initial values of a plan, and read the fixed multipliers of a model.

Falcon-H1 multiplies activations by constants from its config. Learned multipliers can start at
these values, and the constants become 1. This module knows where the constants are, which matrices
each of them scales, and how to reset it. Another model declares its own with a method
`fixed_multipliers()` that returns them with parameter names relative to its module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from learnable_multipliers._multiplier import by_block, effective, initial_values
from learnable_multipliers._names import (
    canonical_name,
    class_of,
    owner_of,
    unwrap,
    unwrap_module,
)
from learnable_multipliers._plan import Plan
from learnable_multipliers.roles import SSM_ROLES


@dataclass(frozen=True)
class FixedMultiplier:
    """One constant of a model's forward pass."""

    field: str
    """Its name in the model's config."""
    value: float
    targets: tuple[tuple[str, str], ...]
    """The logical matrices it scales: (parameter name, role)."""
    scales_bias: bool
    """True on a matrix's output; a constant on its input leaves the bias alone."""
    reset: Callable[[], None]
    """Set the constant to 1, in the modules and in the config."""


def fixed_multipliers(model: nn.Module) -> tuple[FixedMultiplier, ...]:
    """Return the known constants of `model` that are not 1."""
    multipliers: list[FixedMultiplier] = []
    for name, module in unwrap(model).named_modules():
        if module is not unwrap_module(module):
            # The attributes of what it wraps can be read from it, too.
            continue
        own: tuple[FixedMultiplier, ...] = ()
        if class_of(module).__name__ == "FalconH1ForCausalLM":
            own = _falcon_h1(module)
        elif hasattr(module, "fixed_multipliers"):
            own = cast("Any", module).fixed_multipliers()
        root = f"{canonical_name(name)}." if name else ""
        for multiplier in own:
            targets = tuple((f"{root}{path}", role) for path, role in multiplier.targets)
            multipliers.append(replace(multiplier, targets=targets))
    return tuple(multiplier for multiplier in multipliers if multiplier.value != 1.0)


@dataclass(frozen=True)
class _Constant:
    """One constant of Falcon-H1; paths are relative to a layer or to the model."""

    field: str
    """Name in the config."""
    path: str
    """Path of its attribute; paths that start with `model` are not in a layer."""
    targets: tuple[tuple[str, str], ...]
    scales_bias: bool = True
    index: int | None = None
    """Index in the config field, if that is a list."""


_EMBED, _HEAD = ("model.embed_tokens", "embedding"), ("lm_head", "head")
_Q, _K = ("self_attn.q_proj", "query"), ("self_attn.k_proj", "key")
_V, _O = ("self_attn.v_proj", "value"), ("self_attn.o_proj", "attention-out")
_GATE, _DOWN = ("feed_forward.gate_proj", "gate"), ("feed_forward.down_proj", "down")
_SSM_IN = tuple(("mamba.in_proj", role) for role in SSM_ROLES)
_SSM_OUT = ("mamba.out_proj", "ssm-out")
_FALCON_H1 = (
    _Constant("embedding_multiplier", "model.embedding_multiplier", (_EMBED,), False),
    _Constant("lm_head_multiplier", "model.lm_head_multiplier", (_HEAD,)),
    _Constant("attention_in_multiplier", "attention_in_multiplier", (_Q, _K, _V), False),
    _Constant("key_multiplier", "self_attn.key_multiplier", (_K,)),
    _Constant("attention_out_multiplier", "attn_out_multiplier", (_O,)),
    _Constant("ssm_in_multiplier", "mamba.ssm_in_multiplier", _SSM_IN, False),
    _Constant("ssm_out_multiplier", "ssm_out_multiplier", (_SSM_OUT,)),
    _Constant("mlp_multipliers", "feed_forward.gate_multiplier", (_GATE,), index=0),
    _Constant("mlp_multipliers", "feed_forward.down_multiplier", (_DOWN,), index=1),
    *(
        _Constant("ssm_multipliers", "mamba.mup_vector", (target,), index=index)
        for index, target in enumerate(_SSM_IN)
    ),
)


def _falcon_h1(model: Any) -> tuple[FixedMultiplier, ...]:
    """Read a Hugging Face `FalconH1ForCausalLM`."""
    layers = [f"model.layers.{i}." for i in range(len(model.model.layers))]
    multipliers = []
    for constant in _FALCON_H1:
        places = [""] if constant.path.startswith("model.") else layers
        label, value = constant.field, getattr(model.config, constant.field)
        if constant.index is not None:
            label, value = f"{label}[{constant.index}]", value[constant.index]
        targets = tuple(
            (f"{place}{path}.weight", role) for place in places for path, role in constant.targets
        )
        reset = partial(_reset, model, places, constant)
        multipliers.append(
            FixedMultiplier(label, float(value), targets, constant.scales_bias, reset)
        )
    return tuple(multipliers)


def _reset(model: Any, places: list[str], constant: _Constant) -> None:
    for place in places:
        holder_path, _, attribute = f"{place}{constant.path}".rpartition(".")
        holder = model.get_submodule(holder_path)
        if attribute == "mup_vector":
            # One constant for each block of rows: z, x, B, C, dt.
            inner, states = holder.intermediate_size, holder.groups_time_state_size
            sizes = [inner, inner, states, states, holder.num_heads]
            holder.mup_vector.split(sizes, -1)[constant.index].fill_(1.0)
        else:
            setattr(holder, attribute, 1.0)
    value: Any = 1.0
    if constant.index is not None:
        value = list(getattr(model.config, constant.field))
        value[constant.index] = 1.0
    setattr(model.config, constant.field, value)


@torch.no_grad()
def initialize_(model: nn.Module, plan: Plan) -> Plan:
    """Multiply the weights by the initial values that are pending; return the plan without them.

    If the values are the model's own fixed multipliers (`init="fold"`), those become 1 and the
    function is preserved. If they are numbers with `init_keeps="raw"`, the function changes, on
    purpose. Other weights do not change.
    """
    parameters = plan.resolve(model)
    fixed = {multiplier.field: multiplier for multiplier in fixed_multipliers(model)}
    for field, value in plan.folds:
        current = fixed[field].value if field in fixed else 1.0
        if current != value:
            raise ValueError(
                f"the plan folds {field} = {value:g}, but the model has {current:g}: was it folded "
                "already? Use the plan that initialize_ returned, or make a new one."
            )
    for entry in plan.entries:
        if entry.init_pending and entry.matrix is not None:
            weight = parameters[entry.name]
            values = initial_values(entry.matrix, dtype=torch.float64, device=weight.device)
            weight.copy_(effective(entry.matrix, weight.double(), values))
    for field, _ in plan.folds:
        _scale_biases(model, plan, fixed[field])
        fixed[field].reset()
    entries = tuple(replace(entry, init_pending=False) for entry in plan.entries)
    return replace(plan, entries=entries, folds=())


def _scale_biases(model: nn.Module, plan: Plan, multiplier: FixedMultiplier) -> None:
    """Multiply the biases that a folded output multiplier scaled too."""
    if not multiplier.scales_bias:
        return
    for name, role in multiplier.targets:
        bias, matrix = getattr(owner_of(model, name)[0], "bias", None), plan[name].matrix
        if isinstance(bias, nn.Parameter) and matrix is not None:
            factors = torch.ones(matrix.num_out, dtype=torch.float64)
            for block, rows in by_block(matrix, factors):
                if block.role == role:
                    rows.fill_(multiplier.value)
            bias.mul_(factors.to(bias))

"""Checks of parameter groups: their plan, parameters, names and settings."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from learnable_multipliers._plan import Plan
from learnable_multipliers._rules import as_number

SMALLEST_EPS = torch.finfo(torch.float32).tiny
"""Smallest allowed eps; GPUs flush smaller float32 numbers to 0."""
_SIZES = (
    *("lr", "weight_decay", "raw_lr_scale", "adamw_lr_scale"),
    *("multiplier_lr_scale", "multiplier_weight_decay"),
)


@functools.cache
def register_plan_check() -> None:
    """Check the groups of every optimizer at its steps; only these show which one uses them."""
    register_optimizer_step_pre_hook(_check_plan_is_used)


def _check_plan_is_used(optimizer: Optimizer, *_: Any) -> None:
    """Raise if another optimizer was given our groups: it ignores the plan."""
    # Our optimizers replace the plan in their groups by its fingerprint.
    plans = (group.get("plan") for group in optimizer.param_groups)
    if any(isinstance(plan, Plan) and plan.num_multipliers for plan in plans):
        raise RuntimeError(
            f"{type(optimizer).__name__} ignores the plan in the groups of lrm.param_groups, and "
            "would train without multipliers: use lrm.AdamW or lrm.Muon, wrap it with "
            f"lrm.LearnableMultipliers.from_model({type(optimizer).__name__}, model, ...), or call "
            "lrm.reparametrize(model, plan) before lrm.param_groups"
        )


def check_still_frozen(plan: Plan, present: Mapping[str, nn.Parameter]) -> None:
    """Raise if a matrix carries nothing only because it was frozen, and is trained now."""
    for entry in plan.entries if plan.placement != "none" else ():
        parameter = present.get(entry.name) if entry.matrix and entry.reason == "frozen" else None
        if parameter is not None and parameter.requires_grad:
            raise ValueError(
                f"{entry.name} was frozen when the plan was made, and would train without "
                "multipliers: make the plan again"
            )


def check_has_effect(name: str, value: Any, groups: Sequence[Any]) -> None:
    """Raise if an argument has no effect because every group of matrices overrides it."""
    own = [
        group[name]
        for group in groups
        if isinstance(group, dict) and name in group and group.get("kind") != "vector"
    ]
    others = [g for g in groups if not isinstance(g, dict) or g.get("kind") != "vector"]
    if own and len(own) == len(others) and all(one != value for one in own):
        raise ValueError(
            f"{name}={value} has no effect: the parameter groups carry {name}={own[0]}. Give it to "
            "lrm.param_groups or to the optimizer, not to both"
        )


def check_group_settings(group: Mapping[str, Any], beta1: float, beta2: float, eps: float) -> None:
    """Raise a ValueError for settings that cannot train: NaN or nonsense at the first step."""
    for name in _SIZES:
        value = group.get(name)
        if value is not None and not 0 <= as_number(name, value) < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value}")
    if group.get("maximize"):
        raise ValueError(
            "maximize is not supported, as multipliers would still minimize: train on the "
            "negative of the loss"
        )
    lr, decay = (float(group.get(name) or 0.0) for name in ("lr", "weight_decay"))
    raw_lr = lr * group.get("raw_lr_scale", 1.0)
    if raw_lr * decay >= 1:
        raise ValueError(
            f"lr times weight_decay is {raw_lr * decay:g}: one step would decay a weight to zero "
            "or flip its sign; lower one of them"
        )
    scale, pull = (group.get(n) or 0.0 for n in ("multiplier_lr_scale", "multiplier_weight_decay"))
    if lr * scale * pull >= 1:
        raise ValueError(
            f"lr times multiplier_lr_scale and multiplier_weight_decay is {lr * scale * pull:g}: "
            "one step would decay a multiplier to zero or flip its sign; lower one of them"
        )
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= as_number(name, beta) < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {beta}")
    if not SMALLEST_EPS <= as_number("eps", eps) < math.inf:
        raise ValueError(
            f"eps must be at least {SMALLEST_EPS:.2g}, got {eps}: below, it is 0 in float32, and "
            "what never had a gradient (a token that did not occur) becomes 0 / 0, which is NaN"
        )


def check_group_parameters(
    group: Mapping[str, Any], others: Sequence[Mapping[str, Any]], has_plan: bool
) -> None:
    """Raise a ValueError for parameters that would not be trained as expected."""
    taken = {name for other in others for name in other.get("param_names", ())}
    names = names_in(group)
    for name, parameter in zip(names, group["params"], strict=True):
        label = name or f"a parameter of shape {tuple(parameter.shape)}"
        if parameter.is_complex():
            raise ValueError(
                f"{label} is complex, which is not supported: train it as a real one "
                "(torch.view_as_real), or with an optimizer of torch"
            )
        if name in taken:
            raise ValueError(
                f"two parameters are called {name}: make one plan and one optimizer for a module "
                "that holds both models"
            )
        if not has_plan and parameter.ndim > 1:
            raise ValueError(
                f"{label} is in a group without a plan, and would train without multipliers: add "
                "lrm.param_groups(module, lrm.plan(module)), or make the optimizer again"
            )


def check_group_has_names(group: dict[str, Any]) -> None:
    """Raise where a group to be added has no names, by which plan and state know parameters."""
    params = group["params"]
    if isinstance(params, set):
        # torch raises for it.
        return
    # Looking at a generator uses it up.
    params = group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    if not group.get("param_names") and any(not isinstance(p, tuple) for p in params):
        raise ValueError(
            "a group of parameters without names cannot be added, as nothing says what carries "
            "multipliers: add the groups of lrm.param_groups(model, lrm.plan(model)), less the "
            "parameters that are trained already, or make the optimizer again"
        )


def names_in(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters; raise if there are more or fewer of them."""
    count, names = len(group["params"]), group.get("param_names")
    if not names:
        return [""] * count
    if len(names) != count:
        raise ValueError(
            f"a parameter group has {count} parameters and {len(names)} names in param_names: take "
            "a parameter out of both, or make the optimizer again"
        )
    return names

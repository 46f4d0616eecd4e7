"""Parameter groups around a wrapped optimizer: ours from its own, and its own from a plan."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from learnable_multipliers._names import check_type, named_parameters, unwrap
from learnable_multipliers._plan import Plan, check_is_plan
from learnable_multipliers.optim._group_checks import check_still_frozen
from learnable_multipliers.optim._groups import ddp_group_of, param_groups
from learnable_multipliers.optim._wrapped_settings import WRAPPED, own_settings


def check_can_be_wrapped(optimizer: Optimizer) -> None:
    """Raise if this is no optimizer, computes the loss in its step, or has no learning rate."""
    check_type(optimizer, Optimizer, "an optimizer of torch in front of model and plan")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"a step of {type(optimizer).__name__} computes the loss again for weights of its "
            "own, which are raw weights here and not the model's: wrap an optimizer whose step "
            "needs no closure"
        )
    if any("lr" in group and group["lr"] is None for group in optimizer.param_groups):
        raise ValueError(
            f"the lr of {type(optimizer).__name__} is None (relative steps), from which no rate "
            "follows for the multipliers: give it lr=... and relative_step=False"
        )


def planned_groups(optimizer: Optimizer, model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with names and plan; raise if it cannot carry the plan."""
    check_is_plan(plan)
    check_still_frozen(plan, plan.resolve(model))
    fixed = [e.name for e in plan.entries if e.train == "multipliers"]
    if fixed:
        raise ValueError(
            f"the plan fixes the raw weight of {fixed[0]}, which a wrapped optimizer would "
            "train: use lrm.AdamW"
        )
    special = [e.name for e in plan.entries if e.lr_scale != 1.0 or e.weight_decay is not None]
    if special:
        raise ValueError(
            f"the plan gives {special[0]} a learning rate or decay of its own; around another "
            "optimizer, say that in its parameter groups"
        )
    names = {parameter: name for name, parameter in named_parameters(model)}
    frozen = [(name, p) for p, name in names.items() if not p.requires_grad]
    shared = {"plan": plan, "frozen": frozen, "model": weakref.ref(unwrap(model))}
    shared |= {WRAPPED: type(optimizer).__name__, **ddp_group_of(model)}
    groups = []
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if p not in names]
        if unknown:
            raise ValueError(
                f"the optimizer holds a parameter of shape {unknown[0]} that is not the "
                "model's; build it from model.parameters()"
            )
        named = [(names[p], p) for p in group["params"]]
        groups.append({**own_settings(group), "params": named, **shared})
    return groups


def plain_groups(model: nn.Module, plan: Plan, lr: float | None) -> list[dict[str, Any]]:
    """Return groups for an optimizer of torch, with the rates and decays of a plan."""
    groups = []
    for group in param_groups(model, plan):
        own = {"params": group["params"]}
        if "weight_decay" in group:
            own["weight_decay"] = group["weight_decay"]
        if group["raw_lr_scale"] != 1.0:
            if lr is None:
                raise ValueError("a rule scales the learning rate: give lr=...")
            own["lr"] = lr * group["raw_lr_scale"]
        groups.append(own)
    return groups

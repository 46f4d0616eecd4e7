"""Parameter groups: matrices with decay, multipliers with a small one, vectors with none."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from learnable_multipliers._names import named_parameters, unwrap, unwrap_module
from learnable_multipliers._placement import Placement
from learnable_multipliers._plan import Plan, check_is_plan
from learnable_multipliers._planner import plan as make_plan
from learnable_multipliers._reparametrize import is_reparametrized
from learnable_multipliers._rules import Rule, Train
from learnable_multipliers.optim._group_checks import check_still_frozen, register_plan_check

WEIGHT_DECAY = 0.1
MULTIPLIER_WEIGHT_DECAY = 2e-3
"""Stops the drift along symmetries, and is too small to set the scale (paper sec. 4.1)."""


def param_groups(
    model: nn.Module,
    plan: Plan,
    *,
    weight_decay: float | None = None,
    lr: float | None = None,
    multiplier_lr_scale: float | None = None,
    multiplier_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer, with every trainable parameter in exactly one.

    For an unmodified model they carry the plan, for the optimizers of this library; settings that
    are not given here are the optimizer's. For a reparametrized model they suit any torch
    optimizer: raw matrices, their multipliers and vectors, each with its own decay (0.1, 2e-3 and
    none by default) and, if `lr` is given, its own learning rate. Groups hold (name, parameter)
    pairs.
    """
    explicit = is_reparametrized(model)
    check_is_plan(plan)
    present = dict(named_parameters(model))
    fixed = {e.name for e in plan.entries if e.train == "multipliers" and not e.carries}
    trained = {n: p for n, p in present.items() if p.requires_grad and n not in fixed}
    shared: dict[str, Any] = {}
    if explicit:
        weight_decay = WEIGHT_DECAY if weight_decay is None else weight_decay
        if multiplier_weight_decay is None:
            multiplier_weight_decay = MULTIPLIER_WEIGHT_DECAY
    else:
        _check_gradients(plan, present)
        frozen = [(n, p) for n, p in present.items() if n not in trained and n not in fixed]
        settings = {
            "multiplier_lr_scale": multiplier_lr_scale,
            "multiplier_weight_decay": multiplier_weight_decay,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        shared = {"plan": plan, "frozen": frozen, "model": weakref.ref(unwrap(model)), **given}
        shared |= ddp_group_of(model)
        plan.resolve(model)
        register_plan_check()
    plan.check_initialized()
    check_still_frozen(plan, present)
    # The plan's entries by the names their weights have in this model.
    entries = {
        _raw_name(entry.name) if explicit and entry.carries else entry.name: entry
        for entry in plan.entries
    }
    carrying = {entry.name for entry in plan.entries if entry.carries}
    _check_fit(plan, [name for name in entries if name not in present], "misses")

    groups: dict[tuple[Any, ...], dict[str, Any]] = {}

    def put(name: str, kind: str, decay: float | None, lr_scale: float, train: Train) -> None:
        own: dict[str, Any] = {} if decay is None else {"weight_decay": decay}
        if train == "multipliers" and not explicit:
            own["train"] = train
        group = groups.setdefault(
            (kind, decay, lr_scale, train),
            # Not `lr_scale`: loops of timm and MAE multiply the group's rate by such an entry.
            {"params": [], "kind": kind, "raw_lr_scale": lr_scale, **own, **shared},
        )
        group["params"].append((name, trained[name]))

    unplanned = []
    for name in trained:
        if _multiplier_owner(name) in carrying:
            scale = 1.0 if multiplier_lr_scale is None else multiplier_lr_scale
            put(name, "multiplier", multiplier_weight_decay, scale, "all")
        elif name in entries:
            entry = entries[name]
            default = 0.0 if entry.vector else weight_decay
            decay = default if entry.weight_decay is None else entry.weight_decay
            kind = "vector" if entry.vector else "matrix"
            put(name, kind, decay, entry.lr_scale, entry.train)
        else:
            unplanned.append(name)
    _check_fit(plan, unplanned, "has, beyond the plan,")
    return [_set_lr(group, lr, explicit) for group in groups.values()]


def _check_gradients(plan: Plan, present: dict[str, nn.Parameter]) -> None:
    """Raise if multipliers are to be learned from a gradient that is not computed."""
    for entry in plan.entries:
        needed = entry.carries and entry.train == "multipliers" and entry.name in present
        if needed and not present[entry.name].requires_grad:
            raise ValueError(
                f"the multipliers of {entry.name} are learned from its gradient: call "
                f"requires_grad_(True) on it; its raw weight stays fixed all the same"
            )


def _set_lr(group: dict[str, Any], lr: float | None, explicit: bool) -> dict[str, Any]:
    """Set and return a group's learning rate; raise where torch would ignore its scale."""
    if explicit:
        scale = group.pop("raw_lr_scale")
        if lr is not None:
            group["lr"] = lr * scale
        elif scale != 1.0:
            raise ValueError(
                f"{group['kind']} parameters train at {scale:g} times the learning rate: give "
                "param_groups the learning rate, lr=..., so that each group can carry its own"
            )
    elif lr is not None:
        # The same base rate for all groups, so that schedulers change them alike.
        group["lr"] = lr
    return group


def _check_fit(plan: Plan, names: list[str], has: str) -> None:
    """Raise for parameters that only the plan, or only the model, has."""
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(
            f"this plan, made for {plan.model}, does not fit the model, which {has} "
            f"{', '.join(names[:5])}{more}; make one with lrm.plan(model)"
        )


def _raw_name(name: str) -> str:
    """Return torch's name of the raw weight of a parametrization."""
    owner, _, leaf = name.rpartition(".")
    return ".".join(part for part in (owner, "parametrizations", leaf, "original") if part)


def _multiplier_owner(name: str) -> str | None:
    """Return the name of the matrix that a multiplier belongs to; None for other parameters."""
    parts = name.split(".")
    if len(parts) < 4 or parts[-4] != "parametrizations" or parts[-1] == "original":
        return None
    return ".".join([*parts[:-4], parts[-3]])


def plan_for(model: nn.Module, placement: Placement | Plan, rules: Sequence[Rule]) -> Plan:
    """Return the plan for the arguments of `from_model`."""
    if is_reparametrized(model):
        raise ValueError(
            "this model holds its multipliers itself (lrm.reparametrize): train it with an "
            "optimizer of torch on lrm.param_groups(model, plan), or call lrm.merge(model) first"
        )
    if not isinstance(placement, Plan):
        return make_plan(model, placement, rules)
    if rules:
        raise ValueError("rules are for making a plan, and a plan was given: give them to lrm.plan")
    return placement


def ddp_group_of(model: nn.Module) -> dict[str, Any]:
    """Return the process group of a DDP model as an entry of a parameter group; else nothing."""
    model = unwrap_module(model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return {"ddp_group": model.process_group}
    return {}


def joined_plan(plan: Plan, other: Plan) -> Plan:
    """Merge two plans; raise if they disagree.

    If a parameter was frozen when one plan was made, the entry of the other plan counts.
    """
    if plan == other:
        return plan
    entries = {entry.name: entry for entry in plan.entries}
    for entry in other.entries:
        if entries.setdefault(entry.name, entry).reason == "frozen":
            entries[entry.name] = entry
        elif entry.reason != "frozen" and entries[entry.name] != entry:
            raise ValueError(f"two plans for one optimizer differ at {entry.name}")
    return replace(plan, entries=tuple(entries.values()))

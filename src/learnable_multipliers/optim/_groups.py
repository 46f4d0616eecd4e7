"""Parameter groups: matrices with decay, multipliers with a small one, vectors with none."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from learnable_multipliers._names import named_parameters, unwrap
from learnable_multipliers._placement import Placement
from learnable_multipliers._plan import Plan, check_is_plan
from learnable_multipliers._planner import plan as make_plan
from learnable_multipliers._reparametrize import is_reparametrized
from learnable_multipliers._rules import Rule, Train, as_number

WEIGHT_DECAY = 0.1
MULTIPLIER_WEIGHT_DECAY = 2e-3
"""Stops the drift along symmetries, and is too small to set the scale (paper sec. 4.1)."""
SMALLEST_EPS = torch.finfo(torch.float32).tiny
"""Smallest allowed eps; GPUs flush smaller float32 numbers to 0."""
_SIZES = (
    *("lr", "weight_decay", "raw_lr_scale", "adamw_lr_scale"),
    *("multiplier_lr_scale", "multiplier_weight_decay"),
)


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
        _register_plan_check()
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


@functools.cache
def _register_plan_check() -> None:
    """Let every optimizer of the process check its groups; only a step tells who uses them."""
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


def check_settings(group: Mapping[str, Any], beta1: float, beta2: float, eps: float) -> None:
    """Raise a ValueError for settings that cannot train: NaN or nonsense at the first step."""
    for name in _SIZES:
        value = group.get(name)
        if value is not None and not 0 <= as_number(name, value) < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value}")
    if group.get("maximize"):
        raise ValueError(
            "maximize is not supported, as multipliers would go on minimizing: train on the "
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


def check_parameters(
    group: Mapping[str, Any], others: Sequence[Mapping[str, Any]], has_plan: bool
) -> None:
    """Raise a ValueError for parameters that would not be trained as expected."""
    taken = {name for other in others for name in other.get("param_names", ())}
    names = names_in(group)
    for name, parameter in zip(names, group["params"], strict=True):
        told = name or f"a parameter of shape {tuple(parameter.shape)}"
        if parameter.is_complex():
            raise ValueError(
                f"{told} is complex, which is not supported: train it as a real one "
                "(torch.view_as_real), or with an optimizer of torch"
            )
        if name in taken:
            raise ValueError(
                f"two parameters are called {name}: make one plan and one optimizer for a module "
                "that holds both models"
            )
        if not has_plan and parameter.ndim > 1:
            raise ValueError(
                f"{told} is in a group without a plan, and would train without multipliers: add "
                "lrm.param_groups(module, lrm.plan(module)), or make the optimizer again"
            )


def check_named(group: dict[str, Any]) -> None:
    """Raise where a group to be added has no names, by which plan and state know parameters."""
    params = group["params"]
    if isinstance(params, set):
        # Refused by torch.
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


def ddp_group_of(model: nn.Module) -> dict[str, Any]:
    """Return the process group of a DDP model as an entry of a parameter group; else nothing."""
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        if not hasattr(model, "_orig_mod"):
            return {}
        model = model.get_submodule("_orig_mod")
    return {"ddp_group": model.process_group}


def joined_plan(plan: Plan, other: Plan) -> Plan:
    """Merge two plans; raise if they disagree.

    If a parameter was frozen when one plan was made, the entry of the other plan counts.
    """
    if plan == other:
        return plan
    known = {entry.name: entry for entry in plan.entries}
    for entry in other.entries:
        if known.setdefault(entry.name, entry).reason == "frozen":
            known[entry.name] = entry
        elif entry.reason != "frozen" and known[entry.name] != entry:
            raise ValueError(f"two plans for one optimizer differ at {entry.name}")
    return replace(plan, entries=tuple(known.values()))

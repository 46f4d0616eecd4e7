"""From a config to a plan and an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from learnable_multipliers._initialize import initialize_
from learnable_multipliers._plan import Plan
from learnable_multipliers._planner import plan
from learnable_multipliers._rules import Rule
from learnable_multipliers.optim import AdamW, Muon, param_groups
from learnable_multipliers.pretrain.config import OptimizerConfig


def make_plan(model: nn.Module, config: OptimizerConfig) -> Plan:
    """Decide which multipliers each matrix carries; leaves the model alone."""
    rules = [Rule("", init="fold")] if config.multiplier_init == "fold" else []
    return plan(model, config.placement, rules)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> tuple[AdamW | Muon, Plan]:
    """Return the optimizer, and the plan it trains by; folds fixed factors where asked to."""
    planned = initialize_(model, make_plan(model, config))
    return optimizer_for(model, planned, config), planned


def optimizer_for(
    model: nn.Module, planned: Plan, config: OptimizerConfig, copies: Any = None
) -> AdamW | Muon:
    """Return the optimizer of a model that is planned and initialized, and spread over ranks.

    Args:
        copies: The group of ranks that hold plain copies of every parameter: they agree on steps to
            skip, and share Muon's work.
    """
    groups = param_groups(model, planned, weight_decay=config.weight_decay)
    shared: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "multiplier_lr_scale": config.multiplier_lr_scale,
        "multiplier_weight_decay": config.multiplier_weight_decay,
        "max_grad_norm": config.max_grad_norm or None,
        "process_group": copies,
    }
    if config.kind == "adamw":
        return AdamW(groups, **shared)
    shared |= {"momentum": config.momentum, "adamw_lr_scale": config.adamw_lr_scale}
    return Muon(groups, **shared)

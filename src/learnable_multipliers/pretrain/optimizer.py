"""From a config to a plan and an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from learnable_multipliers.initialize import initialize_
from learnable_multipliers.optim import AdamW, Muon, param_groups
from learnable_multipliers.plan import Plan
from learnable_multipliers.planner import plan
from learnable_multipliers.pretrain.config import OptimizerConfig
from learnable_multipliers.rules import Rule


def make_plan(model: nn.Module, config: OptimizerConfig) -> Plan:
    """Decide which multipliers each matrix carries; leaves the model alone."""
    if config.placement == "none":
        return plan(model, "full", [Rule("", "none")])
    rules = [Rule("", init="fold")] if config.multiplier_init == "fold" else []
    return plan(model, config.placement, rules)


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, copies: Any = None
) -> tuple[AdamW | Muon, Plan]:
    """Return the optimizer, and the plan it trains by; folds fixed factors where asked to.

    Args:
        copies: The group of ranks that hold plain copies of every parameter, and share the work.
    """
    planned = initialize_(model, make_plan(model, config))
    groups = param_groups(model, planned, weight_decay=config.weight_decay)
    shared: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "multiplier_lr_scale": config.multiplier_lr_scale,
        "multiplier_weight_decay": config.multiplier_weight_decay,
        "max_grad_norm": config.max_grad_norm or None,
    }
    if config.kind == "adamw":
        return AdamW(groups, **shared), planned
    shared |= {"momentum": config.momentum, "adamw_lr_scale": config.adamw_lr_scale}
    muon = Muon(groups, process_group=copies, **shared)
    return muon, planned

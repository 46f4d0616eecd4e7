"""Build what a config describes: the settings that data fill in, model, plan and optimizer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from learnable_multipliers._initialize import fixed_multipliers, initialize_
from learnable_multipliers._plan import Plan, PlanEntry
from learnable_multipliers._planner import plan
from learnable_multipliers.optim import AdamW, Muon, param_groups
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._muon import is_hidden
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from learnable_multipliers.pretrain.optimizer_config import OptimizerConfig
from learnable_multipliers.pretrain.rivals.catalogue import make_rival
from learnable_multipliers.pretrain.rules import parse_rules, read_rules
from learnable_multipliers.pretrain.trainer.device import Device

_VOCAB_MULTIPLE = 64
"""A vocabulary size taken from data is rounded up to this: an odd one doubles a GPU's time."""


def resolve_config(config: TrainConfig, data: TrainingData) -> TrainConfig:
    """Return a checked config with vocabulary size, name and the rules from files filled in."""
    if config.model.vocab_size == 0:
        vocab_size = math.ceil(data.manifest.vocab_size / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        model = replace(config.model, vocab_size=vocab_size)
        config = replace(config, model=model)
    config = replace(config, name=config.name or config.out.resolve().name)
    config.check()
    optimizer = replace(config.optimizer, rules=read_rules(config.optimizer.rules))
    return replace(config, optimizer=optimizer)


def build_model(config: TrainConfig, device: torch.device | str = "cpu") -> HybridLM:
    """Return the model with the weights of the run's seed, in the configured storage dtype."""
    model = build(config.model, config.seed, device)
    store_matrices_(model, config)
    return model


def store_matrices_(model: HybridLM, config: TrainConfig) -> None:
    """Store the matrices of a model's layers in the configured dtype."""
    dtype = getattr(torch, config.runtime.param_dtype)
    if dtype != torch.float32:
        # A sum over micro-batches in bfloat16 would lose small gradients.
        adds_up = config.data.micro_batch_sequences > 0
        model.store_matrices_(dtype, torch.float32 if adds_up else dtype)


def check_param_dtype(config: TrainConfig, device: Device, num_ranks: int) -> None:
    """Raise a ValueError if matrices cannot be stored in the configured dtype."""
    name = config.runtime.param_dtype
    if name == "float32":
        return
    if device.precision != name:
        raise ValueError(
            f"runtime.param_dtype is {name}, but matrix products are in {device.precision}: set "
            f"runtime.dtype to {name} as well, or runtime.param_dtype to float32"
        )
    if num_ranks > 1:
        raise ValueError(
            f"runtime.param_dtype={name} is for one process: {num_ranks} ranks would add up their "
            f"gradients in {name}. Set runtime.param_dtype=float32"
        )


def make_plan(model: nn.Module, config: OptimizerConfig) -> Plan:
    """Return the plan of a config for a model, which is not changed."""
    rules = parse_rules(config.rules)
    carries = config.placement != "none" or bool(rules)
    folds = config.multiplier_init == "fold" and carries and bool(fixed_multipliers(model))
    planned = plan(
        model,
        config.placement,
        rules,
        scale=config.multiplier_scale if carries else "linear",
        init="fold" if folds else "one",
    )
    planned = _with_factors(planned, config)
    _check_decays(planned, config)
    return planned


def _with_factors(planned: Plan, config: OptimizerConfig) -> Plan:
    """Return a plan with the config's factors on learning rates and decays by role."""
    lr, decay, norm = config.lr_factors, config.weight_decay_factors, config.norm_scale
    there = dict.fromkeys(role for entry in planned.entries for role in _roles(entry))
    for name, by_role in (
        ("lr_factors", lr),
        ("weight_decay_factors", decay),
        ("norm_scale", norm),
    ):
        if missing := [role for role in by_role if role not in there]:
            raise ValueError(
                f"optimizer.{name}: the model has no matrix of the role {missing[0]}; it has "
                f"{', '.join(there)}"
            )

    def scaled(entry: PlanEntry) -> PlanEntry:
        factors = {
            role: (
                lr.get(role, 1.0) * norm.get(role, 1.0),
                decay.get(role, 1.0) / norm.get(role, 1.0),
            )
            for role in _roles(entry)
        }
        if len(set(factors.values())) > 1:
            raise ValueError(
                f"{entry.name} is one stored matrix with one learning rate and one decay, so its "
                f"roles ({', '.join(factors)}) must all have the same optimizer.lr_factors, "
                "weight_decay_factors and norm_scale"
            )
        by_lr, by_decay = next(iter(factors.values()), (1.0, 1.0))
        own = config.weight_decay if entry.weight_decay is None else entry.weight_decay
        if by_decay != 1.0:
            entry = replace(entry, weight_decay=own * by_decay)
        return replace(entry, lr_scale=entry.lr_scale * by_lr)

    return replace(planned, entries=tuple(scaled(entry) for entry in planned.entries))


def _roles(entry: PlanEntry) -> list[str]:
    return [] if entry.matrix is None else [block.role for block in entry.matrix.blocks]


def _check_decays(planned: Plan, config: OptimizerConfig) -> None:
    """Raise a ValueError for a weight that one step would decay to zero or flip."""
    for entry in planned.entries:
        default = 0.0 if entry.vector else config.weight_decay
        decay = default if entry.weight_decay is None else entry.weight_decay
        side = 1.0 if is_hidden(entry.matrix) else config.rest_lr_scale
        try:
            config.check_group(entry.lr_scale * side, decay)
        except ValueError as error:
            raise ValueError(
                f"{entry.name}: {error}, or the factors of the rules and roles"
            ) from error


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> tuple[MultiplierOptimizer, Plan]:
    """Return the optimizer and its plan, after folding fixed factors if configured."""
    planned = initialize_(model, make_plan(model, config))
    return optimizer_for(model, planned, config), planned


def optimizer_for(
    model: nn.Module, planned: Plan, config: OptimizerConfig, replica_group: Any = None
) -> MultiplierOptimizer:
    """Return the optimizer of an initialized and parallelized model.

    Args:
        replica_group: The ranks that hold replicas of every parameter: they agree on steps to
            skip, and share Muon's work.
    """
    if config.variant != "none":
        return make_rival(model, planned, config, replica_group)
    groups = param_groups(model, planned, weight_decay=config.weight_decay)
    shared: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "multiplier_lr_scale": config.multiplier_ratio,
        "multiplier_weight_decay": config.multiplier_weight_decay,
        "max_grad_norm": config.max_grad_norm or None,
        "clip_multipliers": config.clip_multipliers,
        "process_group": replica_group,
    }
    if config.kind == "adamw":
        return AdamW(groups, **shared)
    shared |= {"momentum": config.momentum, "adamw_lr_scale": config.adamw_lr_scale}
    return Muon(groups, split=config.split, **shared)

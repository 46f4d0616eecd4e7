"""Registry of rival optimizers and their factory."""

from __future__ import annotations

from typing import Any

from torch import nn

from learnable_multipliers._names import named_parameters
from learnable_multipliers._plan import Plan, PlanEntry
from learnable_multipliers.optim import LearnableMultipliers
from learnable_multipliers.optim._muon import is_hidden
from learnable_multipliers.pretrain.optimizer_config import OptimizerConfig, Variant
from learnable_multipliers.pretrain.rivals.adamc import AdamC
from learnable_multipliers.pretrain.rivals.cautious import Cautious
from learnable_multipliers.pretrain.rivals.hyperball import Hyperball
from learnable_multipliers.pretrain.rivals.muown import Muown
from learnable_multipliers.pretrain.rivals.normuon import NorMuon
from learnable_multipliers.pretrain.rivals.rival import Rival
from learnable_multipliers.pretrain.rivals.sphere import Sphere

RIVALS: dict[Variant, type[Rival]] = {
    "cautious": Cautious,
    "adamc": AdamC,
    "hyperball": Hyperball,
    "sphere": Sphere,
    "normuon": NorMuon,
    "muown": Muown,
}


def make_rival(
    model: nn.Module, planned: Plan, config: OptimizerConfig, replica_group: Any = None
) -> LearnableMultipliers:
    """Return the rival that a config names; it trains the raw weights of what carries multipliers.

    Args:
        replica_group: The ranks that hold replicas of every parameter.
    """
    entries = {entry.name: entry for entry in planned.entries}
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named_parameters(model):
        if not parameter.requires_grad:
            continue
        role = _role(entries[name])
        decay = 0.0 if role == "vector" else config.weight_decay
        group = {"params": [], "role": role, "weight_decay": decay}
        groups.setdefault(role, group)["params"].append(parameter)
    rival = RIVALS[config.variant](
        groups.values(),
        kind=config.kind,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        momentum=config.momentum,
        adamw_lr_scale=config.adamw_lr_scale,
    )
    return LearnableMultipliers(
        rival,
        model,
        planned,
        multiplier_betas=config.betas,
        multiplier_eps=config.eps,
        multiplier_lr_scale=config.multiplier_ratio,
        multiplier_weight_decay=config.multiplier_weight_decay,
        max_grad_norm=config.max_grad_norm or None,
        clip_multipliers=config.clip_multipliers,
        process_group=replica_group,
    )


def _role(entry: PlanEntry) -> str:
    """Return what a rival takes a parameter for; raise for what it cannot train as planned."""
    if entry.lr_scale != 1.0 or entry.weight_decay is not None or entry.train != "all":
        raise ValueError(
            f"{entry.name} has a learning rate, a decay or a part to train of its own, which "
            "optimizer.variant does not know: leave such rules and factors out, or set it to none"
        )
    if entry.vector or entry.matrix is None:
        return "vector"
    if not is_hidden(entry.matrix):
        return "head" if entry.matrix.blocks[0].role == "head" else "other"
    if len(entry.matrix.blocks) > 1 or len(entry.matrix.shape) != 2:
        raise ValueError(
            f"{entry.name} is several matrices in one, which optimizer.variant would train as a "
            "single one: train a model without a mixer, or set it to none"
        )
    return "hidden"

"""Parameter groups and optimizers."""

from learnable_multipliers.optim.adamw import AdamW
from learnable_multipliers.optim.clipping import clip_grad_norm_
from learnable_multipliers.optim.groups import param_groups
from learnable_multipliers.optim.learned import multipliers, raw_weights
from learnable_multipliers.optim.muon import Muon
from learnable_multipliers.optim.wrapper import LearnableMultipliers

__all__ = [
    "AdamW",
    "LearnableMultipliers",
    "Muon",
    "clip_grad_norm_",
    "multipliers",
    "param_groups",
    "raw_weights",
]

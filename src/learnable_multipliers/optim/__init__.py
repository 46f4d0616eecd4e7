"""Parameter groups and optimizers."""

from learnable_multipliers.optim._accessors import clip_grad_norm_, multipliers, raw_weights, unwrap
from learnable_multipliers.optim._adamw import AdamW
from learnable_multipliers.optim._groups import param_groups
from learnable_multipliers.optim._muon import Muon
from learnable_multipliers.optim._wrapper import LearnableMultipliers

__all__ = [
    "AdamW",
    "LearnableMultipliers",
    "Muon",
    "clip_grad_norm_",
    "multipliers",
    "param_groups",
    "raw_weights",
    "unwrap",
]

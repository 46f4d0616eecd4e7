"""Parameter groups and optimizers.

`_groups` puts the parameters of a plan into groups. `_owner` keeps raw weights and multipliers in
the optimizer's state; a `_binding` holds them in the form that kernels take. `_base` takes a step
with it, and `_adamw`, `_muon` and `_wrapper` differ in how they update raw weights. Muon collects
whole matrices in `_batches`, or over ranks in `_distributed_batches`.
"""

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

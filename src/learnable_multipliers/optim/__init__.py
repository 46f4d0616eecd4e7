"""Parameter groups and optimizers."""

from learnable_multipliers.optim.adamw import AdamW
from learnable_multipliers.optim.clipping import clip_grad_norm_
from learnable_multipliers.optim.groups import param_groups

__all__ = ["AdamW", "clip_grad_norm_", "param_groups"]

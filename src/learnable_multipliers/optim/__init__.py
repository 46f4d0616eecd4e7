"""Parameter groups and optimizers."""

from learnable_multipliers.optim.groups import param_groups

__all__ = ["param_groups"]

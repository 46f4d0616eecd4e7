"""What each matrix of a model does, read off the model object alone.

A role is given only on evidence: a module type, the names and matching shapes of a whole group
(q, k, v and their output; gate, up and down), or a fused layout listed in `fused.py`. What has
none is `unknown`. Where a norm sits cannot be seen in a module tree; what is taken for granted
about it is returned as `assumptions`, in words.
"""

from learnable_multipliers.roles._model import read_roles
from learnable_multipliers.roles._reading import ROLES, UNKNOWN, ModelReading, Part, Reading

__all__ = ["ROLES", "UNKNOWN", "ModelReading", "Part", "Reading", "read_roles"]

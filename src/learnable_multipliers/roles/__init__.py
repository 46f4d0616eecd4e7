"""What each matrix of a model does, read off the model object alone.

A role is given only on evidence: a module type, the names and matching shapes of a whole group
(q, k, v and their output; gate, up and down), or a fused layout listed in `_fused.py`. All
else is `unknown`. A module tree does not show where a norm sits in the computation; what is assumed
about that is returned as `assumptions`, in words.
"""

from learnable_multipliers.roles._fused import QKV
from learnable_multipliers.roles._model import read_roles
from learnable_multipliers.roles._tree import (
    ROLES,
    UNKNOWN,
    ModelRoles,
    ParameterRole,
    Part,
    check_role,
)

__all__ = [
    "QKV",
    "ROLES",
    "UNKNOWN",
    "ModelRoles",
    "ParameterRole",
    "Part",
    "check_role",
    "read_roles",
]

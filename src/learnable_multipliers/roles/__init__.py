"""Read the role of each matrix from a model object.

A role needs evidence: a module type, the names and matching shapes of a whole group
(q, k, v and their output; gate, up and down), or a fused layout listed in `_fused.py`. Any
other matrix is `unknown`. A module tree does not show where a norm is in the computation;
assumptions about that are returned as `assumptions`, in words.
"""

from learnable_multipliers.roles._fused import QKV
from learnable_multipliers.roles._model import read_roles
from learnable_multipliers.roles._tree import (
    ROLES,
    SSM_ROLES,
    UNKNOWN,
    ModelRoles,
    ParameterRole,
    Part,
    check_role,
)

__all__ = [
    "QKV",
    "ROLES",
    "SSM_ROLES",
    "UNKNOWN",
    "ModelRoles",
    "ParameterRole",
    "Part",
    "check_role",
    "read_roles",
]

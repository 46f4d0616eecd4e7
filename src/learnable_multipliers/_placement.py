"""The multipliers of a logical matrix under each placement, with reasons.

`full` is what the paper trains: row and column everywhere but on the head, with the redundancy
limited by a small decay of the multipliers (sec. 4.1). `symmetry-aware` is its appendix
"Multipliers placement", extended to norms that the paper's model does not have: each scale that the
model can express has one multiplier. `scalar` is one number per logical matrix, `none` a plain run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import torch

from learnable_multipliers._multiplier import Kind
from learnable_multipliers.roles import UNKNOWN, ParameterRole, Part
from learnable_multipliers.symmetry._derived_placement import Carried

Placement = Literal["full", "symmetry-aware", "scalar", "none"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

# Roles whose multipliers, if any, do not depend on symmetries in any placement.
_WITHOUT = {"head", "router", "adapter", "tied-embedding"}
_KINDS: dict[tuple[bool, bool], Kind] = {
    (False, False): "none",
    (True, False): "row",
    (False, True): "col",
    (True, True): "row+col",
}
# Reasons of the symmetry-aware placement, by role.
_ROWS_LEFT_OUT = {
    "key": "rows pair with the query's, which has one scale per head",
    "value": "rows pair with the columns of attention-out, one scale per head",
    "up": "rows pair with the columns of down",
    **dict.fromkeys(("ssm-x", "ssm-B", "ssm-C"), "conv1d scales its rows"),
    **dict.fromkeys(
        ("query-latent", "kv-latent"),
        "rows pair with the columns of the matrix that reads the latent",
    ),
}
_ROWS = {
    "query": "rows: attention scale of each head",
    **dict.fromkeys(("gate", "ungated-up", "ssm-z"), "rows meet the activation"),
    "ssm-dt": "rows meet the softplus",
    "embedding": "rows: one scale per token",
    "position-embedding": "rows: one scale per position",
}
_COLUMNS = {
    "attention-out": "columns: one scale per value channel of each head",
    "down": "columns: one scale per hidden channel",
    "ssm-out": "columns: no inner norm scales them",
    **dict.fromkeys(("embedding", "position-embedding"), "columns: one scale per feature"),
}


class Choice(NamedTuple):
    """The multipliers of a logical matrix, and the reasons in words."""

    kind: Kind
    reason: str
    columns: str = ""
    """Reason for columns, if it is a separate one."""


def choose(placement: Placement, parameter: ParameterRole, part: Part) -> Choice | None:
    """Return the placement's choice for one logical matrix; None if a rule must decide."""
    if parameter.opaque:
        return Choice("none", parameter.note)
    if placement == "none":
        return Choice("none", "no multipliers")
    if part.role == "head":
        columns = "left as it is (no learnable norm in front: a rule can add columns)"
        if parameter.column_norm:
            columns = f"{_leaf(parameter.column_norm)} scales its columns"
        return Choice("none", f"{columns}; rows would scale single logits")
    if part.role == "adapter":
        return Choice("none", parameter.note)
    if part.role == "router":
        return Choice("none", "routing is left as it is in every placement")
    if placement == "scalar":
        return Choice("scalar", parameter.note if part.role == UNKNOWN else "one scale per matrix")
    if part.role == "tied-embedding":
        return Choice("col", "tied to the head: row multipliers would scale single logits")
    if placement == "full":
        return Choice("row+col", parameter.note)
    if part.role == UNKNOWN:
        return None
    row, row_reason = _symmetry_aware_row(parameter, part)
    col, col_reason = _symmetry_aware_col(parameter, part)
    return Choice(_KINDS[row, col], row_reason, col_reason)


def derived_choices(
    parameter: ParameterRole, carried: Carried
) -> tuple[ParameterRole, dict[int, Choice]]:
    """Return a matrix with its parts, and the choices that follow from symmetries for each part.

    Parts without multipliers in any placement, heads and routers, are left to `choose`. If rows do
    not agree within the known parts, parts are made from the rows.
    """
    pattern = carried.rows.view(parameter.repeats, -1)
    sizes = [part.size for part in parameter.parts]
    parts = pattern.split(sizes, 1) if sum(sizes) == pattern.shape[1] else ()
    if not parts or not all((part == part[0, 0]).all() for part in parts):
        # Runs of rows that either all carry a multiplier, or all do not.
        runs = torch.unique_consecutive(carried.rows, return_counts=True)[1].tolist()
        unknown = tuple(Part(UNKNOWN, size) for size in runs)
        parameter = replace(parameter, parts=unknown, repeats=1, opaque=False)
        parts = carried.rows[None].split(runs, 1)
    return parameter, {
        index: Choice(_KINDS[bool(rows[0, 0]), carried.col], carried.reason)
        for index, (part, rows) in enumerate(zip(parameter.parts, parts, strict=True))
        if part.role not in _WITHOUT
    }


def _symmetry_aware_row(parameter: ParameterRole, part: Part) -> tuple[bool, str]:
    """Decide on rows: not where another scale follows on the same features."""
    if part.row_norm:
        return False, f"{_leaf(part.row_norm)} behind it scales its rows"
    if part.normalized:
        return True, "rows: one scale per channel (the norm behind it has no trained weight)"
    if part.role in _ROWS_LEFT_OUT:
        return False, _ROWS_LEFT_OUT[part.role]
    if part.role in ("gate", "ungated-up") and parameter.homogeneous:
        return False, "a scale passes its activation and pairs with the columns of down"
    return True, _ROWS.get(part.role, "rows: scale of the block's output")


def _symmetry_aware_col(parameter: ParameterRole, part: Part) -> tuple[bool, str]:
    """Decide on columns: not where a learnable norm feeds the same features."""
    if parameter.column_norm:
        return False, f"{_leaf(parameter.column_norm)} in front scales its columns"
    return True, _COLUMNS.get(part.role, "columns: no norm in front")


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]

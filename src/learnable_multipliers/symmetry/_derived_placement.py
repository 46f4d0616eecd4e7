"""Derive a placement from the symmetries: one multiplier per scale.

Which of two redundant scales is dropped is a convention. The conventions, in order:

1. Rows that scale single outputs of the model (those of a head) carry nothing.
2. If one side of a symmetry consists of scales that the model has anyway (a norm's weight, a
   convolution), these stay, and the matrices on the other side carry nothing there.
3. Otherwise the side with more entries stays, being more expressive: queries that share a key,
   columns that share a value.
4. Between equal sides, columns stay and rows are dropped; of two rows, those of the earlier matrix
   stay.

Exchanges and normalization symmetries remove nothing: both rows and columns of a matrix are needed,
and so is the scale of a matrix that writes to a residual stream. The plan lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from learnable_multipliers.symmetry._axes import Axis, ParameterLayout
from learnable_multipliers.symmetry._model_copy import ModelCopy
from learnable_multipliers.symmetry._proxy import Proxy, search
from learnable_multipliers.symmetry._symmetry import Symmetries, Term
from learnable_multipliers.symmetry._transfer import namesakes


@dataclass(frozen=True)
class Carried:
    """The multipliers that one matrix is to carry, and why others are left out."""

    rows: Tensor
    """Which of its rows, as in one matrix of a stack."""
    col: bool
    reason: str


def derived_placement(
    model: nn.Module, inputs: Any, proxy: Proxy
) -> tuple[dict[str, Carried], tuple[str, ...]]:
    """Return the multipliers of every matrix of a model, computed from its symmetries.

    Also return the symmetries of its proxy that were not confirmed: they remove nothing.
    """
    symmetries, itself, small = search(model, inputs, proxy=proxy)
    heads = _heads(itself if small is None else small)
    if small is not None:
        heads = namesakes(heads, itself.parameters)
    return _placement(itself, symmetries, heads), symmetries.unconfirmed


def _heads(model: ModelCopy) -> list[str]:
    """Return the matrices whose rows scale single outputs of the model."""
    rows = [Axis(name, "row") for name, layout in model.layouts.items() if layout.is_matrix]
    return [axis.name for axis in rows if model.scales_single_outputs(axis)]


def _placement(
    model: ModelCopy, symmetries: Symmetries, heads: Sequence[str]
) -> dict[str, Carried]:
    """Return the multipliers of every matrix, by parameter name, given all symmetries."""
    kept = {
        axis: torch.ones(model.num_entries(axis), dtype=torch.bool)
        for axis in model.axes
        if model.layouts[axis.name].is_matrix
    }
    reasons: dict[str, list[str]] = {axis.name: [] for axis in kept}
    for name in heads:
        kept[Axis(name, "row")][:] = False
        reasons[name].append("rows would scale single outputs")
    for symmetry in symmetries:
        if symmetry.kind != "multiplicative":
            continue
        stays, goes = _sides(symmetry.terms, kept)
        for term in goes:
            if term.axis in kept:
                kept[term.axis][term.members >= 0] = False
                against = ", ".join(str(other.axis) for other in stays)
                side = {"row": "rows", "col": "columns"}[term.axis.kind]
                side += "" if term.block is None else f" {term.block}"
                reasons[term.axis.name].append(f"{side} go with {against}")
    return {
        name: Carried(
            rows=_in_one_matrix(model.layouts[name], kept[Axis(name, "row")]),
            col=bool(kept[Axis(name, "col")].all()),
            reason="; ".join(reasons[name]) or "no other scale does the same",
        )
        for name in reasons
    }


def _sides(terms: Sequence[Term], matrices: dict[Axis, Tensor]) -> tuple[list[Term], list[Term]]:
    """Return the terms of a symmetry that stay, and those that are dropped."""
    sides = [[t for t in terms if t.power > 0], [t for t in terms if t.power < 0]]
    sides = [[t for t in side if t.axis in matrices] or side for side in sides]
    order = {axis: place for place, axis in enumerate(matrices)}

    def rank(side: list[Term]) -> tuple[bool, int, bool, int, int]:
        native = all(t.axis not in matrices for t in side)
        entries = max(int((t.members >= 0).sum()) for t in side)
        columns = all(t.axis.kind == "col" for t in side)
        first, entry = min(
            (order.get(t.axis, 0), int((t.members >= 0).int().argmax())) for t in side
        )
        return native, entries, columns, -first, -entry

    goes, stays = sorted(sides, key=rank)
    return stays, goes


def _in_one_matrix(layout: ParameterLayout, rows: Tensor) -> Tensor:
    """Return the rows of one matrix of a stack, whose matrices must all be alike."""
    by_matrix = rows.view(-1, layout.shape[layout.dimensions("row")[-1]])
    if not (by_matrix == by_matrix[0]).all():
        raise ValueError(f"the matrices of the stack {layout.name} differ in their symmetries")
    return by_matrix[0]

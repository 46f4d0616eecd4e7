"""Symmetries as JSON data, and back without loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.symmetry._axes import Axis
from learnable_multipliers.symmetry._symmetry import Symmetries, Symmetry, Term


def to_json_data(symmetries: Symmetries) -> dict[str, Any]:
    """Return symmetries as JSON data, without loss: `from_json_data` returns equal ones."""
    return {
        "found": [
            {
                "kind": symmetry.kind,
                "num_members": symmetry.num_members,
                "terms": [
                    {"axis": list(term.axis), "power": term.power, "members": _runs(term.members)}
                    for term in symmetry.terms
                ],
            }
            for symmetry in symmetries
        ],
        "nullity": symmetries.nullity,
        "silent": [[*axis, count] for axis, count in symmetries.silent.items()],
        "unconfirmed": list(symmetries.unconfirmed),
    }


def from_json_data(content: Mapping[str, Any]) -> Symmetries:
    """Return the symmetries in the output of `to_json_data`."""
    return Symmetries(
        found=tuple(
            Symmetry(
                kind=symmetry["kind"],
                terms=tuple(
                    Term(Axis(*term["axis"]), term["power"], _members(term["members"]))
                    for term in symmetry["terms"]
                ),
                num_members=symmetry["num_members"],
            )
            for symmetry in content["found"]
        ),
        nullity=content["nullity"],
        silent={Axis(name, kind): count for name, kind, count in content["silent"]},
        unconfirmed=tuple(content["unconfirmed"]),
    )


def _runs(members: Tensor) -> list[list[int]]:
    """Return numbers as evenly spaced runs of (first, step, length).

    Members are channels in order, heads or whole matrices: a few runs instead of megabytes of
    numbers.
    """
    runs: list[list[int]] = []
    for member in members.tolist():
        if runs and runs[-1][2] == 1:
            runs[-1] = [runs[-1][0], member - runs[-1][0], 2]
        elif runs and member == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([member, 0, 1])
    return runs


def _members(runs: Iterable[Sequence[int]]) -> Tensor:
    parts = [first + step * torch.arange(length) for first, step, length in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

"""The search for all symmetries of a probed model, whatever its architecture is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from learnable_multipliers.symmetry._axes import Axis
from learnable_multipliers.symmetry._families import (
    Columns,
    candidate_groups,
    constant_vectors,
    entries_alike,
    extend_basis,
    null_vectors,
    reduce_columns,
    reduced_along,
    whole_axes,
)
from learnable_multipliers.symmetry._probe import Probe
from learnable_multipliers.symmetry._symmetry import Kind, Symmetries, Symmetry, Term

# Powers are small integers; what differs by this much is another power.
_POWER_TOLERANCE = 1e-5
# The smallest power need not be 1: a scale squared trades with another cubed.
_LARGEST_SMALLEST_POWER = 4
# Outputs of a rescaled copy in float64 may differ by rounding alone.
_UNCHANGED = 1e-8


def search(probe: Probe) -> Symmetries:
    """Return the symmetries of a probed model, each verified, complete by rank."""
    columns = reduce_columns(
        {axis: probe.num_entries(axis) for axis in probe.axes}, *probe.jacobian()
    )
    search = _Search(probe, columns)
    search.exchanges()
    search.alone()
    groups = [] if search.complete else candidate_groups(columns)
    for group in _many_members_first(columns, groups):
        search.group(group)
        if search.complete:
            break
    search.constants(whole_axes)
    search.constants(entries_alike)
    if not search.complete:
        raise ValueError(
            f"{columns.nullity - len(search.known)} of {columns.nullity} rescalings without "
            "effect could not be written as symmetries of axes; please report the model"
        )
    for symmetry in search.found:
        change = _change(probe, symmetry)
        if change > _UNCHANGED:
            raise ValueError(
                f"rescaling along '{symmetry}' changed the outputs by {change:.1e}: the model's "
                "forward pass is not a function of its parameters alone, or please report it"
            )
    silent = {
        axis: int(count)
        for axis, mask in columns.silent.items()
        if (count := (mask & ~probe.absent(axis)).sum())
    }
    return Symmetries(tuple(search.found), columns.nullity, silent)


class _Search:
    """Symmetries found so far, and the directions they span."""

    def __init__(self, probe: Probe, columns: Columns):
        self.probe = probe
        self.columns = columns
        self.found: list[Symmetry] = []
        self.known = columns.basis.new_zeros(0, columns.basis.shape[1])

    @property
    def complete(self) -> bool:
        """Whether the symmetries found span the null space."""
        return len(self.known) == self.columns.nullity

    def exchanges(self) -> None:
        """Take the row and column scales of each matrix, which always trade."""
        for axis in self.columns.axes:
            other = Axis(axis.name, "col")
            if axis.kind != "row" or other not in self.columns.axes:
                continue
            if self.probe.absent(axis).any():
                continue
            layout = self.probe.layouts[axis.name]
            matrices = math.prod(self.probe.parameters[axis.name].shape[: layout.stack])
            vectors = self.columns.basis.new_zeros(matrices, self.columns.basis.shape[1])
            for side, power in ((axis, 1.0), (other, -1.0)):
                where = self.columns.axes[side]
                entries = (where.stop - where.start) // matrices
                for matrix in range(matrices):
                    start = where.start + matrix * entries
                    vectors[matrix, start : start + entries] = power
                vectors[:, where] *= ~self.columns.silent[side]
            # Nothing is known of a matrix that the inputs do not reach, such as an expert's.
            self._take(vectors[vectors.any(1)])

    def alone(self) -> None:
        """Take the scales that a norm takes away, each by itself."""
        lone = torch.cat(list(self.columns.alone.values()))
        self._take(torch.eye(len(lone), dtype=self.known.dtype)[lone])

    def group(self, group: Sequence[Axis]) -> None:
        """Take what is new among the null vectors of some axes alone.

        A rescaling of a whole axis would be mixed into all of them. With one entry of each axis
        left out there is none, and only the members that have that entry are missing: leaving out
        the first entries and then the last finds all.
        """
        members: list[Tensor] = []
        # Pivots on short axes name a shared scale once.
        order = sorted(group, key=lambda axis: len(self.columns.of([axis])))
        for left_out in (0, -1):
            vectors = null_vectors(self.columns, group, left_out)
            members += reduced_along(self.columns, vectors, order)
        members.sort(key=lambda vector: int(_support(vector).sum()))
        if members:
            self._take_new(torch.stack(members))

    def constants(self, groups_of: Callable[[Columns, Sequence[Axis]], list[Tensor]]) -> None:
        """Take what is left: scales of whole parameters, such as that of a residual stream.

        `groups_of` says which entries of axes scale as one. Scales that trade with others are
        eliminated first: what remains is where the scale cannot go anywhere else, as in the
        matrices that write to a residual stream.
        """
        if self.complete:
            return
        axes = list(self.columns.axes)
        # Of a pair that trades, the rows are kept: one name for one scale.
        axes = [a for a in axes if a.kind != "col" or Axis(a.name, "row") not in axes]
        trading = {
            term.axis
            for symmetry in self.found
            if symmetry.kind != "exchange"
            for term in symmetry.terms
        }
        order = sorted(axes, key=lambda axis: (not axis.is_vector, axis not in trading))
        vectors = constant_vectors(self.columns, groups_of(self.columns, axes))
        vectors = reduced_along(self.columns, vectors, order)
        free = self.columns.of([axis for axis in axes if axis not in trading])

        def ties(vector: Tensor) -> tuple[int, int]:
            support = _support(vector)
            return int(support.sum() - support[free].sum()), int(support.sum())

        if len(vectors):
            self._take_new(torch.stack(sorted(vectors, key=ties)))

    def _take_new(self, vectors: Tensor) -> None:
        """Keep the vectors that are not combinations of those known or of earlier ones."""
        self._take(vectors[extend_basis(self.known, vectors)[1]])

    def _take(self, vectors: Tensor) -> None:
        """Keep vectors as symmetries, those that are alike as members of one."""
        if not len(vectors):
            return
        self.known, _ = extend_basis(self.known, vectors)
        self.found += _symmetries(self.probe, self.columns, vectors)


def _many_members_first(
    columns: Columns, groups: Sequence[tuple[Axis, ...]]
) -> list[tuple[Axis, ...]]:
    """Return the groups, few axes first; among equals channels come before heads and experts."""
    members = {group: len(null_vectors(columns, group, 0)) for group in groups}
    return sorted(groups, key=lambda group: (len(group), -members[group]))


def _symmetries(probe: Probe, columns: Columns, vectors: Tensor) -> list[Symmetry]:
    """Turn null vectors into symmetries: those with the same powers on the same axes are one."""
    alike: dict[tuple[tuple[Axis, float], ...], list[Tensor]] = {}
    for vector in vectors:
        normal = _powers(vector)
        shape = tuple(
            (axis, power)
            for axis, where in columns.axes.items()
            for power in normal[where].unique().flip(0).tolist()
            if power != 0
        )
        alike.setdefault(shape, []).append(normal)
    found = []
    for shape, members in alike.items():
        members.sort(key=partial(_first_entry, columns, shape))
        terms = []
        for axis, power in shape:
            of = torch.full_like(members[0][columns.axes[axis]], -1, dtype=torch.long)
            for number, member in enumerate(members):
                of[member[columns.axes[axis]] == power] = number
            reached = of[~columns.silent[axis]]
            if (reached == reached[0]).all():
                # One member has all that the inputs reach, and then the rest as well.
                of[~probe.absent(axis)] = reached[0]
            terms.append(Term(axis, power, of))
        symmetry = Symmetry("multiplicative", tuple(terms), len(members))
        found.append(replace(symmetry, kind=_kind(probe, symmetry)))
    return found


def _first_entry(columns: Columns, shape: Sequence[tuple[Axis, float]], vector: Tensor) -> int:
    """Return the first entry of a member on the shortest of its axes, to sort members by."""
    axis, power = min(shape, key=lambda term: len(columns.of([term[0]])))
    return int((vector[columns.axes[axis]] == power).int().argmax())


def _powers(vector: Tensor) -> Tensor:
    """Return a null vector in whole powers, the first of them positive."""
    present = vector[_support(vector)]
    normal = vector / present[present.abs().argmin()].abs() * present[0].sign()
    for smallest in range(1, _LARGEST_SMALLEST_POWER + 1):
        powers = (smallest * normal).round()
        if torch.allclose(smallest * normal, powers, atol=_POWER_TOLERANCE):
            return powers
    odd = normal[(normal - normal.round()).abs().argmax()]
    raise ValueError(
        f"a rescaling without effect has a power of {float(odd):.4f}: not a ratio of small whole "
        "numbers. Give longer or more inputs: few tokens leave too much open. If that does not "
        "help, please report the model."
    )


def _kind(probe: Probe, symmetry: Symmetry) -> Kind:
    names = {term.axis.name for term in symmetry.terms}
    powers = [term.power for term in symmetry.terms]
    kinds = sorted(term.axis.kind for term in symmetry.terms)
    if len(names) == 1 and kinds == ["col", "row"] and sorted(powers) == [-1, 1]:
        return "exchange"
    if min(powers) > 0 or max(powers) < 0:
        return "normalization"
    if not probe.epsilons:
        return "multiplicative"
    # What a norm takes away is not quite taken away once the norm adds a constant.
    probe.set_epsilon(0.1)
    try:
        return "multiplicative" if _change(probe, symmetry) < _UNCHANGED else "normalization"
    finally:
        probe.set_epsilon(0.0)


@torch.no_grad()
def _change(probe: Probe, symmetry: Symmetry) -> float:
    """Return how much a random rescaling changes the outputs, relative to them."""
    generator = torch.Generator().manual_seed(1)
    shape = (symmetry.num_members,)
    log_scales = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    before = probe.outputs()
    with probe.rescaled(symmetry.factors(log_scales)):
        after = probe.outputs()
    return float((after - before).norm() / before.norm())


def _support(vector: Tensor) -> Tensor:
    return vector.abs() > 1e-6 * vector.abs().max()

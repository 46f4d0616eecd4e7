"""The scale symmetries of a model of any architecture: the null space of its Jacobian.

A null vector of d(outputs)/d(scales) is a rescaling without effect, but so is any mixture of null
vectors. Sparse ones are found in three steps. Columns that depend on earlier columns show which
axes belong together. The null space of only these axes, in reduced row echelon form, has one vector
per member (a channel, a head). The rest must be constant along axes, like the scale of a residual
stream.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learnable_multipliers.symmetry._axes import Axis
from learnable_multipliers.symmetry._model_copy import ModelCopy
from learnable_multipliers.symmetry._symmetry import Symmetries, Symmetry, SymmetryKind, Term

# Singular values of an exact symmetry are at 1e-15 of the largest, others above 1e-7. A value in
# the wide gap between the two is an error.
_ZERO = 1e-11
_NONZERO = 1e-8
# Entries of a vector in reduced form are 0, or of order 1.
_ABSENT = 1e-6
# No known architecture has more axes that belong together channel by channel.
_MOST_AXES = 12
# Powers are small integers, up to this error.
_POWER_TOLERANCE = 1e-5
# The smallest power need not be 1: a scale squared trades with another cubed.
_LARGEST_SMALLEST_POWER = 4
# Outputs of a rescaled copy in float64 may differ only by rounding.
_UNCHANGED = 1e-8


def null_space_symmetries(model: ModelCopy) -> Symmetries:
    """Return the symmetries of a copy of a model, each verified, complete by rank."""
    entries = {axis: model.num_entries(axis) for axis in model.axes}
    columns = _reduced(entries, *model.jacobian())
    search = _Search(model, columns)
    search.exchanges()
    search.take(torch.eye(len(columns.alone), dtype=search.known.dtype)[columns.alone])
    for group in [] if search.complete else _candidate_groups(columns):
        search.group(group)
        if search.complete:
            break
    search.constants(_whole_axes)
    search.constants(_entries_alike)
    if not search.complete:
        raise ValueError(
            f"{columns.nullity - len(search.known)} of {columns.nullity} rescalings without "
            "effect could not be written as symmetries of axes; please report the model"
        )
    for symmetry in search.symmetries:
        change = _change(model, symmetry)
        if change > _UNCHANGED:
            raise ValueError(
                f"rescaling along '{symmetry}' changed the outputs by {change:.1e}: the model's "
                "forward pass is not a function of its parameters alone, or please report it"
            )
    silent = {
        axis: int(count)
        for axis, where in columns.axes.items()
        if (count := (columns.silent[where] & ~model.absent(axis)).sum())
    }
    return Symmetries(tuple(search.symmetries), columns.nullity, silent)


class _Search:
    """The symmetries found so far, and the directions they span."""

    def __init__(self, model: ModelCopy, columns: _Columns):
        self.model = model
        self.columns = columns
        self.symmetries: list[Symmetry] = []
        self.known = columns.basis.new_zeros(0, columns.basis.shape[1])

    @property
    def complete(self) -> bool:
        """Whether the symmetries found span the null space."""
        return len(self.known) == self.columns.nullity

    def exchanges(self) -> None:
        """Add the exchange of rows against columns of each matrix."""
        for axis in self.columns.axes:
            other = Axis(axis.name, "col")
            has_both = axis.kind == "row" and other in self.columns.axes
            if not has_both or self.model.absent(axis).any():
                continue
            layout = self.model.layouts[axis.name]
            matrices = math.prod(layout.shape[: layout.stack])
            vectors = self.columns.basis.new_zeros(matrices, self.columns.basis.shape[1])
            for side, power in ((axis, 1.0), (other, -1.0)):
                where = self.columns.axes[side]
                entries = self.model.num_entries(side) // matrices
                own = torch.eye(matrices).repeat_interleave(entries, 1)
                vectors[:, where] = power * own * ~self.columns.silent[where]
            # Nothing is known about a matrix that the inputs do not reach, such as an expert's.
            self.take(vectors[vectors.any(1)])

    def group(self, group: Sequence[Axis]) -> None:
        """Add new symmetries among the null vectors of only these axes.

        A rescaling of whole axes would be mixed into all of these vectors. Leaving out one entry of
        each axis prevents that, and misses only the members with that entry. So leave out the first
        entries, then the last.
        """
        members: list[Tensor] = []
        # Pivots on short axes give a shared scale only one vector.
        order = sorted(group, key=lambda axis: len(self.columns.of([axis])))
        for left_out in (0, -1):
            vectors = _null_vectors(self.columns, group, left_out)
            members += _reduced_along(self.columns, vectors, order)
        members.sort(key=lambda vector: int(_support(vector).sum()))
        if members:
            self.take(torch.stack(members))

    def constants(self, groups_of: Callable[[_Columns, Sequence[Axis]], list[Tensor]]) -> None:
        """Add the remaining symmetries, of whole parameters, such as that of a residual stream.

        `groups_of` returns which entries of axes scale together. Axes of symmetries found before
        are eliminated first, so that vectors are expressed by the others, such as the matrices that
        write to a residual stream.
        """
        if self.complete:
            return
        axes = list(self.columns.axes)
        # Rows stand for rows and columns of a matrix, which exchange: one axis per scale.
        axes = [a for a in axes if a.kind != "col" or Axis(a.name, "row") not in axes]
        trading = {
            term.axis
            for symmetry in self.symmetries
            if symmetry.kind != "exchange"
            for term in symmetry.terms
        }
        order = sorted(axes, key=lambda axis: (not axis.is_vector, axis not in trading))
        vectors = _constant_vectors(self.columns, groups_of(self.columns, axes))
        vectors = _reduced_along(self.columns, vectors, order)
        free = self.columns.of([axis for axis in axes if axis not in trading])

        def ties(vector: Tensor) -> tuple[int, int]:
            support = _support(vector)
            return int(support.sum() - support[free].sum()), int(support.sum())

        if len(vectors):
            self.take(torch.stack(sorted(vectors, key=ties)))

    def take(self, vectors: Tensor) -> None:
        """Add the vectors that are independent of known ones; similar ones form one symmetry."""
        self.known, new = _extended(self.known, vectors)
        self.symmetries += _symmetries(self.model, self.columns, vectors[new])


def _symmetries(model: ModelCopy, columns: _Columns, vectors: Tensor) -> list[Symmetry]:
    """Turn null vectors into symmetries: one for all with the same powers on the same axes."""
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
    symmetries = []
    for shape, same in alike.items():
        # Sorted by their first entries on the shortest of their axes.
        axis, power = min(shape, key=lambda term: len(columns.of([term[0]])))
        members = torch.stack(same)
        first = (members[:, columns.axes[axis]] == power).int().argmax(1)
        members = members[first.argsort(stable=True)]
        terms = []
        for axis, power in shape:
            where = columns.axes[axis]
            of = torch.full((model.num_entries(axis),), -1)
            for number, member in enumerate(members):
                of[member[where] == power] = number
            reached = of[~columns.silent[where]]
            if (reached == reached[0]).all():
                # A member with all entries that the inputs reach has the others as well.
                of[~model.absent(axis)] = reached[0]
            terms.append(Term(axis, power, of))
        symmetry = Symmetry("multiplicative", tuple(terms), len(members))
        symmetries.append(replace(symmetry, kind=_kind(model, symmetry)))
    return symmetries


def _powers(vector: Tensor) -> Tensor:
    """Return a null vector as integer powers, the first of them positive."""
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


def _kind(model: ModelCopy, symmetry: Symmetry) -> SymmetryKind:
    names = {term.axis.name for term in symmetry.terms}
    powers = [term.power for term in symmetry.terms]
    kinds = sorted(term.axis.kind for term in symmetry.terms)
    if len(names) == 1 and kinds == ["col", "row"] and sorted(powers) == [-1, 1]:
        return "exchange"
    if min(powers) > 0 or max(powers) < 0:
        return "normalization"
    # With a large epsilon a norm no longer removes a scale exactly.
    model.set_epsilon(0.1)
    change = _change(model, symmetry)
    model.set_epsilon(0.0)
    return "multiplicative" if change < _UNCHANGED else "normalization"


@torch.no_grad()
def _change(model: ModelCopy, symmetry: Symmetry) -> float:
    """Return the relative change of the outputs under a random rescaling."""
    generator = torch.Generator().manual_seed(1)
    shape = (symmetry.num_members,)
    log_scales = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    before = model.outputs()
    with model.rescaled(symmetry.factors(log_scales)):
        after = model.outputs()
    return float((after - before).norm() / before.norm())


def _support(vector: Tensor) -> Tensor:
    return vector.abs() > _ABSENT * vector.abs().max()


@dataclass(frozen=True)
class _Columns:
    """The columns of a Jacobian by axis, reduced to an orthonormal basis of its row space."""

    axes: dict[Axis, slice]
    basis: Tensor
    """(rank, columns); its null space is that of the Jacobian."""
    nullity: int
    silent: Tensor
    """Columns without any effect on the outputs, as of tokens that do not occur; left out."""
    alone: Tensor
    """Columns whose effect a norm removes, each by itself."""

    def of(self, axes: Iterable[Axis]) -> Tensor:
        """Return the column indices of some axes, without those in `silent` and `alone`."""
        numbers = torch.arange(len(self.silent))
        chosen = torch.cat([numbers[self.axes[axis]] for axis in axes])
        return chosen[~(self.silent | self.alone)[chosen]]


def _reduced(entries: Mapping[Axis, int], jacobian: Tensor, sizes: Tensor) -> _Columns:
    """Reduce a Jacobian to its row space; raise if its rank is ambiguous."""
    norms, sizes = jacobian.norm(dim=0), sizes.norm(dim=0)
    silent = sizes <= _ZERO * sizes.max()
    alone = (norms <= _ZERO * sizes) & ~silent
    live = ~(silent | alone)
    _, values, basis = torch.linalg.svd(jacobian[:, live] / norms[live], full_matrices=False)
    values = values / values[:1]
    between = values[(values > _ZERO) & (values < _NONZERO)]
    if len(between):
        raise ValueError(
            f"{len(between)} directions change the outputs by {between.max():.1e} of the largest: "
            "too little for a change, too much for rounding. Give longer or more inputs, or a "
            "smaller model."
        )
    rank = int((values >= _NONZERO).sum())
    whole = jacobian.new_zeros(rank, jacobian.shape[1])
    # In the Jacobian's own units, in which exponents are small integers.
    whole[:, live] = basis[:rank] * norms[live]
    ends = itertools.accumulate(entries.values())
    slices = {
        axis: slice(end - count, end)
        for (axis, count), end in zip(entries.items(), ends, strict=True)
    }
    return _Columns(slices, whole, int((~silent).sum()) - rank, silent, alone)


def _candidate_groups(columns: _Columns) -> list[tuple[Axis, ...]]:
    """Return sets of axes that belong together: fewest axes first, then most members."""
    # Vectors last, so that they depend on matrices, and not the other way round.
    vectors_last = sorted(columns.axes, key=lambda axis: axis.is_vector)
    numbers = columns.of(vectors_last)
    owner = {int(number): axis for axis in vectors_last for number in columns.of([axis])}
    _, new = _extended(columns.basis.new_zeros(0, len(columns.basis)), columns.basis[:, numbers].T)
    independent, dependent = numbers[new], numbers[~new]
    solution = torch.linalg.lstsq(
        columns.basis[:, independent], columns.basis[:, dependent]
    ).solution
    weight = columns.basis[:, independent].norm(dim=0)[:, None]
    share = (solution * weight).abs() / columns.basis[:, dependent].norm(dim=0)
    unordered: set[frozenset[Axis]] = set()
    for place, number in enumerate(dependent.tolist()):
        members = independent[share[:, place] > _ABSENT].tolist()
        group = frozenset(owner[other] for other in (number, *members))
        if len(group) <= _MOST_AXES:
            unordered.add(group)
    rank = {axis: place for place, axis in enumerate(columns.axes)}
    groups = [tuple(sorted(group, key=rank.__getitem__)) for group in unordered]

    def order(group: tuple[Axis, ...]) -> tuple[int, int, list[int]]:
        # With equally many axes, channels come before heads and experts.
        members = len(_null_vectors(columns, group, 0))
        return len(group), -members, [rank[axis] for axis in group]

    return sorted(groups, key=order)


def _null_vectors(columns: _Columns, group: Sequence[Axis], left_out: int | None = None) -> Tensor:
    """Return a basis of the null vectors of only some axes, (vectors, all columns).

    `left_out` is the position of an entry of each axis to leave out.
    """
    numbers = columns.of(group)
    if left_out is not None:
        without = [columns.of([axis])[left_out] for axis in group]
        numbers = numbers[~torch.isin(numbers, torch.stack(without))]
    basis = _null_space(columns.basis[:, numbers])
    vectors = basis.new_zeros(len(basis), columns.basis.shape[1])
    vectors[:, numbers] = basis
    return vectors


def _null_space(matrix: Tensor) -> Tensor:
    """Return a basis of the vectors that a matrix maps to 0, as rows."""
    norms = matrix.norm(dim=0)
    norms = norms.where(norms > 0, torch.ones_like(norms))
    _, values, basis = torch.linalg.svd(matrix / norms, full_matrices=True)
    rank = int((values > _NONZERO * values[:1]).sum())
    return basis[rank:] / norms


def _whole_axes(columns: _Columns, axes: Sequence[Axis]) -> list[Tensor]:
    """Return the columns of each axis."""
    return [numbers for axis in axes if len(numbers := columns.of([axis]))]


def _entries_alike(columns: _Columns, axes: Sequence[Axis]) -> list[Tensor]:
    """Return the columns of each axis, split where null vectors differ between its entries.

    One vector may hold biases of queries and values, which scale differently.
    """
    vectors = _null_vectors(columns, list(columns.axes))
    vectors = vectors / vectors.abs().amax(1, keepdim=True)
    groups = []
    for numbers in _whole_axes(columns, axes):
        left = numbers
        while len(left):
            same = (vectors[:, left] - vectors[:, left[:1]]).abs().amax(0) <= _ABSENT
            groups.append(left[same])
            left = left[~same]
    return groups


def _constant_vectors(columns: _Columns, groups: Sequence[Tensor]) -> Tensor:
    """Return a basis of the null vectors that are one number on each of some sets of columns."""
    indicators = columns.basis.new_zeros(len(groups), columns.basis.shape[1])
    for indicator, numbers in zip(indicators, groups, strict=True):
        indicator[numbers] = 1.0
    effects = columns.basis @ indicators.T
    # An axis that has no effect as a whole is a null vector by itself: what is left is rounding.
    present = effects.norm(dim=0) > _NONZERO * (indicators @ columns.basis.norm(dim=0))
    return _null_space(effects * present) @ indicators


def _reduced_along(columns: _Columns, vectors: Tensor, order: Sequence[Axis]) -> Tensor:
    """Return the reduced row echelon form, pivoting on rows and on some axes before others."""
    numbers = columns.of(order)
    whole = torch.zeros_like(vectors)
    vectors = vectors[:, numbers]
    row = 0
    for column in range(vectors.shape[1]):
        if row == len(vectors):
            break
        size, at = vectors[row:, column].abs().max(0)
        if size <= _ABSENT * vectors[row:].abs().max():
            continue
        at = int(at) + row
        vectors[[row, at]] = vectors[[at, row]]
        vectors[row] /= vectors[row, column].clone()
        others = torch.arange(len(vectors)) != row
        vectors[others] -= vectors[others, column, None] * vectors[row]
        row += 1
    whole[:, numbers] = vectors
    return whole


def _extended(basis: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis that also spans some vectors, and which of them were new."""
    grown = torch.cat((basis, torch.empty_like(vectors)))
    size = len(basis)
    new = torch.zeros(len(vectors), dtype=torch.bool)
    for number, vector in enumerate(vectors):
        rest = vector / vector.norm()
        for _ in range(2):
            rest = rest - grown[:size].T @ (grown[:size] @ rest)
        if rest.norm() > _ABSENT:
            grown[size] = rest / rest.norm()
            new[number] = True
            size += 1
    return grown[:size], new

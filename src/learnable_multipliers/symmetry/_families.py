"""From a null space to families of symmetries, each in as few scales as possible.

A null vector of d(outputs)/d(scales) is a rescaling without effect, but any mixture of null
vectors is one too. The sparse ones are found in three steps: columns that depend on those before
them show which axes go together; the null space of these axes alone, in reduced row echelon form,
has one vector for each member (a channel, a head); and what is left must be constant along axes,
like the scale of a residual stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learnable_multipliers.symmetry._axes import Axis

# Singular values of an exact symmetry are at 1e-15 of the largest, others above 1e-7: between the
# two lies a wide gap; a value inside it is an error.
_ZERO = 1e-11
_NONZERO = 1e-8
# Entries of a vector in reduced form are 0, or powers of about 1.
_ABSENT = 1e-6
# More axes than these do not go together channel by channel in any architecture known.
_MOST_AXES = 12


@dataclass(frozen=True)
class Columns:
    """The columns of a Jacobian by axis, reduced to an orthonormal basis of its row space."""

    axes: dict[Axis, slice]
    basis: Tensor
    """(rank, columns); its null space is that of the Jacobian."""
    nullity: int
    silent: dict[Axis, Tensor]
    """Entries that do not reach the outputs, as for tokens that do not occur; left out."""
    alone: dict[Axis, Tensor]
    """Entries without effect that do reach the outputs: a norm takes them away, each by itself."""

    def of(self, axes: Iterable[Axis]) -> Tensor:
        """Return the numbers of the columns of some axes, silent and lone ones left out."""
        return torch.cat(
            [
                torch.arange(self.axes[axis].start, self.axes[axis].stop)[
                    ~(self.silent[axis] | self.alone[axis])
                ]
                for axis in axes
            ]
        )


def reduce_columns(entries: Mapping[Axis, int], jacobian: Tensor, sizes: Tensor) -> Columns:
    """Return rank and nullity of a Jacobian; raise where they are ambiguous."""
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
    # Back to the Jacobian's own units, in which exponents are small integers.
    whole[:, live] = basis[:rank] * norms[live]
    slices: dict[Axis, slice] = {}
    start = 0
    for axis, count in entries.items():
        slices[axis] = slice(start, start + count)
        start += count
    return Columns(
        axes=slices,
        basis=whole,
        nullity=int((~silent).sum()) - rank,
        silent={axis: silent[where] for axis, where in slices.items()},
        alone={axis: alone[where] for axis, where in slices.items()},
    )


def candidate_groups(columns: Columns) -> list[tuple[Axis, ...]]:
    """Return sets of axes that go together somewhere, the smallest first."""
    # Vectors last: they depend on the matrices they ride with, and not the other way round.
    order = sorted(columns.axes, key=lambda axis: axis.is_vector)
    numbers = columns.of(order)
    owner = {int(number): axis for axis in order for number in columns.of([axis])}
    independent, dependent = _split(columns.basis, numbers)
    solution = torch.linalg.lstsq(
        columns.basis[:, independent], columns.basis[:, dependent]
    ).solution
    weight = columns.basis[:, independent].norm(dim=0)[:, None]
    share = (solution * weight).abs() / columns.basis[:, dependent].norm(dim=0)
    found: set[frozenset[Axis]] = set()
    for place, number in enumerate(dependent.tolist()):
        members = independent[share[:, place] > _ABSENT].tolist()
        group = frozenset(owner[other] for other in (number, *members))
        if len(group) <= _MOST_AXES:
            found.add(group)
    rank = {axis: place for place, axis in enumerate(columns.axes)}
    groups = [tuple(sorted(group, key=rank.__getitem__)) for group in found]
    return sorted(groups, key=lambda group: (len(group), [rank[axis] for axis in group]))


def null_vectors(columns: Columns, group: Sequence[Axis], left_out: int | None = None) -> Tensor:
    """Return a basis of the null vectors of some axes alone, (vectors, all columns).

    `left_out` is the place of an entry of each axis to do without.
    """
    numbers = columns.of(group)
    if left_out is not None:
        without = [columns.of([axis])[left_out] for axis in group]
        numbers = numbers[~torch.isin(numbers, torch.stack(without))]
    norms = columns.basis[:, numbers].norm(dim=0)
    _, values, basis = torch.linalg.svd(columns.basis[:, numbers] / norms, full_matrices=True)
    rank = int((values > _NONZERO * values[:1]).sum())
    vectors = basis.new_zeros(len(basis) - rank, columns.basis.shape[1])
    vectors[:, numbers] = basis[rank:] / norms
    return vectors


def whole_axes(columns: Columns, axes: Sequence[Axis]) -> list[Tensor]:
    """Return the columns of each axis."""
    return [numbers for axis in axes if len(numbers := columns.of([axis]))]


def entries_alike(columns: Columns, axes: Sequence[Axis]) -> list[Tensor]:
    """Return the columns of each axis, split where null vectors differ between its entries.

    Biases of queries and values may be one vector, and yet scale differently.
    """
    vectors = null_vectors(columns, list(columns.axes), None)
    vectors = vectors / vectors.abs().amax(1, keepdim=True)
    groups = []
    for numbers in whole_axes(columns, axes):
        left = numbers
        while len(left):
            same = (vectors[:, left] - vectors[:, left[:1]]).abs().amax(0) <= _ABSENT
            groups.append(left[same])
            left = left[~same]
    return groups


def constant_vectors(columns: Columns, groups: Sequence[Tensor]) -> Tensor:
    """Return a basis of the null vectors that are one number on each of some sets of columns."""
    indicators = columns.basis.new_zeros(len(groups), columns.basis.shape[1])
    for indicator, numbers in zip(indicators, groups, strict=True):
        indicator[numbers] = 1.0
    effects = columns.basis @ indicators.T
    scale = effects.norm(dim=0)
    # An axis that has no effect as a whole is a null vector by itself: what is left is rounding.
    present = scale > _NONZERO * (indicators @ columns.basis.norm(dim=0))
    effects, scale = effects * present, scale.where(present, torch.ones_like(scale))
    _, values, basis = torch.linalg.svd(effects / scale, full_matrices=True)
    rank = int((values > _NONZERO * values[:1]).sum())
    return (basis[rank:] / scale) @ indicators


def reduced_along(columns: Columns, vectors: Tensor, order: Sequence[Axis]) -> Tensor:
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


def extend_basis(basis: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis that also spans some vectors, and which of them were new."""
    new = []
    for vector in vectors:
        rest = vector / vector.norm()
        for _ in range(2):
            rest = rest - basis.T @ (basis @ rest)
        new.append(bool(rest.norm() > _ABSENT))
        if new[-1]:
            basis = torch.cat((basis, rest[None] / rest.norm()))
    return basis, torch.tensor(new)


def _split(basis: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return which columns are independent of those before them, and which are not."""
    kept = basis.new_zeros(len(basis), len(basis))
    independent: list[int] = []
    dependent: list[int] = []
    for number in numbers.tolist():
        column = basis[:, number] / basis[:, number].norm()
        so_far = kept[:, : len(independent)]
        for _ in range(2):
            column = column - so_far @ (so_far.T @ column)
        if len(independent) < len(basis) and column.norm() > _ABSENT:
            kept[:, len(independent)] = column / column.norm()
            independent.append(number)
        else:
            dependent.append(number)
    return torch.tensor(independent), torch.tensor(dependent)

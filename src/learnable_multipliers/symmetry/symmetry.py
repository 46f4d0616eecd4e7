"""What a symmetry is, and how it is said in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from learnable_multipliers.symmetry.axes import Axis

Kind = Literal["exchange", "multiplicative", "normalization"]


@dataclass(frozen=True)
class Term:
    """How one axis takes part in a symmetry."""

    axis: Axis
    power: float
    """A member's factor s multiplies its entries of this axis by s ** power."""
    members: Tensor
    """The member each entry of the axis belongs to; -1 for none."""

    @property
    def block(self) -> str | None:
        """The entries that take part: None for all, `start:stop`, or how many there are."""
        present = (self.members >= 0).nonzero().flatten()
        if len(present) == len(self.members):
            return None
        start, stop = int(present[0]), int(present[-1]) + 1
        return f"{start}:{stop}" if stop - start == len(present) else f"{len(present)} of them"

    def factors(self, log_scales: Tensor) -> Tensor:
        """Return what each entry of the axis is multiplied by, given log s of each member."""
        padded = torch.cat((log_scales * self.power, log_scales.new_zeros(1)))
        return padded[self.members].exp()


@dataclass(frozen=True)
class Symmetry:
    """Rescalings without effect that are alike: one for each member, a channel or a head."""

    kind: Kind
    """`exchange`: rows against columns of one matrix. `multiplicative`: factors that are only ever
    multiplied. `normalization`: a scale that a norm takes away."""
    terms: tuple[Term, ...]
    num_members: int

    @property
    def exponents(self) -> dict[tuple[str, str, str | None], float]:
        """Powers by parameter, kind of axis, and block of entries (None for all of them)."""
        return {(term.axis.name, term.axis.kind, term.block): term.power for term in self.terms}

    def factors(self, log_scales: Tensor) -> dict[Axis, Tensor]:
        """Return what the entries of each axis are multiplied by, given log s of each member."""
        factors: dict[Axis, Tensor] = {}
        for term in self.terms:
            # An axis may take part twice, as the rows of fused queries and keys do.
            factors[term.axis] = factors.get(term.axis, 1.0) * term.factors(log_scales)
        return factors

    @cached_property
    def per(self) -> str:
        """What a member is: the whole matrix, a channel, or a set of entries of that many."""
        if self.num_members == 1:
            return "as a whole"
        sizes = [_largest_member(term) for term in self.terms]
        if max(sizes) == 1:
            return "per channel"
        return f"in {self.num_members} sets of {'+'.join(map(str, sizes))}"

    def __str__(self) -> str:
        if self.kind == "exchange":
            where = str(self.terms[0].axis).removeprefix("rows of ")
            return f"rows against columns of {where}, {self.per} (exchange)"
        ups = [_phrase(term) for term in self.terms if term.power > 0]
        downs = [_phrase(term) for term in self.terms if term.power < 0]
        sides = " against ".join(_listed(side) for side in (ups, downs) if side)
        return f"{sides}, {self.per} ({self.kind})"


@dataclass(frozen=True)
class Symmetries:
    """All scale symmetries of a model: those listed span every rescaling without effect.

    Where they came through a twin, some may be missing: `unconfirmed` says which.
    """

    found: tuple[Symmetry, ...]
    nullity: int
    """Independent rescalings without effect, counted by the rank of the derivative."""
    silent: Mapping[Axis, int]
    """Entries that the inputs did not reach, by axis: nothing is known of them."""
    unconfirmed: tuple[str, ...] = ()
    """Symmetries of a twin that were not confirmed on the model itself, in words, with where: the
    model may or may not have them."""

    def __iter__(self) -> Iterator[Symmetry]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int) -> Symmetry:
        return self.found[index]

    def __str__(self) -> str:
        lines = [f"{len(self.found)} symmetries, {self.nullity} independent rescalings:"]
        lines += [f"  {symmetry}" for symmetry in self.found]
        if self.silent:
            reached = ", ".join(f"{count} {axis}" for axis, count in self.silent.items())
            lines.append(f"not reached by the inputs: {reached}")
        if self.unconfirmed:
            lines.append("the list may be incomplete; of a small twin, but not confirmed here:")
            lines += [f"  {symmetry}" for symmetry in self.unconfirmed]
        return "\n".join(lines)


def _largest_member(term: Term) -> int:
    counted = torch.bincount(term.members[term.members >= 0])
    return int(counted.max()) if len(counted) else 0


def _phrase(term: Term) -> str:
    power = abs(term.power)
    words = str(term.axis) if term.block is None else f"{term.axis} [{term.block}]"
    return words if power == 1 else f"{words} to the power {power:g}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

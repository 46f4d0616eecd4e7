"""How the members of a symmetry lie along an axis, in a form that carries over to other sizes.

The entries of an axis are an array of a few dimensions, row-major. Along some of them the member
changes, along others it stays the same (query heads that share a key), and along some only one
place takes part (one of three fused matrices). Heads, groups, channels, halves of a rotation and
fused parts all come out as such dimensions, without being told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_MOST_DIMENSIONS = 4
_MOST_PARTS = 4


@dataclass(frozen=True)
class Pattern:
    """Dimensions of an axis, each with its use."""

    sizes: tuple[int, ...]
    uses: tuple[str, ...]
    """`member`: the member changes along it; `free`: it does not; a number: only this place."""

    @property
    def member_sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions along which the member changes."""
        return tuple(s for s, use in zip(self.sizes, self.uses, strict=True) if use == "member")

    def members(self) -> Tensor:
        """Return the member of each entry, -1 for none."""
        member = torch.zeros(self.sizes, dtype=torch.long)
        absent = torch.zeros(self.sizes, dtype=torch.bool)
        for dimension, (size, use) in enumerate(zip(self.sizes, self.uses, strict=True)):
            shape = [-1 if i == dimension else 1 for i in range(len(self.sizes))]
            place = torch.arange(size).view(shape)
            if use == "member":
                member = member * size + place
            elif use != "free":
                absent = absent | (place != int(use))
        return member.masked_fill(absent, -1).flatten()


def describe(members: Tensor) -> Pattern | None:
    """Return the pattern with the fewest dimensions that gives these members, if one does."""
    parts = bool((members < 0).any())
    for count in range(1, _MOST_DIMENSIONS + 1):
        for sizes in _factorizations(len(members), count):
            for uses in _uses(sizes, parts):
                pattern = Pattern(sizes, uses)
                if torch.equal(pattern.members(), members):
                    return pattern
    return None


def resized(patterns: Sequence[Pattern], lengths: Sequence[int]) -> Iterator[list[Pattern]]:
    """Yield ways in which axes of other lengths can have these patterns together.

    Members are shared: the dimensions along which the member changes have the same sizes in all.
    Fused parts stay as many as they are.
    """
    refined = max((pattern.member_sizes for pattern in patterns), key=len)
    if not refined:
        # A single member: the axes have nothing in common.
        options = [
            _fitted(pattern, (), length) for pattern, length in zip(patterns, lengths, strict=True)
        ]
        yield from map(list, itertools.product(*options))
        return
    for total in sorted(_common_divisors(lengths), reverse=True):
        for sizes in _factorizations(total, len(refined), least=1):
            options = [
                list(_fitted(pattern, sizes, length))
                for pattern, length in zip(patterns, lengths, strict=True)
            ]
            yield from map(list, itertools.product(*options))


def _fitted(pattern: Pattern, members: tuple[int, ...], length: int) -> Iterator[Pattern]:
    """Yield the pattern at another length, given the sizes along which members change."""
    whole = len(pattern.member_sizes)
    if whole not in (len(members), 1):
        return
    total = 1
    for size in members:
        total *= size
    if whole == 1:
        members = (total,)
    fixed = 1
    for size, use in zip(pattern.sizes, pattern.uses, strict=True):
        fixed *= size if use not in ("member", "free") else 1
    rest, remainder = divmod(length, total * fixed)
    if remainder or not rest:
        return
    num_free = pattern.uses.count("free")
    if not num_free and rest != 1:
        return
    for free in _factorizations(rest, num_free, least=1) if num_free else [()]:
        next_member, next_free = iter(members), iter(free)
        sizes = tuple(
            next(next_member) if use == "member" else next(next_free) if use == "free" else size
            for size, use in zip(pattern.sizes, pattern.uses, strict=True)
        )
        yield Pattern(sizes, pattern.uses)


def _uses(sizes: tuple[int, ...], parts: bool) -> Iterator[tuple[str, ...]]:
    choices = [
        ("member", "free", *(map(str, range(size)) if parts and size <= 4 else ()))
        for size in sizes
    ]
    for uses in itertools.product(*choices):
        # Neighbours of one use are one dimension.
        if all(a != b or a.isdigit() for a, b in itertools.pairwise(uses)):
            yield uses


@cache
def _factorizations(number: int, count: int, least: int = 2) -> tuple[tuple[int, ...], ...]:
    """Return the ways to write a number as a product of `count` ordered factors."""
    if count == 1:
        return ((number,),) if number >= least or number == 1 else ()
    return tuple(
        (first, *rest)
        for first in range(least, number + 1)
        if number % first == 0
        for rest in _factorizations(number // first, count - 1, least)
        if min(rest) >= least
    )


def _common_divisors(lengths: Sequence[int]) -> list[int]:
    return [d for d in range(1, min(lengths) + 1) if all(n % d == 0 for n in lengths)]

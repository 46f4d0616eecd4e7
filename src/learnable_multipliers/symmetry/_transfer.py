"""Transfer the symmetries found on a small proxy of a model to the model itself.

Parameter names differ in layer numbers only. The members of a symmetry are described by a `Pattern`
that carries over to other sizes, up to a few sizes (heads, channels) that are guessed. Every guess
is checked on the model itself, by the derivative of its outputs at random weights. What is not
confirmed there is not transferred, but listed as unconfirmed.

The entries of an axis are an array of a few dimensions, row-major. Along some of them the member
changes, along others it stays the same (query heads that share a key), and along some only one
index takes part (one of three fused matrices). Heads, groups, channels, halves of a rotation and
fused parts all appear as such dimensions, without being named.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._names import named_parameters
from learnable_multipliers.symmetry._axes import Axis
from learnable_multipliers.symmetry._probe import Probe, random_tokens
from learnable_multipliers.symmetry._symmetry import Symmetries, Symmetry, Term

# The derivative is taken in float32; a wrong guess is wrong by about 1.
_CONFIRMED = 1e-2
_NUM_PROJECTIONS = 2
_NUM_TOKENS = 32
_MOST_DIMENSIONS = 4
# The parts of a fused matrix: more are not looked for.
_MOST_PARTS = 4

# Axes and powers of a symmetry, and whether it has all entries of each.
_Place = frozenset[tuple[str, str, float, bool]]


def probe_like(
    proxy: Probe, model: nn.Module, inputs: Any, carried: Mapping[str, Matrix] | None
) -> Probe:
    """Return a probe of a large model, prepared like that of its proxy."""
    inputs = random_tokens(model, most=_NUM_TOKENS) if inputs is None else inputs
    names = namesakes(proxy.shifted, [name for name, _ in named_parameters(model)])
    return Probe(model, inputs, carried, dtype=torch.float32, shifted=names)


def namesakes(names: Iterable[str], among: Iterable[str]) -> list[str]:
    """Return the names that differ from some others in numbers alone, those of layers."""
    kinds = {_kind(name) for name in names}
    return [name for name in among if _kind(name) in kinds]


def transfer(found: Symmetries, proxy: Probe, probe: Probe) -> Symmetries:
    """Return the symmetries of a model, given those of its proxy."""
    model = _Model(probe)
    carried: dict[_Place, Symmetry] = {}
    tried: dict[_Place, str] = {}
    for symmetry in found:
        places = list(_namesakes(symmetry, probe))
        if not places:
            tried[_place(symmetry, {})] = str(symmetry)
        for names in places:
            place = _place(symmetry, names)
            tried.setdefault(place, str(replace(symmetry, terms=_renamed(symmetry, names))))
            moved = model.resized(symmetry, proxy, names)
            # Layers may differ: what holds in one may be part of what holds in the other.
            if moved and (place not in carried or moved.num_members > carried[place].num_members):
                carried[place] = moved
    symmetries = tuple(carried.values())
    unconfirmed = tuple(dict.fromkeys(tried[place] for place in tried if place not in carried))
    nullity = sum(symmetry.num_members for symmetry in symmetries)
    return Symmetries(symmetries, nullity, {}, unconfirmed)


@dataclass
class _Slot:
    """A term of the proxy's symmetry, to be placed on the model's axis."""

    axis: Axis
    power: float
    pattern: Pattern | None
    """None for a run of entries whose start is not known."""
    length: int


class _Model:
    """The model's own axes, and the derivative of its outputs by them."""

    def __init__(self, probe: Probe):
        self.probe = probe
        derivatives = probe.derivatives(_NUM_PROJECTIONS)
        sizes = [probe.num_entries(axis) for axis in probe.axes]
        self.effects = dict(zip(probe.axes, derivatives.split(sizes, 1), strict=True))

    def resized(
        self, symmetry: Symmetry, proxy: Probe, names: dict[str, list[str]]
    ) -> Symmetry | None:
        """Return a symmetry of the proxy at the model's sizes, if the model confirms it."""
        if symmetry.num_members == 1:
            return self._as_a_whole(symmetry, proxy, names)
        slots = [
            _Slot(axis, term.power, describe(term.members), self.probe.num_entries(axis))
            for term in symmetry.terms
            for axis in [Axis(names[term.axis.name][0], term.axis.kind)]
        ]
        known = [slot for slot in slots if slot.pattern is not None]
        if not known:
            return None
        patterns = [slot.pattern for slot in known if slot.pattern is not None]
        for fitted in resized_patterns(patterns, [slot.length for slot in known]):
            placed = [
                Term(slot.axis, slot.power, pattern.members())
                for slot, pattern in zip(known, fitted, strict=True)
            ]
            count = 1 + max(int(term.members.max()) for term in placed)
            placed += self._runs([slot for slot in slots if slot.pattern is None], placed, count)
            if len(placed) == len(slots):
                confirmed = self._confirmed(symmetry, placed, count)
                if confirmed is not None:
                    return confirmed
        return None

    def _as_a_whole(
        self, symmetry: Symmetry, proxy: Probe, names: dict[str, list[str]]
    ) -> Symmetry | None:
        """Return a symmetry of one member at the model's sizes, if the model confirms it."""
        options: dict[tuple[Axis, float, Pattern | None], list[Term]] = {}
        for term in symmetry.terms:
            all_there_are = torch.equal(term.members < 0, proxy.absent(term.axis))
            pattern = None if all_there_are else describe(term.members)
            if pattern is None and not all_there_are:
                return None
            for name in names[term.axis.name]:
                axis = Axis(name, term.axis.kind)
                # Those of several layers of the proxy stand for the same ones here: each once.
                length = self.probe.num_entries(axis)
                everywhere = torch.zeros(length, dtype=torch.long)
                whole = [everywhere.masked_fill(self.probe.absent(axis), -1)]
                if pattern is not None:
                    fits = resized_patterns([pattern], [length])
                    whole = [fitted.members() for (fitted,) in fits]
                options[axis, term.power, pattern] = [Term(axis, term.power, m) for m in whole]
        for terms in itertools.product(*options.values()):
            confirmed = self._confirmed(symmetry, terms, 1)
            if confirmed is not None:
                return confirmed
        return None

    def _runs(self, slots: Sequence[_Slot], placed: Sequence[Term], count: int) -> Iterator[Term]:
        """Yield terms whose entries are a run, from where the first member is balanced best."""
        first = torch.zeros(_NUM_PROJECTIONS)
        for term in placed:
            first += term.power * self.effects[term.axis][:, term.members == 0].sum(1)
        for slot in slots:
            starts = slot.length - count + 1
            if starts < 1:
                continue
            effects = slot.power * self.effects[slot.axis][:, :starts]
            missing = (first[:, None] + effects).norm(dim=0)
            start = int(missing.argmin())
            members = torch.full((slot.length,), -1)
            members[start : start + count] = torch.arange(count)
            yield Term(slot.axis, slot.power, members)

    def _confirmed(self, symmetry: Symmetry, terms: Sequence[Term], count: int) -> Symmetry | None:
        """Return a symmetry of the model where its outputs do not change along it."""
        change = torch.zeros(_NUM_PROJECTIONS, count + 1)
        size = torch.zeros(count + 1)
        for term in terms:
            effect = term.power * self.effects[term.axis]
            place = torch.where(term.members < 0, count, term.members)
            change.index_add_(1, place, effect)
            size.index_add_(0, place, effect.square().sum(0))
        left = change[:, :count].norm(dim=0) / size[:count].sqrt().clamp(min=1e-30)
        # Without any effect on the outputs, nothing is confirmed.
        if float(left.max()) > _CONFIRMED or not size[:count].any():
            return None
        return Symmetry(symmetry.kind, tuple(terms), count)


def _namesakes(symmetry: Symmetry, probe: Probe) -> Iterator[dict[str, list[str]]]:
    """Yield for each place in the model the names that stand for those of the proxy.

    A symmetry inside one layer comes back in every layer that has all its parameters; one that
    spans layers takes all parameters of its kinds.
    """
    kinds: dict[str, list[str]] = {}
    for name in probe.parameters:
        kinds.setdefault(_kind(name), []).append(name)
    names = [term.axis.name for term in symmetry.terms]
    numbered = {_numbers(name) for name in names if _numbers(name)}
    if len(numbered) > 1:
        if all(_kind(name) in kinds for name in names):
            yield {name: kinds[_kind(name)] for name in names}
        return
    if not numbered:
        if all(name in probe.parameters for name in names):
            yield {name: [name] for name in names}
        return
    in_layers = [name for name in names if _numbers(name)]
    places = {_numbers(n) for name in in_layers for n in kinds.get(_kind(name), [])}
    for place in sorted(places):
        at = {name: [_at(name, place)] if _numbers(name) else [name] for name in names}
        if all(n in probe.parameters for found in at.values() for n in found):
            yield at


def _place(symmetry: Symmetry, names: Mapping[str, list[str]]) -> _Place:
    """Return what a symmetry scales in the model: two of one place are the same symmetry."""
    return frozenset(
        (name, term.axis.kind, term.power, term.block is None)
        for term in symmetry.terms
        for name in names.get(term.axis.name, [term.axis.name])
    )


def _renamed(symmetry: Symmetry, names: Mapping[str, list[str]]) -> tuple[Term, ...]:
    """Return a proxy's terms under the names of the model, one for each."""
    renamed = {
        (name, term.axis.kind, number % len(symmetry.terms)): replace(
            term, axis=Axis(name, term.axis.kind)
        )
        for number, term in enumerate(symmetry.terms)
        for name in names[term.axis.name]
    }
    return tuple(renamed.values())


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"(?<=\.)\d+(?=\.)", name))


def _at(name: str, place: tuple[str, ...]) -> str:
    numbers = iter(place)
    return re.sub(r"(?<=\.)\d+(?=\.)", lambda _: next(numbers), name)


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


def resized_patterns(
    patterns: Sequence[Pattern], lengths: Sequence[int]
) -> Iterator[list[Pattern]]:
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
    divisors = [d for d in range(1, min(lengths) + 1) if all(n % d == 0 for n in lengths)]
    for total in reversed(divisors):
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
    total = math.prod(members)
    if whole == 1:
        members = (total,)
    uses = zip(pattern.sizes, pattern.uses, strict=True)
    fixed = math.prod(size for size, use in uses if use not in ("member", "free"))
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
        ("member", "free", *(map(str, range(size)) if parts and size <= _MOST_PARTS else ()))
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

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
from learnable_multipliers._names import layer_template, named_parameters
from learnable_multipliers.symmetry._axes import Axis
from learnable_multipliers.symmetry._model_copy import ModelCopy, random_tokens
from learnable_multipliers.symmetry._symmetry import Symmetries, Symmetry, Term

# Relative tolerance: derivatives are in float32, and a wrong guess is off by about 1.
_CONFIRMED = 1e-2
_NUM_PROJECTIONS = 2
_NUM_TOKENS = 32
_MOST_DIMENSIONS = 4
# The most parts of a fused matrix that are searched for.
_MOST_PARTS = 4

# In a name, the number of a layer or an expert.
_NUMBER = r"(?<=\.)\d+(?=\.)"

# Axes and powers of a symmetry, and whether it has all entries of each.
_Signature = frozenset[tuple[Axis, float, bool]]


def copy_like(
    proxy: ModelCopy, model: nn.Module, inputs: Any, carried: Mapping[str, Matrix] | None
) -> ModelCopy:
    """Return a copy of a large model, prepared like the copy of its proxy."""
    inputs = random_tokens(model, most=_NUM_TOKENS) if inputs is None else inputs
    names = namesakes(proxy.shifted, [name for name, _ in named_parameters(model)])
    return ModelCopy(model, inputs, carried, dtype=torch.float32, shifted=names)


def namesakes(names: Iterable[str], among: Iterable[str]) -> list[str]:
    """Return the names in `among` that equal one of `names` except for layer numbers."""
    templates = {layer_template(name) for name in names}
    return [name for name in among if layer_template(name) in templates]


def transfer(proxy_symmetries: Symmetries, proxy: ModelCopy, model: ModelCopy) -> Symmetries:
    """Return the symmetries of a model, given those of its proxy."""
    guesses = _Guesses(proxy, model)
    carried: dict[_Signature, Symmetry] = {}
    tried: dict[_Signature, str] = {}
    alike = proxy.parameters.keys() == model.parameters.keys()
    for symmetry in proxy_symmetries:
        places = _namesakes(symmetry, model, as_named=alike)
        places = [names for names in places if guesses.known(symmetry, names)]
        if not places:
            tried[_signature(symmetry.terms)] = str(symmetry)
        for names in places:
            renamed = tuple(
                replace(term, axis=Axis(name, term.axis.kind))
                for term in symmetry.terms
                for name in names[term.axis.name]
            )
            signature = _signature(renamed)
            tried.setdefault(signature, str(replace(symmetry, terms=renamed)))
            moved = guesses.confirmed(symmetry, names)
            # Layers may differ: keep the symmetry with more members.
            known = carried.get(signature)
            if moved and (known is None or moved.num_members > known.num_members):
                carried[signature] = moved
    symmetries = tuple(carried.values())
    unconfirmed = tuple(dict.fromkeys(tried[s] for s in tried if s not in carried))
    nullity = sum(symmetry.num_members for symmetry in symmetries)
    return Symmetries(symmetries, nullity, {}, unconfirmed)


class _Guesses:
    """Guesses of the proxy's symmetries at the model's sizes, and derivatives to confirm them."""

    def __init__(self, proxy: ModelCopy, model: ModelCopy):
        self.proxy, self.model = proxy, model
        derivatives = model.derivatives(_NUM_PROJECTIONS)
        sizes = [model.num_entries(axis) for axis in model.axes]
        self.effects = dict(zip(model.axes, derivatives.split(sizes, 1), strict=True))

    def known(self, symmetry: Symmetry, names: Mapping[str, list[str]]) -> bool:
        """Return whether the model has all axes of a symmetry."""
        axes = (Axis(n, t.axis.kind) for t in symmetry.terms for n in names[t.axis.name])
        return all(axis in self.effects for axis in axes)

    def confirmed(self, symmetry: Symmetry, names: Mapping[str, list[str]]) -> Symmetry | None:
        """Return a symmetry of the proxy at the model's sizes, if the model confirms it."""
        guess = self._as_a_whole if symmetry.num_members == 1 else self._by_member
        for terms in guess(symmetry, names):
            count = 1 + max(int(term.members.max()) for term in terms)
            if self._holds(terms, count):
                return Symmetry(symmetry.kind, tuple(terms), count)
        return None

    def _by_member(
        self, symmetry: Symmetry, names: Mapping[str, list[str]]
    ) -> Iterator[list[Term]]:
        """Yield possible terms, at the model's sizes, of a symmetry with several members."""
        known: dict[tuple[Axis, float], Pattern] = {}
        runs: dict[tuple[Axis, float], None] = {}
        for term in symmetry.terms:
            pattern = describe(term.members)
            # Those of several layers of the proxy stand for the same ones here: each once.
            for name in names[term.axis.name]:
                slot = Axis(name, term.axis.kind), term.power
                if pattern is None:
                    runs[slot] = None
                else:
                    known[slot] = pattern
        lengths = [self.model.num_entries(axis) for axis, _ in known]
        for patterns in resized_patterns(list(known.values()), lengths) if known else ():
            placed = [
                Term(axis, power, pattern.members())
                for (axis, power), pattern in zip(known, patterns, strict=True)
            ]
            placed += self._runs(list(runs), placed)
            if len(placed) == len(known) + len(runs):
                yield placed

    def _as_a_whole(
        self, symmetry: Symmetry, names: Mapping[str, list[str]]
    ) -> Iterator[Sequence[Term]]:
        """Yield possible terms, at the model's sizes, of a symmetry with one member."""
        options: dict[tuple[Axis, float, Pattern | None], list[Term]] = {}
        for term in symmetry.terms:
            all_there_are = torch.equal(term.members < 0, self.proxy.absent(term.axis))
            pattern = None if all_there_are else describe(term.members)
            if pattern is None and not all_there_are:
                return
            for name in names[term.axis.name]:
                axis = Axis(name, term.axis.kind)
                if pattern is None:
                    whole = [-self.model.absent(axis).long()]
                else:
                    fits = resized_patterns([pattern], [self.model.num_entries(axis)])
                    whole = [fitted.members() for (fitted,) in fits]
                # Those of several layers of the proxy stand for the same ones here: each once.
                options[axis, term.power, pattern] = [Term(axis, term.power, m) for m in whole]
        yield from itertools.product(*options.values())

    def _runs(self, slots: Sequence[tuple[Axis, float]], placed: Sequence[Term]) -> Iterator[Term]:
        """Yield terms with contiguous entries, placed where the first member cancels best."""
        count = 1 + max(int(term.members.max()) for term in placed)
        first = torch.zeros(_NUM_PROJECTIONS)
        for term in placed:
            first += term.power * self.effects[term.axis][:, term.members == 0].sum(1)
        for axis, power in slots:
            length = self.model.num_entries(axis)
            if length < count:
                continue
            effects = power * self.effects[axis][:, : length - count + 1]
            start = int((first[:, None] + effects).norm(dim=0).argmin())
            members = torch.full((length,), -1)
            members[start : start + count] = torch.arange(count)
            yield Term(axis, power, members)

    def _holds(self, terms: Sequence[Term], count: int) -> bool:
        """Return whether the model's outputs stay unchanged along a symmetry."""
        change = torch.zeros(_NUM_PROJECTIONS, count + 1)
        size = torch.zeros(count + 1)
        for term in terms:
            effect = term.power * self.effects[term.axis]
            place = torch.where(term.members < 0, count, term.members)
            change.index_add_(1, place, effect)
            size.index_add_(0, place, effect.square().sum(0))
        left = change[:, :count].norm(dim=0) / size[:count].sqrt().clamp(min=1e-30)
        # Entries without any effect on the outputs confirm nothing.
        return float(left.max()) <= _CONFIRMED and bool(size[:count].any())


def _namesakes(
    symmetry: Symmetry, model: ModelCopy, *, as_named: bool
) -> Iterator[dict[str, list[str]]]:
    """Yield, for each place in the model, the names that correspond to those of the proxy.

    A symmetry inside one layer repeats in every layer that has all its parameters. One that spans
    layers applies to all parameters with these names in any layer, or only to these names if the
    model has as many layers as the proxy.
    """
    names = [term.axis.name for term in symmetry.terms]
    same = {name: namesakes([name], model.parameters) for name in names}
    numbers = {_numbers(name) for name in names} - {()}
    if len(numbers) > 1 and as_named:
        yield {name: [name] for name in names}
        return
    if len(numbers) > 1:
        if all(same.values()):
            yield same
        return
    # Without numbered names there is only the place of the proxy.
    places = {_numbers(n) for name in names if _numbers(name) for n in same[name]}
    for place in sorted(places) if numbers else [()]:
        at = {name: [_at(name, place)] for name in names}
        if all(name in model.parameters for (name,) in at.values()):
            yield at


def _signature(terms: Sequence[Term]) -> _Signature:
    """Return what identifies a symmetry: two with one signature are the same."""
    return frozenset((term.axis, term.power, term.block is None) for term in terms)


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(_NUMBER, name))


def _at(name: str, place: tuple[str, ...]) -> str:
    numbers = iter(place)
    return re.sub(_NUMBER, lambda _: next(numbers), name)


@dataclass(frozen=True)
class Pattern:
    """Dimensions of an axis, each with its use."""

    sizes: tuple[int, ...]
    uses: tuple[str, ...]
    """`member`: the member changes along it; `free`: it does not; a number: only this index."""

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
    """Return the pattern with the fewest dimensions that gives these members, or None."""
    parts = bool((members < 0).any())
    for count in range(1, _MOST_DIMENSIONS + 1):
        for sizes in _factorizations(len(members), count, least=min(2, len(members))):
            for uses in _uses(sizes, parts):
                pattern = Pattern(sizes, uses)
                if torch.equal(pattern.members(), members):
                    return pattern
    return None


def resized_patterns(
    patterns: Sequence[Pattern], lengths: Sequence[int]
) -> Iterator[list[Pattern]]:
    """Yield these patterns resized together for axes of other lengths.

    Members are shared: the dimensions along which the member changes have the same sizes in all
    patterns. The number of fused parts stays.
    """
    num_dimensions = max(len(pattern.member_sizes) for pattern in patterns)
    divisors = [d for d in range(1, min(lengths) + 1) if all(n % d == 0 for n in lengths)]
    for total in reversed(divisors):
        for sizes in _factorizations(total, num_dimensions, least=1):
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
    for free in _factorizations(rest, pattern.uses.count("free"), least=1):
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
        # Adjacent dimensions with the same use would be one dimension.
        if all(a != b or a.isdigit() for a, b in itertools.pairwise(uses)):
            yield uses


@cache
def _factorizations(number: int, count: int, least: int) -> tuple[tuple[int, ...], ...]:
    """Return the ways to write a number as a product of `count` ordered factors."""
    if count == 0:
        return ((),) if number == 1 else ()
    return tuple(
        (first, *rest)
        for first in range(least, number + 1)
        if number % first == 0
        for rest in _factorizations(number // first, count - 1, least)
    )

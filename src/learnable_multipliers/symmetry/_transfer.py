"""Symmetries found on a small twin of a model, carried over to the model itself.

Names differ in numbers (layers) alone, and index patterns carry over to other sizes where a
handful of sizes (heads, channels) is guessed; every guess is checked on the model itself, by the
derivative of its outputs at random weights. What is not confirmed there is not taken over, but
told as such.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._names import named_parameters
from learnable_multipliers.symmetry._axes import Axis
from learnable_multipliers.symmetry._index_patterns import Pattern, describe, resized
from learnable_multipliers.symmetry._probe import Probe, random_tokens
from learnable_multipliers.symmetry._symmetry import Symmetries, Symmetry, Term

# The derivative is taken in float32; a wrong guess is wrong by about 1.
_CONFIRMED = 1e-2
_NUM_PROJECTIONS = 2
_NUM_TOKENS = 32

# Axes and powers of a symmetry, and whether it has all entries of each.
_Place = frozenset[tuple[str, str, float, bool]]


def probe_like(
    twin: Probe, model: nn.Module, inputs: Any, carried: Mapping[str, Matrix] | None
) -> Probe:
    """Return a probe of a large model, made ready as that of its twin was."""
    inputs = random_tokens(model, most=_NUM_TOKENS) if inputs is None else inputs
    names = namesakes(twin.shifted, [name for name, _ in named_parameters(model)])
    return Probe(model, inputs, carried, dtype=torch.float32, shifted=names)


def namesakes(names: Iterable[str], among: Iterable[str]) -> list[str]:
    """Return the names that differ from some others in numbers alone, those of layers."""
    kinds = {_kind(name) for name in names}
    return [name for name in among if _kind(name) in kinds]


def transfer(found: Symmetries, twin: Probe, probe: Probe) -> Symmetries:
    """Return the symmetries of a model, given those of its twin."""
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
            moved = model.resized(symmetry, twin, names)
            # Layers may differ: what holds in one may be part of what holds in the other.
            if moved and (place not in carried or moved.num_members > carried[place].num_members):
                carried[place] = moved
    symmetries = tuple(carried.values())
    unconfirmed = tuple(dict.fromkeys(tried[place] for place in tried if place not in carried))
    nullity = sum(symmetry.num_members for symmetry in symmetries)
    return Symmetries(symmetries, nullity, {}, unconfirmed)


@dataclass
class _Slot:
    """A term that is to be placed on the model's own axis."""

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
        self, symmetry: Symmetry, twin: Probe, names: dict[str, list[str]]
    ) -> Symmetry | None:
        """Return a symmetry of the twin at the model's sizes, if the model confirms it."""
        if symmetry.num_members == 1:
            return self._as_a_whole(symmetry, twin, names)
        slots = [
            _Slot(axis, term.power, describe(term.members), self.probe.num_entries(axis))
            for term in symmetry.terms
            for axis in [Axis(names[term.axis.name][0], term.axis.kind)]
        ]
        known = [slot for slot in slots if slot.pattern is not None]
        if not known:
            return None
        patterns = [slot.pattern for slot in known if slot.pattern is not None]
        for fitted in resized(patterns, [slot.length for slot in known]):
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
        self, symmetry: Symmetry, twin: Probe, names: dict[str, list[str]]
    ) -> Symmetry | None:
        """Return a symmetry of one member at the model's sizes, if the model confirms it."""
        options: dict[tuple[Axis, float, Pattern | None], list[Term]] = {}
        for term in symmetry.terms:
            all_there_are = torch.equal(term.members < 0, twin.absent(term.axis))
            pattern = None if all_there_are else describe(term.members)
            if pattern is None and not all_there_are:
                return None
            for name in names[term.axis.name]:
                axis = Axis(name, term.axis.kind)
                # Those of several layers of the twin stand for the same ones here: each once.
                options[axis, term.power, pattern] = [
                    Term(axis, term.power, members)
                    for members in (
                        [self._everywhere(axis)]
                        if pattern is None
                        else [
                            fitted.members()
                            for (fitted,) in resized([pattern], [self.probe.num_entries(axis)])
                        ]
                    )
                ]
        for terms in itertools.product(*options.values()):
            confirmed = self._confirmed(symmetry, terms, 1)
            if confirmed is not None:
                return confirmed
        return None

    def _everywhere(self, axis: Axis) -> Tensor:
        members = torch.zeros(self.probe.num_entries(axis), dtype=torch.long)
        return members.masked_fill(self.probe.absent(axis), -1)

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
        # Where nothing has an effect, nothing is known.
        if float(left.max()) > _CONFIRMED or not size[:count].any():
            return None
        return Symmetry(symmetry.kind, tuple(terms), count)


def _namesakes(symmetry: Symmetry, probe: Probe) -> Iterator[dict[str, list[str]]]:
    """Yield for each place in the model the names that stand for those of the twin.

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
    """Return what a symmetry scales in the model: those of one place are one, told in two ways."""
    return frozenset(
        (name, term.axis.kind, term.power, term.block is None)
        for term in symmetry.terms
        for name in names.get(term.axis.name, [term.axis.name])
    )


def _renamed(symmetry: Symmetry, names: Mapping[str, list[str]]) -> tuple[Term, ...]:
    """Return a twin's terms under the names of the model, one for each."""
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

"""Symmetries as data, and their description in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor

from learnable_multipliers._names import layer_template
from learnable_multipliers.symmetry._axes import Axis

SymmetryKind = Literal["exchange", "multiplicative", "normalization"]


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


@dataclass(frozen=True)
class Symmetry:
    """A family of rescalings that leave the outputs unchanged, one per member (channel or head)."""

    kind: SymmetryKind
    """`exchange`: rows against columns of one matrix. `multiplicative`: scales of which only the
    product matters. `normalization`: a scale that a norm removes."""
    terms: tuple[Term, ...]
    num_members: int

    @property
    def exponents(self) -> dict[tuple[str, str, str | None], float]:
        """Powers by parameter, kind of axis, and block of entries (None for all of them)."""
        return {(term.axis.name, term.axis.kind, term.block): term.power for term in self.terms}

    def log_factors(self, log_scales: Tensor) -> dict[Axis, Tensor]:
        """Return the logs of `factors`."""
        logs: dict[Axis, Tensor] = {}
        for term in self.terms:
            # An axis may take part twice, as the rows of fused queries and keys do.
            padded = torch.cat((log_scales * term.power, log_scales.new_zeros(1)))
            logs[term.axis] = logs.get(term.axis, 0.0) + padded[term.members]
        return logs

    def factors(self, log_scales: Tensor) -> dict[Axis, Tensor]:
        """Return what entries of each axis are multiplied by, given log s of each member."""
        return {axis: logs.exp() for axis, logs in self.log_factors(log_scales).items()}

    @cached_property
    def per(self) -> str:
        """What a member is: the whole matrix, a channel, or a set of entries of that many."""
        if self.num_members == 1:
            return "as a whole"
        present = [term.members[term.members >= 0] for term in self.terms]
        sizes = [int(torch.bincount(members, minlength=1).max()) for members in present]
        if max(sizes) == 1:
            return "per channel"
        return f"in {self.num_members} sets of {'+'.join(map(str, sizes))}"

    @property
    def place(self) -> tuple[str, ...]:
        """The numbers that the names of its parameters share: usually that of a layer."""
        numbered = [n for term in self.terms if (n := _numbers(term.axis.name))]
        alike = zip(*numbered, strict=False)
        return tuple(numbers[0] for numbers in takewhile(lambda n: len(set(n)) == 1, alike))

    def __str__(self) -> str:
        if self.kind == "exchange":
            where = str(self.terms[0].axis).removeprefix("rows of ")
            return f"rows against columns of {where}, {self.per} (exchange)"
        return self.in_words([(_phrase(term, str(term.axis)), term.power) for term in self.terms])

    def in_words(self, phrases: Iterable[tuple[str, float]]) -> str:
        """Return it in words, given those for its terms and their powers."""
        phrases = list(phrases)
        ups = [words for words, power in phrases if power > 0]
        downs = [words for words, power in phrases if power < 0]
        sides = " against ".join(_listed(side) for side in (ups, downs) if side)
        return f"{sides}, {self.per} ({self.kind})"


@dataclass(frozen=True)
class Symmetries:
    """All scale symmetries of a model. Together they span every rescaling without effect.

    If they were found on a proxy, some may be missing: those in `unconfirmed`.
    """

    found: tuple[Symmetry, ...]
    nullity: int
    """Independent rescalings without effect, counted by the rank of the derivative."""
    silent: Mapping[Axis, int]
    """Number of entries that the inputs did not reach, by axis: nothing is known about them."""
    unconfirmed: tuple[str, ...] = ()
    """Symmetries of a proxy that were not confirmed on the model itself, in words: the model may or
    may not have them."""

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
            lines.append(self._not_reached())
        return "\n".join([*lines, *self._incomplete()])

    def _not_reached(self) -> str:
        entries = ", ".join(f"{count} {axis}" for axis, count in self.silent.items())
        return f"not reached by the inputs: {entries}"

    def _incomplete(self) -> list[str]:
        if not self.unconfirmed:
            return []
        words = "the list may be incomplete; found on a small proxy, but not confirmed here:"
        return [words, *(f"  {symmetry}" for symmetry in self.unconfirmed)]

    @property
    def num_exchanges(self) -> int:
        """Rescalings that are rows of a matrix against its own columns."""
        return sum(s.num_members for s in self.found if s.kind == "exchange")

    def alike(self) -> dict[str, tuple[Symmetry, ...]]:
        """Return them by their description: one entry for a symmetry that repeats in every layer.

        All exchanges are one entry. Names are cut to their last words if these are unique.
        """
        short = self._short_names()
        words_of: dict[str, str] = {}
        named: dict[str, tuple[Symmetry, ...]] = {}
        for symmetry in sorted(self.found, key=lambda s: s.kind != "exchange"):
            words = "rows against columns, as a whole (exchange)"
            if symmetry.kind != "exchange":
                own = symmetry.in_words(_phrases(symmetry, short))
                words = words_of.setdefault(_template(symmetry), own)
            named[words] = (*named.get(words, ()), symmetry)
        return named

    def powers(self) -> dict[str, dict[str, float]]:
        """Return axes and powers of each symmetry of `alike`, in words."""
        short = self._short_names()
        return {
            words: {"rows of each matrix": 1.0, "columns of each matrix": -1.0}
            if same[0].kind == "exchange"
            else dict(_phrases(same[0], short))
            for words, same in self.alike().items()
        }

    def _short_names(self) -> dict[str, str]:
        """Return the shortest unique ending of each name, whatever the layer."""
        names = {term.axis.name for symmetry in self.found for term in symmetry.terms}
        words = {name: name.removesuffix(".weight").split(".") for name in names}
        kinds = {layer_template(".".join(parts)) for parts in words.values()}
        short = {}
        for name, parts in words.items():
            for start in range(len(parts) - 1, -1, -1):
                ending = layer_template(".".join(parts[start:]))
                alone = sum(f".{kind}".endswith(f".{ending}") for kind in kinds) == 1
                if start == 0 or (alone and not ending.startswith("*")):
                    short[name] = ".".join(parts[start:])
                    break
        return short

    def summary(self) -> str:
        """Return a few lines, each with a number of rescalings.

        A symmetry that repeats in every layer is one line, and so are all exchanges.
        """
        lines = [
            (sum(symmetry.num_members for symmetry in same), _where(same) + words)
            for words, same in self.alike().items()
        ]
        beside = f", {self.nullity - self.num_exchanges:,} besides exchanges" * bool(lines)
        lines.append((self.nullity, f"independent rescalings in all{beside}"))
        if self.silent:
            lines.append((sum(self.silent.values()), f"scales {self._not_reached()}"))
        width = max(len(f"{count:,}") for count, _ in lines)
        rows = [f"{count:>{width},}  {words}" for count, words in lines]
        return "\n".join([*rows, *self._incomplete()])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "nullity": self.nullity,
            "exchanges": self.num_exchanges,
            "symmetries": [
                {
                    "kind": symmetry.kind,
                    "members": symmetry.num_members,
                    "per": symmetry.per,
                    "terms": [
                        {
                            "name": term.axis.name,
                            "axis": term.axis.kind,
                            "block": term.block,
                            "power": term.power,
                        }
                        for term in symmetry.terms
                    ],
                }
                for symmetry in self.found
            ],
            "silent": [
                {"name": axis.name, "axis": axis.kind, "entries": count}
                for axis, count in self.silent.items()
            ],
            "unconfirmed": list(self.unconfirmed),
        }


def _where(same: Sequence[Symmetry]) -> str:
    """Return in how many layers or matrices a symmetry repeats, or in which layer it is."""
    first = same[0]
    if first.kind == "exchange":
        return f"in each of {len(same)} matrices: "
    if not first.place:
        return ""
    layer = "layer" if len(first.place) == 1 else "place"
    here = f"in {layer} {'.'.join(first.place)}: "
    return here if len(same) == 1 else f"in each of {len(same)} {layer}s: "


def _phrase(term: Term, axis: str) -> str:
    power = abs(term.power)
    words = axis if term.block is None else f"{axis} [{term.block}]"
    return words if power == 1 else f"{words} to the power {power:g}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _numbers(name: str) -> list[str]:
    """Return the numbers in a name: that of its layer, then that of an expert if any."""
    return [part for part in name.split(".")[:-1] if part.isdigit()]


def _template(symmetry: Symmetry) -> str:
    """Return a description without layer numbers: symmetries that repeat share it."""
    terms = []
    for term in symmetry.terms:
        name = term.axis.name
        for _ in symmetry.place:
            name = re.sub(r"(^|\.)\d+\.", r"\1*.", name, count=1)
        terms.append(replace(term, axis=term.axis._replace(name=name)))
    return str(replace(symmetry, terms=tuple(terms)))


def _phrases(symmetry: Symmetry, short: Mapping[str, str]) -> list[tuple[str, float]]:
    """Return words for the terms; terms that differ only in a layer's number appear once."""

    def kind(term: Term) -> tuple[Any, ...]:
        return layer_template(term.axis.name), term.axis.kind, term.power, term.block

    alike: dict[tuple[Any, ...], list[Term]] = {}
    for term in symmetry.terms:
        alike.setdefault(kind(term), []).append(term)
    phrases = []
    for same in alike.values():
        term, name = same[0], same[0].axis.name
        spread = len(_numbers(name)) > len(symmetry.place)
        shown = name if spread and len(same) == 1 else short[name]
        layers = f" in {len(same)} layers" if len(same) > 1 else ""
        phrases.append((_phrase(term, str(Axis(shown, term.axis.kind))) + layers, term.power))
    return phrases

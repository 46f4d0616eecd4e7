"""Items of a benchmark: a question with choices, or an open question.

Few-shot examples before a question are items too, followed by their answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from learnable_multipliers._serialization import from_dict

Fields = dict[str, Any]
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Choice:
    """One candidate: a continuation scored after its context."""

    context: str
    continuation: str
    """As scored, with the space that separates it from the context."""
    characters: int
    """Length of the answer alone, which normalized accuracy divides by."""


@dataclass(frozen=True)
class Item:
    """One question."""

    choices: tuple[Choice, ...]
    """A single choice counts as right if it is the model's own greedy continuation."""
    right: int
    """Index of the right choice."""
    group: str = ""
    """Subject or paradigm, where a task has several."""
    preamble: str = ""
    """Text before the first example, or before the question if there is none."""

    @property
    def question(self) -> str:
        """The question without preamble and examples."""
        return self.choices[self.right].context

    @property
    def as_example(self) -> str:
        """The question followed by its answer, as a few-shot example."""
        return self.question + self.choices[self.right].continuation

    def with_prefix(self, text: str) -> Item:
        """Return the item with a text prepended to each context."""
        choices = (replace(choice, context=text + choice.context) for choice in self.choices)
        return replace(self, choices=tuple(choices))


@dataclass(frozen=True)
class OpenItem:
    """One question with a generated answer."""

    prompt: str
    solution: str
    """Text after the prompt in a few-shot example, including the leading space."""
    answer: str
    """The right answer alone."""
    group: str = ""
    preamble: str = ""
    num_choices: int = 0
    """Answers named in the prompt; 0 if it names none."""
    stops: tuple[str, ...] = ()
    """Stop strings: the answer ends before the first."""
    max_new_tokens: int = 0

    @property
    def question(self) -> str:
        """The question without preamble and examples."""
        return self.prompt

    @property
    def as_example(self) -> str:
        """The question followed by its solution, as a few-shot example."""
        return self.prompt + self.solution

    def with_prefix(self, text: str) -> OpenItem:
        """Return the item with a text prepended to its prompt."""
        return replace(self, prompt=text + self.prompt)


AnyItem = TypeVar("AnyItem", Item, OpenItem)


def cloze(
    context: str, answers: Sequence[str], right: int, group: str = "", preamble: str = ""
) -> Item:
    """Return an item whose answers follow one context, after a space."""
    choices = (Choice(context, f" {answer}", len(answer)) for answer in answers)
    return Item(tuple(choices), right, group, preamble)


def with_examples(
    items: Sequence[AnyItem], examples: Sequence[AnyItem], count: int
) -> list[AnyItem]:
    """Return the items with their preambles and the first `count` examples of their groups."""
    by_group: dict[str, list[AnyItem]] = {}
    for example in examples:
        by_group.setdefault(example.group, []).append(example)
    prefixed = []
    for item in items:
        shown = by_group.get(item.group, [])[:count]
        about = f" about {item.group}" if item.group else ""
        if len(shown) < count:
            raise ValueError(f"{count} examples{about} were requested, but there are {len(shown)}")
        if any(example.question == item.question for example in shown):
            raise ValueError(
                f"one of the examples{about} is also asked ({item.question[:40]!r}): examples must "
                "be other items"
            )
        prefix = item.preamble + "".join(f"{example.as_example}\n\n" for example in shown)
        prefixed.append(item.with_prefix(prefix))
    return prefixed


def evenly(items: Sequence[Kind], most: int) -> list[Kind]:
    """Return at most `most` items, evenly spaced, since files are often sorted by topic."""
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def checksum(items: Sequence[Item] | Sequence[OpenItem]) -> str:
    """Return a hash of the texts; two results are paired only if their hashes agree."""
    digest = hashlib.sha256()
    for item in items:
        if isinstance(item, OpenItem):
            about: list[object] = [item.prompt, item.answer, item.group]
            about += [item.stops, item.max_new_tokens]
        else:
            texts = [[choice.context, choice.continuation] for choice in item.choices]
            about = [texts, item.right, item.group]
        digest.update(json.dumps(about).encode())
    return digest.hexdigest()[:16]


# -- files -------------------------------------------------------------------------------------


def read_items(path: Path, parse: Callable[[Fields], AnyItem]) -> list[AnyItem]:
    """Return the items in a file of JSON lines; errors name file and line."""
    items = []
    for number, line in _lines(path):
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError("not an object")
            items.append(checked(parse(fields)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not items:
        raise ValueError(f"{path} holds no items: unpack the file again")
    return items


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file that are not blank."""
    return [line.strip() for _, line in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.is_file():
        raise ValueError(
            f"there is no {path}: give the folder that holds the evaluation sets with --eval-data "
            "(docs/evaluate.md lists their files)"
        )
    # splitlines would also split at other line separators inside a text.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                yield number, line.decode("utf8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason})") from error


def field(fields: Fields, name: str, kind: type[Kind]) -> Kind:
    """Return a field of a line; raise a ValueError if it is missing or not a `kind`."""
    if name not in fields:
        near = ", ".join(sorted(map(str, fields))) or "nothing"
        raise ValueError(f"no field {name!r} (there is {near})")
    return from_dict(kind, fields[name], name)


def checked(item: AnyItem) -> AnyItem:
    """Raise a ValueError for an item that cannot be scored."""
    if isinstance(item, OpenItem):
        if not item.prompt.strip() or not item.answer.strip():
            raise ValueError("the question or its answer is empty")
        return item
    if not 0 <= item.right < len(item.choices):
        raise ValueError(
            f"the right answer is choice {item.right}, counted from 0, of {len(item.choices)}"
        )
    for place, choice in enumerate(item.choices):
        if not choice.characters or not choice.continuation.strip():
            raise ValueError(f"choice {place} is empty")
    return item

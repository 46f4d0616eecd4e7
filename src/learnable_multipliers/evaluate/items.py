"""Items of a benchmark: a question with the texts that a model is to choose from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Fields = Mapping[str, Any]
Kind = TypeVar("Kind")
_WORDS: dict[type, str] = {str: "a text", int: "a whole number", list: "a list of texts"}


@dataclass(frozen=True)
class Choice:
    """One candidate: a text to be scored behind its context."""

    context: str
    continuation: str
    """As scored, with the space that separates it from the context."""
    characters: int
    """Length of the answer alone, which normalized accuracy divides by."""


@dataclass(frozen=True)
class Item:
    """One question."""

    choices: tuple[Choice, ...]
    """One alone is judged by whether it is what the model would write itself."""
    right: int
    """Index of the right choice."""
    group: str = ""
    """Subject or paradigm, where a task has several."""


def cloze(context: str, answers: Sequence[str], right: int, group: str = "") -> Item:
    """Return an item whose answers follow one context, after a space."""
    choices = (Choice(context, f" {answer}", len(answer)) for answer in answers)
    return Item(tuple(choices), right, group)


def evenly(items: Sequence[Kind], most: int) -> list[Kind]:
    """Return at most `most` items, at equal distances: files are often sorted by topic."""
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def checksum(items: Sequence[Item]) -> str:
    """Return a hash of the texts: two results are paired only if they are about the same."""
    digest = hashlib.sha256()
    for item in items:
        texts = [[choice.context, choice.continuation] for choice in item.choices]
        digest.update(json.dumps([texts, item.right, item.group]).encode())
    return digest.hexdigest()[:16]


# -- files -------------------------------------------------------------------------------------


def read_items(path: Path, parse: Callable[[Fields], Item]) -> list[Item]:
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
    # Not splitlines, which also splits at characters inside a text.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                yield number, line.decode("utf8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason})") from error


def field(fields: Fields, name: str, kind: type[Kind]) -> Kind:
    """Return a field of a line; a ValueError says what is wrong with it."""
    if name not in fields:
        near = ", ".join(sorted(map(str, fields))) or "nothing"
        raise ValueError(f"no field {name!r} (there is {near})")
    value = fields[name]
    # Not isinstance: a bool is an int.
    fits = type(value) is kind
    if kind is list:
        fits = fits and all(isinstance(text, str) for text in value)
    if not fits:
        raise ValueError(f"{name} is {repr(value)[:40]}, not {_WORDS[kind]}")
    return value


def checked(item: Item) -> Item:
    """Raise a ValueError for an item that cannot be scored."""
    if not 0 <= item.right < len(item.choices):
        raise ValueError(
            f"the right answer is choice {item.right}, counted from 0, of {len(item.choices)}"
        )
    for place, choice in enumerate(item.choices):
        if not choice.characters or not choice.continuation.strip():
            raise ValueError(f"choice {place} is empty")
    return item

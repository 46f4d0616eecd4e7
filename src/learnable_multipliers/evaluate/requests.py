"""Requests: items as tokens, and the file that takes them to the machine that scores.

Context and continuation are encoded as one text and split behind the tokens of the context, whose
trailing whitespace goes to the continuation: lm-eval's way. Needs the standard library alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from learnable_multipliers._atomic import write_output
from learnable_multipliers.evaluate.items import Item, checksum

FORMAT = 1
_IDS = ("context", "continuation")
_COUNTS = ("item", "choice", "bytes", "characters")


class Encoder(Protocol):
    """What a tokenizer must do."""

    prefix_id: int | None
    """Token that a text without context follows: the tokenizer's first or last of a document."""

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        """Return the ids of a text; `bare` leaves out what the tokenizer adds by itself."""
        ...


@dataclass(frozen=True)
class Request:
    """One continuation to be scored behind its context."""

    task: str
    item: int
    """Place of the item among those evaluated."""
    choice: int
    right: bool
    context: tuple[int, ...]
    continuation: tuple[int, ...]
    bytes: int
    """UTF-8 bytes of the continuation as scored."""
    characters: int
    """Length of the answer, which normalized accuracy divides by."""
    group: str = ""


@dataclass(frozen=True)
class RequestSet:
    """Requests with what is needed to trust them elsewhere."""

    requests: tuple[Request, ...]
    tokenizer: str | None
    """SHA-256 of the tokenizer.json that made the tokens, where there is one."""
    items: dict[str, str]
    """Checksum of each task's items."""


def build(task: str, items: Sequence[Item], encoder: Encoder) -> list[Request]:
    """Return the requests of a task's items."""
    return [
        Request(
            task,
            index,
            place,
            place == item.right,
            *encode_pair(choice.context, choice.continuation, encoder),
            len(choice.continuation.encode()),
            choice.characters,
            item.group,
        )
        for index, item in enumerate(items)
        for place, choice in enumerate(item.choices)
    ]


def build_set(
    tasks: dict[str, list[Item]], encoder: Encoder, tokenizer: str | None = None
) -> RequestSet:
    """Return the requests of several tasks."""
    built = (request for name, items in tasks.items() for request in build(name, items, encoder))
    return RequestSet(tuple(built), tokenizer, {n: checksum(items) for n, items in tasks.items()})


def encode_pair(
    context: str, continuation: str, encoder: Encoder
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of context and continuation, split as lm-eval does."""
    if not context:
        if encoder.prefix_id is None:
            raise ValueError(
                "the tokenizer names neither a first nor a last token of a document, which a text "
                "without context must follow: set bos_token or eos_token in tokenizer_config.json"
            )
        ids = tuple(encoder.encode(continuation, bare=True))
        # A tokenizer may write the prefix itself.
        if ids[:1] == (encoder.prefix_id,):
            return _not_empty(ids[:1], ids[1:], continuation)
        return _not_empty((encoder.prefix_id,), ids, continuation)
    kept = context.rstrip()
    whole = tuple(encoder.encode(context + continuation))
    before = tuple(encoder.encode(kept))
    return _not_empty(before, whole[len(before) :], continuation)


def _not_empty(
    context: tuple[int, ...], continuation: tuple[int, ...], text: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not context or not continuation:
        part = "continuation" if context else "context"
        raise ValueError(
            f"the tokenizer gives no token to the {part} at {text[:40]!r}: it has no ids for such "
            "text"
        )
    return context, continuation


# -- the file ----------------------------------------------------------------------------------


def write_requests(path: Path, found: RequestSet) -> None:
    """Write requests as JSON lines, behind a line that says what they are."""
    counts = Counter(request.task for request in found.requests)
    header = {
        "format": FORMAT,
        "tokenizer": found.tokenizer,
        "tasks": {name: [counts[name], items] for name, items in found.items.items()},
    }
    lines = [header, *map(vars, found.requests)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_output(path, text.encode())


def read_requests(path: Path) -> RequestSet:
    """Read what `write_requests` wrote; a ValueError names the line that is wrong."""
    if not path.is_file():
        raise ValueError(f"there is no file of requests {path}: write one with --requests-only")
    lines = path.read_bytes().splitlines()
    header = _on_line(path, 1, _header, lines[0] if lines else b"")
    requests = tuple(
        _on_line(path, number, _request, line) for number, line in enumerate(lines[1:], 2)
    )
    expected = {name: count for name, (count, _) in header["tasks"].items()}
    counts = Counter(request.task for request in requests)
    if counts != expected:
        raise ValueError(
            f"{path} is not whole: it holds {counts.total():,} requests, and should hold "
            f"{sum(expected.values()):,}: copy it again"
        )
    items = {name: checksum for name, (_, checksum) in header["tasks"].items()}
    return RequestSet(requests, header["tokenizer"], items)


def _on_line(path: Path, number: int, parse: Callable[[Any], Any], line: bytes) -> Any:
    try:
        return parse(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: not a request file of lrm ({error})") from error


def _header(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"the first line has no format {FORMAT}")
    tokenizer, tasks = data.get("tokenizer"), data.get("tasks")
    if not (tokenizer is None or isinstance(tokenizer, str)) or not isinstance(tasks, dict):
        raise ValueError("tokenizer or tasks are missing")
    for name, entry in tasks.items():
        if not isinstance(entry, list) or list(map(type, entry)) != [int, str]:
            raise ValueError(f"the entry of {name} is not a count and a checksum")
    return data


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _request(data: Any) -> Request:
    for name in _IDS:
        found = data[name] if isinstance(data, dict) and name in data else None
        if not isinstance(found, list) or not found or not all(map(_is_id, found)):
            raise ValueError(f"{name} is not a list of token ids")
    for name in _COUNTS:
        if type(data.get(name)) is not int or data[name] < (name in _COUNTS[2:]):
            raise ValueError(f"{name} is not a count")
    if type(data.get("right")) is not bool:
        raise ValueError("right is neither true nor false")
    if type(data.get("task")) is not str or type(data.get("group")) is not str:
        raise ValueError("task or group is no text")
    values: dict[str, Any] = {**data, **{name: tuple(data[name]) for name in _IDS}}
    return Request(**values)

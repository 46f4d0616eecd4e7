"""Requests: tokenized items, and a file to score them on another machine.

As in lm-eval, context and continuation are encoded as one text and split after the tokens of the
context, whose trailing whitespace moves to the continuation. Generation tasks have prompts instead;
the bytes of each token are stored with them, so generated tokens are decoded without a tokenizer.
Needs only the standard library.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from learnable_multipliers._atomic import write_output
from learnable_multipliers.evaluate.items import Item, OpenItem, checksum

FORMAT = 2


class Encoder(Protocol):
    """Interface of a tokenizer."""

    prefix_id: int | None
    """Token before a text without context: the tokenizer's BOS or EOS token."""
    end_ids: tuple[int, ...]
    """Tokens that end a document."""

    def token_bytes(self) -> tuple[bytes, ...]:
        """Return the bytes of each token's text; joined, they decode any ids."""
        ...

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        """Return the ids of a text; `bare` omits special tokens that the tokenizer adds."""
        ...


@dataclass(frozen=True)
class Request:
    """One continuation to score after its context."""

    task: str
    item: int
    """Index of the item among those evaluated."""
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
class Prompt:
    """One text to be continued."""

    task: str
    item: int
    """Index of the item among those evaluated."""
    prompt: tuple[int, ...]
    stops: tuple[str, ...]
    """Stop strings: the answer ends before the first."""
    max_new_tokens: int
    answer: str
    """The right answer."""
    group: str = ""
    num_choices: int = 0
    """Number of choices listed in the prompt; 0 if none."""


@dataclass(frozen=True)
class Vocabulary:
    """What decoding generated tokens needs."""

    token_bytes: tuple[bytes, ...] = ()
    """Bytes of each token's text; empty for special tokens."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a document."""


@dataclass(frozen=True)
class RequestSet:
    """Requests, with checksums that identify tokenizer and items."""

    requests: tuple[Request, ...]
    tokenizer: str | None
    """SHA-256 of the tokenizer.json, if there is one."""
    checksums: dict[str, str]
    """Checksum of each task's items."""
    shots: dict[str, int] = field(default_factory=dict)
    """Examples in each task's prompts."""
    prompts: tuple[Prompt, ...] = ()
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Empty without prompts."""


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


def build_prompts(task: str, items: Sequence[OpenItem], encoder: Encoder) -> list[Prompt]:
    """Return the requests of a generation task."""
    prompts = []
    for index, item in enumerate(items):
        ids = tuple(encoder.encode(item.prompt))
        if not ids:
            raise ValueError(f"the tokenizer gives no token to the prompt {item.prompt[:40]!r}")
        prompts.append(
            Prompt(
                task,
                index,
                ids,
                item.stops,
                item.max_new_tokens,
                item.answer,
                item.group,
                item.num_choices,
            )
        )
    return prompts


def build_set(
    tasks: Mapping[str, Sequence[Any]],
    encoder: Encoder,
    tokenizer: str | None = None,
    shots: Mapping[str, int] | None = None,
) -> RequestSet:
    """Return the requests of several tasks: of items with choices, or of open ones."""
    requests: list[Request] = []
    prompts: list[Prompt] = []
    vocabulary = Vocabulary()
    for name, items in tasks.items():
        if isinstance(items[0], OpenItem):
            prompts += build_prompts(name, items, encoder)
            if not vocabulary.token_bytes:
                vocabulary = vocabulary_of(encoder, items[0].prompt)
        else:
            requests += build(name, items, encoder)
    checksums = {name: checksum(items) for name, items in tasks.items()}
    counts = {name: (shots or {}).get(name, 0) for name in tasks}
    return RequestSet(tuple(requests), tokenizer, checksums, counts, tuple(prompts), vocabulary)


def vocabulary_of(encoder: Encoder, text: str) -> Vocabulary:
    """Return the vocabulary of an encoder; raise a ValueError if it does not decode `text`."""
    pieces = encoder.token_bytes()
    read = b"".join(pieces[index] for index in encoder.encode(text, bare=True))
    # Some tokenizers write a space before the first word.
    if read.decode(errors="replace").strip() != text.strip():
        raise ValueError(
            "the tokenizer does not decode to the text that it encoded, so generated tokens cannot "
            "be read: leave out the generation tasks"
        )
    return Vocabulary(pieces, encoder.end_ids)


def encode_pair(
    context: str, continuation: str, encoder: Encoder
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of context and continuation, split as lm-eval does."""
    if not context:
        if encoder.prefix_id is None:
            raise ValueError(
                "the tokenizer has neither a BOS nor an EOS token, which must precede a text "
                "without context: set bos_token or eos_token in tokenizer_config.json"
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


def write_requests(path: Path, request_set: RequestSet) -> None:
    """Write requests as JSON lines, after a header line."""
    counts = Counter(request.task for request in (*request_set.requests, *request_set.prompts))
    header = {
        "format": FORMAT,
        "tokenizer": request_set.tokenizer,
        "tasks": {
            n: [counts[n], request_set.shots[n], items]
            for n, items in request_set.checksums.items()
        },
        # One character for each byte, since a token may be part of a character.
        "pieces": [piece.decode("latin-1") for piece in request_set.vocabulary.token_bytes],
        "end_ids": request_set.vocabulary.end_ids,
    }
    lines = [header, *map(vars, (*request_set.requests, *request_set.prompts))]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_output(path, text.encode())


def read_requests(path: Path) -> RequestSet:
    """Read a file of `write_requests`; a ValueError names the invalid line."""
    if not path.is_file():
        raise ValueError(f"there is no file of requests {path}: write one with --requests-only")
    lines = path.read_bytes().splitlines()
    header = _on_line(path, 1, _header, lines[0] if lines else b"")
    requests = [_on_line(path, number, _request, line) for number, line in enumerate(lines[1:], 2)]
    expected = {name: count for name, (count, _, _) in header["tasks"].items()}
    counts = Counter(request.task for request in requests)
    if counts != expected:
        raise ValueError(
            f"{path} is incomplete: it holds {counts.total():,} requests, and should hold "
            f"{sum(expected.values()):,}: copy it again"
        )
    checksums = {name: checksum for name, (_, _, checksum) in header["tasks"].items()}
    shots = {name: count for name, (_, count, _) in header["tasks"].items()}
    pieces = tuple(text.encode("latin-1") for text in header["pieces"])
    return RequestSet(
        tuple(request for request in requests if isinstance(request, Request)),
        header["tokenizer"],
        checksums,
        shots,
        tuple(request for request in requests if isinstance(request, Prompt)),
        Vocabulary(pieces, tuple(header["end_ids"])),
    )


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
        if not isinstance(entry, list) or list(map(type, entry)) != [int, int, str]:
            raise ValueError(f"the entry of {name} is not two counts and a checksum")
    if not _all_of(data.get("pieces"), lambda piece: type(piece) is str and _is_bytes(piece)):
        raise ValueError("pieces is not a list of bytes, one character for each")
    if not _all_of(data.get("end_ids"), _is_count):
        raise ValueError("end_ids is not a list of token ids")
    return data


def _is_bytes(piece: str) -> bool:
    return all(ord(character) < 256 for character in piece)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _all_of(values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(fits, values))


def _request(data: Any) -> Request | Prompt:
    is_prompt = isinstance(data, dict) and "prompt" in data
    for name in ("prompt",) if is_prompt else ("context", "continuation"):
        ids = data[name] if isinstance(data, dict) and name in data else None
        if not ids or not _all_of(ids, _is_count):
            raise ValueError(f"{name} is not a list of token ids")
    positive = ("max_new_tokens",) if is_prompt else ("bytes", "characters")
    for name in (*positive, "item", "num_choices" if is_prompt else "choice"):
        if not _is_count(data.get(name)) or data[name] < (name in positive):
            raise ValueError(f"{name} is not a count")
    for name in ("task", "group", *(("answer",) if is_prompt else ())):
        if type(data.get(name)) is not str:
            raise ValueError(f"{name} is not a string")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }
    if is_prompt:
        if not _all_of(data.get("stops"), lambda stop: type(stop) is str and bool(stop)):
            raise ValueError("stops is not a list of strings")
        return Prompt(**values)
    if type(data.get("right")) is not bool:
        raise ValueError("right is neither true nor false")
    return Request(**values)

"""Changes to valid inputs: bytes, JSON, files in their place, and words of a command line.

Every function takes a random generator and depends on nothing else.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

# -- bytes -------------------------------------------------------------------------------------


def _flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _zero(content: bytes, draw: random.Random) -> bytes:
    start, length = draw.randrange(len(content)), draw.choice((1, 16, 512, 4096))
    middle = content[start : start + length]
    return content[:start] + bytes(len(middle)) + content[start + len(middle) :]


def _swap_blocks(content: bytes, draw: random.Random) -> bytes:
    a, b, c, d = sorted(draw.randrange(len(content) + 1) for _ in range(4))
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def _repeat_block(content: bytes, draw: random.Random) -> bytes:
    start, stop = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    return content[:stop] + content[start:stop] + content[stop:]


Change = Callable[[bytes, random.Random], bytes]
BYTES: dict[str, Change] = {
    "bits flipped": _flip,
    "truncated": _truncate,
    "range zeroed": _zero,
    "blocks swapped": _swap_blocks,
    "block repeated": _repeat_block,
}

# -- JSON --------------------------------------------------------------------------------------

# What json.dumps cannot write, put in as text afterwards.
_RAW = {
    "\ue000deep": "[" * 100_000 + "]" * 100_000,
    "\ue000deep object": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "\ue000huge": "9" * 5000,
    "\ue000overflow": "1e999",
    "\ue000long": '"' + "x" * 200_000 + '"',
}
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30),
    *("", "x", "5", "../x", "/dev/zero", "nan", "\u00e9\u6f22", "\ud800", "a\nb", "\x00", "{}"),
    *([], {}, [None], [[1]], {"": 1}, {"step": "x"}),
    *_RAW,
)


def _places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of everything inside a value."""
    if isinstance(value, dict):
        entries = value.items()
    else:
        entries = enumerate(value if isinstance(value, list) else ())
    for key, item in entries:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _parent(value: Any, path: tuple) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def _text(value: Any) -> bytes:
    text = json.dumps(value, indent=1)
    for mark, raw in _RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return text.encode()


def _retype(content: bytes, draw: random.Random) -> bytes:
    value = json.loads(content)
    path = draw.choice([*_places(value), ()])
    new = draw.choice(_VALUES)
    if not path:
        return _text(new)
    parent = _parent(value, path)
    old = parent[path[-1]]
    # A number of another type or size is the change that checks are most likely to miss.
    if isinstance(old, int | float) and draw.random() < 0.5:
        new = draw.choice((str(old), [old], -old, old + 1, old * 1000, float(old), None, 10**18))
    parent[path[-1]] = new
    return _text(value)


def _remove_key(content: bytes, draw: random.Random) -> bytes:
    value = json.loads(content)
    path = draw.choice([*_places(value)])
    del _parent(value, path)[path[-1]]
    return _text(value)


def _add_key(content: bytes, draw: random.Random) -> bytes:
    value = json.loads(content)
    path = draw.choice([*_places(value)])
    parent = _parent(value, path)
    new = draw.choice(_VALUES)
    if isinstance(parent, list):
        parent.insert(draw.randrange(len(parent) + 1), new)
    else:
        parent[draw.choice(("", "x", "format", "name", "step", "__class__"))] = new
    return _text(value)


def _repeat_key(content: bytes, draw: random.Random) -> bytes:
    value = json.loads(content)
    keys = [path[-1] for path in _places(value) if isinstance(path[-1], str)]
    mark = f"{json.dumps(draw.choice(keys))}: ".encode()
    return _text(value).replace(
        mark, mark + json.dumps(draw.choice((1, "x"))).encode() + b", " + mark, 1
    )


def _swap_values(content: bytes, draw: random.Random) -> bytes:
    value = json.loads(content)
    first, second = (draw.choice([*_places(value)]) for _ in range(2))
    # One inside the other would be gone after the exchange.
    if first[: len(second)] != second and second[: len(first)] != first:
        a, b = _parent(value, first), _parent(value, second)
        a[first[-1]], b[second[-1]] = b[second[-1]], a[first[-1]]
    return _text(value)


JSON: dict[str, Change] = {
    "value changed": _retype,
    "key removed": _remove_key,
    "key added": _add_key,
    "key repeated": _repeat_key,
    "values swapped": _swap_values,
}


def json_line(change: Change) -> Change:
    """Return a change of JSON applied to one line of many."""

    def changed(content: bytes, draw: random.Random) -> bytes:
        lines = content.splitlines(keepends=True)
        place = draw.randrange(len(lines))
        lines[place] = change(lines[place], draw).replace(b"\n", b"") + b"\n"
        return b"".join(lines)

    return changed


def tensor_header(change: Change) -> Change:
    """Return a change of JSON applied to the header of a safetensors file."""

    def changed(content: bytes, draw: random.Random) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header = change(content[8 : 8 + size], draw)
        return len(header).to_bytes(8, "little") + header + content[8 + size :]

    return changed


# -- files in their place ----------------------------------------------------------------------


def _unreadable(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")
    path.chmod(0)


def _linked(target: str) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return put


def _put(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.unlink()
        make(path)

    return put


PLACES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b"") and None,
    "a folder": _put(Path.mkdir),
    "a pipe": _put(os.mkfifo),
    "unreadable": _unreadable,
    "a dangling link": _linked("nowhere"),
    "a link to itself": lambda path: _linked(path.name)(path),
    "a device": _linked("/dev/zero"),
}

# -- words of a command line -------------------------------------------------------------------


class Option(NamedTuple):
    """An option of a command, as the fields of its config define it."""

    name: str
    kind: Any


def options(config: type, prefix: str = "") -> list[Option]:
    """Return all options of a config; positional and hidden fields have none."""
    found = []
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        kind, marks = hints[field.name], ()
        if hasattr(kind, "__metadata__"):
            marks, kind = kind.__metadata__, get_args(kind)[0]
        name = field.name.replace("_", "-")
        if tyro.conf.Positional in marks or tyro.conf.Suppress in marks or _hides(marks):
            continue
        # Compiling takes minutes.
        if name == "compile":
            continue
        if is_dataclass(kind):
            found += options(kind, f"{prefix}{name}.")
            continue
        if kind is bool and field.default is True:
            name = f"no-{name}"
        found.append(Option(f"--{prefix}{name}", kind))
    return found


def _hides(marks: tuple) -> bool:
    shown = [str(mark) for mark in marks]
    return any("Suppress" in mark or "Positional" in mark for mark in shown)


LONG_WORD = "x" * 5000
_ODD = ("", " ", "-", "--", "None", "\u00e9\u6f22", "\udcff", "a\nb", "\x1b[31m", "%s{}", LONG_WORD)
_WHOLE = (
    *("0", "-1", "1", "2", "3", "7", "1000000", "2147483648", str(2**63), "1e12", "1e30", "1.5"),
    *("nan", "inf", "1e1000000000", "1e-1000000000", "0x10", "1_0", "\uff19", "6/2", "1/0"),
)
_REAL = (
    *("0", "-0.0", "-1", "1", "0.5", "nan", "inf", "-inf", "1e308", "-1e308", "1e-320", "1e30"),
    *("1e999", "1e-8", "0x1p3", "1_0"),
)
PATHS = (
    *("", ".", "..", "new", "new/a/b/c", "text", "text/a.txt", "text/c.parquet", "data", "run"),
    *("data/manifest.json", "data/train-00000.bin", "run/checkpoints", "run/metrics.jsonl", "hf"),
    *("run/checkpoints/step-00000004", "mine", "mine/report.html", "pipe", "dangling", "loop"),
    *(
        "locked",
        "locked/x",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/null/x",
        "/",
        "/nowhere/x",
    ),
    *("a b", "\u00e9\u6f22", "\udcff", "a\nb", "\x1b[31m", "-x", "~", "x" * 300, "x/" * 3000),
    *("x.svg", "x.png", "x.pdf", "x.xyz", "hf:x", "hf:", "text/d.txt.gz", "tokenizer.json"),
)


def value_for(kind: Any, draw: random.Random) -> list[str]:
    """Return words for an option of a type: unusual ones, wrong ones, and some of another type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return value_for(next(one for one in inner if one is not type(None)), draw)
    if origin is tuple:
        count = draw.choice((0, 1, 2, 2, 2, 2, 3))
        return [word for _ in range(count) for word in value_for(inner[0], draw)]
    if draw.random() < 0.1:
        return [draw.choice((*_ODD, *_WHOLE, *_REAL, *PATHS))]
    if kind is bool:
        return draw.choice(([], [], ["True"], ["x"]))
    if origin is Literal:
        return [draw.choice((*map(str, inner), *map(str, inner), "", "x", str(inner[0]).upper()))]
    pool = {int: _WHOLE, float: _REAL, Path: PATHS}.get(kind, (*_ODD, *PATHS))
    return [draw.choice(pool)]


def change_words(
    words: list[str], first: int, known: list[Option], draw: random.Random
) -> tuple[str, list[str]]:
    """Return the name of a change and the changed words.

    Args:
        first: Words at the start that name the command and stay.
        known: The options of the command.
    """
    head, rest = words[:first], list(words[first:])
    # A flag and what follows it, or one argument.
    marks = [i for i, word in enumerate(rest) if word.startswith("--")]
    spans = [(i, next((j for j in marks if j > i), len(rest))) for i in marks]
    spans += [(i, i + 1) for i in range(marks[0] if marks else len(rest))]
    change = draw.choices(
        ("option set", "dropped", "repeated", "misspelt", "swapped", "replaced", "inserted"),
        (60, 8, 5, 7, 6, 9, 5),
    )[0]
    if change == "option set" and known:
        option = draw.choice(known)
        value = value_for(option.kind, draw)
        # From the end, so that the places before stay.
        for start, stop in sorted(spans, reverse=True):
            if rest[start] == option.name:
                del rest[start:stop]
        return change, [*head, *rest, option.name, *value]
    if not rest:
        return "inserted", [*head, draw.choice((*_ODD, *PATHS, "--help", "--x"))]
    start, stop = draw.choice(spans)
    place = draw.randrange(len(rest))
    if change == "dropped":
        cut = (start, stop) if draw.random() < 0.6 else (place, place + 1)
        del rest[cut[0] : cut[1]]
    elif change == "repeated":
        rest += rest[start:stop]
    elif change == "misspelt":
        word = rest[place] or "x"
        at = draw.randrange(len(word))
        rest[place] = (
            word[:at] + draw.choice(("", word[at] * 2, "x", "-", "\u00e9")) + word[at + 1 :]
        )
    elif change == "swapped":
        other = draw.randrange(len(rest))
        rest[place], rest[other] = rest[other], rest[place]
    elif change == "replaced":
        rest[place] = draw.choice((*_ODD, *_WHOLE, *PATHS, rest[draw.randrange(len(rest))]))
    else:
        change = "inserted"
        rest.insert(place, draw.choice((*_ODD, *PATHS, "--help", "--x", "--out")))
    return change, [*head, *rest]

"""Dataclasses to plain data and back, and strict parsing of untrusted JSON.

Python's own JSON parser keeps the last of two equal keys, reads 1e999 as infinity and accepts NaN.
Here a text has one meaning, or a ValueError says what is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import math
import stat
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any, Literal

_WORDS: dict[type, str] = {int: "a whole number", str: "a string", bool: "true or false"}
# JSON has no numbers for these, so they are written as strings.
NOT_FINITE = ("nan", "inf", "-inf")
MAX_BYTES = 64 << 20
"""Size of the largest JSON file that is read."""


def to_dict(value: Any) -> Any:
    """Return a dataclass as plain data for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_dict(item) for item in value]
    if isinstance(value, dict):
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def with_floats(value: Any) -> Any:
    """Return plain data with NaN and infinities as floats; the inverse of `to_dict`."""
    if isinstance(value, dict):
        return {key: with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value


def from_dict(kind: Any, values: Any, where: str = "config") -> Any:
    """Return a `kind` made from plain data; a ValueError names what does not fit, and where.

    Every field must be present, and no others: missing fields are not guessed.
    """
    if dataclasses.is_dataclass(kind):
        return _dataclass_from(kind, values, where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return values
    if origin in (typing.Union, types.UnionType):
        (given,) = (arg for arg in args if arg is not type(None))
        return None if values is None else from_dict(given, values, where)
    if origin is Literal:
        _expect(values in args, where, values, f"one of {', '.join(map(str, args))}")
        return values
    if origin is tuple and args[-1] is Ellipsis:
        _expect(isinstance(values, list | tuple), where, values, "a list")
        return tuple(from_dict(args[0], v, f"{where}[{i}]") for i, v in enumerate(values))
    if origin is tuple:
        fits = isinstance(values, list | tuple) and len(values) == len(args)
        _expect(fits, where, values, f"a list of {len(args)}")
        parts = enumerate(zip(args, values, strict=True))
        return tuple(from_dict(arg, value, f"{where}[{i}]") for i, (arg, value) in parts)
    if origin is list:
        _expect(isinstance(values, list), where, values, "a list")
        return [from_dict(args[0], value, f"{where}[{i}]") for i, value in enumerate(values)]
    if origin is dict:
        _expect(isinstance(values, dict), where, values, "a mapping")
        return {
            from_dict(args[0], key, f"a key of {where}"): from_dict(args[1], v, f"{where}.{key}")
            for key, v in values.items()
        }
    if kind is Path:
        _expect(isinstance(values, str), where, values, "a path")
        return Path(values)
    if kind is float:
        # JSON writes whole numbers without a point, and a bool is an int.
        is_number = isinstance(values, int | float) and not isinstance(values, bool)
        _expect(is_number or values in NOT_FINITE, where, values, "a number")
        return float(values)
    # Not isinstance: a bool is an int, and neither stands for the other.
    _expect(type(values) is kind, where, values, _WORDS[kind])
    if kind is int:
        # No machine counts further, and a float cannot hold every longer number.
        _expect(-(1 << 63) <= values < 1 << 64, where, values, "a whole number to fit into 64 bits")
    return values


_hints = cache(typing.get_type_hints)
"""Types of the fields of a class: they are compiled from text, which takes a while."""


def _dataclass_from(kind: Any, values: Any, where: str) -> Any:
    _expect(isinstance(values, dict), where, values, "a mapping")
    hints = _hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    for what, keys in (("unknown keys", set(values) - known), ("no", known - set(values))):
        if keys:
            raise ValueError(f"{where} has {what}: {', '.join(sorted(map(str, keys)))}")
    return kind(
        **{key: from_dict(hints[key], value, f"{where}.{key}") for key, value in values.items()}
    )


def _expect(fits: bool, where: str, value: Any, wanted: str) -> None:
    if not fits:
        shown = repr(value)
        raise ValueError(f"{where} is {shown[:60]}{'...' * (len(shown) > 60)}, not {wanted}")


# -- JSON --------------------------------------------------------------------------------------


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    return parse_object(read_bytes(path), path.name)


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes."""
    regular_size(path)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path.name} has more than {limit:,} bytes")
    return content


def regular_size(path: Path) -> int:
    """Return the size of a file; raise a ValueError for a link, folder, pipe or device."""
    found = path.lstat()
    # Opening a pipe could block forever, and a link may lead anywhere.
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path.name} is not a plain file")
    return found.st_size


def parse_object(content: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object; `name` is the file's, for error messages."""
    try:
        found = json.loads(
            content.decode("utf8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_finite,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} is not a JSON object")
    return found


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number

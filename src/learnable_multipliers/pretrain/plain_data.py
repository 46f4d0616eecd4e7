"""Dataclasses as plain data for JSON and back, checked field by field on the way back."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from pathlib import Path
from typing import Any, Literal, NoReturn

_WORDS: dict[type, str] = {int: "a whole number", str: "a text", bool: "true or false"}
# JSON has no word for these: where a number is due, these texts stand for them.
_NOT_FINITE = ("nan", "inf", "-inf")


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


def from_dict(kind: Any, values: Any, where: str = "config") -> Any:
    """Return a `kind` made from plain data; a ValueError names what does not fit, and where.

    Every field must be there, and nothing else: what a file leaves out is not guessed.
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
        if values not in args:
            _refuse(where, values, f"one of {', '.join(map(str, args))}")
        return values
    if origin is tuple:
        if not isinstance(values, list | tuple) or len(values) != len(args):
            _refuse(where, values, f"a list of {len(args)}")
        parts = enumerate(zip(args, values, strict=True))
        return tuple(from_dict(arg, value, f"{where}[{i}]") for i, (arg, value) in parts)
    if origin is list:
        if not isinstance(values, list):
            _refuse(where, values, "a list")
        return [from_dict(args[0], value, f"{where}[{i}]") for i, value in enumerate(values)]
    if origin is dict:
        _refuse_no_mapping(values, where)
        return {key: from_dict(args[1], value, f"{where}.{key}") for key, value in values.items()}
    return _leaf_from(kind, values, where)


def _dataclass_from(kind: Any, values: Any, where: str) -> Any:
    _refuse_no_mapping(values, where)
    hints = typing.get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    for what, keys in (("unknown keys", set(values) - known), ("no", known - set(values))):
        if keys:
            raise ValueError(f"{where} has {what}: {', '.join(sorted(map(str, keys)))}")
    return kind(
        **{key: from_dict(hints[key], value, f"{where}.{key}") for key, value in values.items()}
    )


def _leaf_from(kind: Any, value: Any, where: str) -> Any:
    if kind is Path:
        if not isinstance(value, str):
            _refuse(where, value, "a path")
        return Path(value)
    if kind is float:
        if value in _NOT_FINITE:
            return float(value)
        # JSON writes whole numbers without a point.
        if not isinstance(value, int | float) or isinstance(value, bool):
            _refuse(where, value, "a number")
        return float(value)
    # Not isinstance: a bool is an int, and neither stands for the other.
    if type(value) is not kind:
        _refuse(where, value, _WORDS[kind])
    return value


def _refuse_no_mapping(values: Any, where: str) -> None:
    if not isinstance(values, dict):
        _refuse(where, values, "a mapping")


def _refuse(where: str, value: Any, wanted: str) -> NoReturn:
    shown = repr(value)
    raise ValueError(f"{where} is {shown[:60]}{'...' * (len(shown) > 60)}, not {wanted}")

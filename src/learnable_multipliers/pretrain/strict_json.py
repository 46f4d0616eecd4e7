"""JSON from files that nobody vouches for: one meaning or a ValueError, and no surprises in size.

Python's own reader takes the last of two equal keys, makes infinity of 1e999 and reads NaN.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

LARGEST = 64 << 20
"""Bytes of the largest file that is read."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    return parse_object(read_plain(path), path.name)


def read_plain(path: Path, largest: int = LARGEST) -> bytes:
    """Return what is in a plain file; a ValueError for a link, a pipe, or too large a file."""
    refuse_odd_file(path)
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path.name} has more than {largest:,} bytes")
    return content


def refuse_odd_file(path: Path) -> os.stat_result:
    """Return what the system says of a file; a ValueError if it is a link, folder or device."""
    found = path.lstat()
    # Opened, a pipe would wait for ever, and a link may lead anywhere.
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path.name} is not a plain file")
    return found


def parse_object(content: bytes, name: str) -> dict[str, Any]:
    """Return the object that a text in JSON is; `name` is the file's, for complaints."""
    try:
        found = json.loads(
            content.decode("utf8"),
            object_pairs_hook=_without_twins,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds no object")
    return found


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number

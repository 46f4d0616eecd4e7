"""SHA-256 of files, and self-checksummed JSON: SHA-256 for files, CRC-32 for lines.

Checksums detect accidents, not an attacker, who can write a new checksum too.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

KEY = "sha256"
_LINE_END = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\n?')
_LINE_END_BYTES = len(', "crc32": "00000000"}')


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def add_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with the SHA-256 of its content added."""
    return content | {KEY: _digest(content)}


def verify_checksum(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a JSON object without its checksum; raise a ValueError if its content was changed."""
    content = {key: value for key, value in fields.items() if key != KEY}
    if KEY not in fields:
        raise ValueError(f"{name} carries no {KEY} of its content")
    if fields[KEY] != _digest(content):
        raise ValueError(f"{name} was changed after it was written: its {KEY} does not fit")
    return content


def read_verified(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file with a checksum; errors name the file."""
    # Opening a pipe could block forever.
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, or not a file")
    try:
        fields = json.loads(path.read_bytes())
        if not isinstance(fields, dict):
            raise ValueError(f"{path} holds a {type(fields).__name__}, not a JSON object")
        return verify_checksum(fields, str(path))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    # Bytes that are not UTF-8 are not JSON either.
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def encode_line(record: dict[str, Any]) -> bytes:
    """Return a non-empty record as a line of JSON that ends with its CRC-32."""
    text = json.dumps(record, allow_nan=False)[:-1].encode()
    return text + b', "crc32": "%08x"}\n' % zlib.crc32(text)


def decode_line(line: bytes) -> dict[str, Any]:
    """Return the record of a line; raise a ValueError if the line was changed."""
    line = line.removesuffix(b"\n")
    text, end = line[:-_LINE_END_BYTES], _LINE_END.fullmatch(line[-_LINE_END_BYTES:])
    if end is None:
        raise ValueError("it does not end with its crc32")
    if int(end[1], 16) != zlib.crc32(text):
        raise ValueError("it was changed after it was written: its crc32 does not fit")
    return json.loads(text + b"}")


def _digest(content: dict[str, Any]) -> str:
    """Return a SHA-256 that does not depend on white space or the order of keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

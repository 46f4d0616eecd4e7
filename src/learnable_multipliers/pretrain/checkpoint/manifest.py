"""The manifest of a checkpoint: name, size and SHA-256 of each file, and of the manifest itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from learnable_multipliers._checksum import file_sha256
from learnable_multipliers._serialization import parse_object, read_bytes, regular_size
from learnable_multipliers.pretrain.checkpoint.tensor_files import SUFFIX

FORMAT = 2
"""Version of manifest.json and state.json."""
MANIFEST = "manifest.json"
STATE = "state.json"

Files = dict[str, dict[str, Any]]
"""Size and checksum, by file name."""


def to_json(data: dict[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def manifest_json(files: Files) -> bytes:
    """Return a manifest with its own checksum, so damage to it is not blamed on other files."""
    content = {"format": FORMAT, "files": files}
    return to_json(content | {"sha256": hashlib.sha256(to_json(content)).hexdigest()})


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size and checksum of a file."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def check_format(name: str, version: Any) -> None:
    """Raise a ValueError unless a file is of the format that this release reads."""
    if type(version) is not int or version != FORMAT:
        raise ValueError(f"{name} is of format {version!r}, this release reads format {FORMAT}")


def problem(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, else None."""
    try:
        return _mismatch(path, _read(path / MANIFEST))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except ValueError as error:
        return str(error)
    # A read error of the disk is damage like any other.
    except OSError as error:
        return f"it cannot be read: {error}"


def _read(path: Path) -> dict[str, tuple[int, str]]:
    """Return sizes and checksums by file name; a ValueError says what is wrong."""
    content = read_bytes(path)
    fields = parse_object(content, MANIFEST)
    check_format(MANIFEST, fields.get("format"))
    try:
        files: Files = fields["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} does not list files with bytes and sha256") from error
    # Compared as bytes: any other spelling or extra key is not what was written.
    if content != manifest_json(files):
        raise ValueError(f"{MANIFEST} is damaged: it is not as it was written")
    if STATE not in expected:
        raise ValueError(f"{MANIFEST} does not name {STATE}")
    for name in expected:
        if name != STATE and not name.endswith(SUFFIX):
            raise ValueError(f"{MANIFEST} names {name!r}, which is not a file of a checkpoint")
    return expected


def _mismatch(path: Path, expected: dict[str, tuple[int, str]]) -> str | None:
    """Return where the files of a checkpoint differ from the manifest."""
    # Names are compared with the folder's entries and never followed out of it.
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    if odd := sorted(present ^ set(expected)):
        what = f"is not in {MANIFEST}" if odd[0] in present else "is missing"
        more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        return f"{odd[0]!r} {what}{more}"
    for name, (size, digest) in expected.items():
        actual = regular_size(path / name)
        if actual != size:
            return f"{name} has {actual} bytes, not {size}"
        if file_sha256(path / name) != digest:
            return f"{name} is damaged: its SHA-256 is not the one it was written with"
    return None

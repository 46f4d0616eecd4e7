"""Checkpoints that cannot be lost: safetensors and JSON, written aside and published by a rename.

A checkpoint is a folder `step-00001000` with its files and a manifest of their names, sizes and
checksums. It is never changed after the rename; older ones go only when newer ones are complete.
Loading verifies and falls back to the newest good one. No pickle on the way in or out.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from learnable_multipliers.pretrain.durable import make_folder, sync
from learnable_multipliers.pretrain.strict_json import (
    parse_object,
    read_object,
    read_plain,
    refuse_odd_file,
)

MANIFEST = "manifest.json"
_STATE = "state.json"
_TENSORS = ".safetensors"
_NAME = re.compile(r"step-([0-9]{8,18})")
_FORMAT = 1
# The first one had no checksum of its own.
_MANIFEST_KEYS = {1: {"format", "files"}, 2: {"format", "files", "sha256"}}


class CheckpointError(OSError):
    """A checkpoint could not be saved or read."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    step: int
    state: dict[str, Any]
    """Plain data: counters, positions, the model's config."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Tensors by file (without suffix) and name."""


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint and return its folder; then remove all but the newest `keep`.

    One process at a time writes to a folder of checkpoints. One that is there already and good is
    left as it is: the same step of the same run.
    """
    target = folder / _name(checkpoint.step)
    aside = folder / f".{target.name}.{uuid.uuid4().hex[:8]}"
    try:
        make_folder(folder)
        if target.exists():
            if problem(target) is None:
                # The process that renamed it may have been killed before it was on disk.
                sync(folder)
                return target
            set_aside(target)
        _clear_leftovers(folder)
        aside.mkdir()
        _write_files(aside, checkpoint)
        aside.rename(target)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        kept = steps(folder)
        left = f"the newest one is that of step {kept[-1]}" if kept else "there is none yet"
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} could not be saved to {folder}: {error}. "
            f"Earlier checkpoints are untouched ({left}); make room or choose another folder, "
            "then go on with --resume"
        ) from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    try:
        _prune(folder, checkpoint.step, keep)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} is saved, but an older one could not be "
            f"removed from {folder}: {error}"
        ) from error
    return target


def steps(folder: Path) -> list[int]:
    """Return the steps that checkpoints were published for, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    # Each step has one name; a folder called otherwise is none of ours.
    return sorted(int(match[1]) for match in found if match and match[0] == _name(int(match[1])))


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, verified."""
    wrong = problem(path)
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be used: {wrong}")
    # The files are as they were written; that need not have been by us.
    try:
        state = read_object(path / _STATE)
        step, form = state.pop("step", None), state.pop("format", None)
        if type(step) is not int or form != _FORMAT:
            raise ValueError(f"{_STATE} tells no step, or is not of format {_FORMAT}")
        tensors = {file.stem: _read_tensors(file) for file in sorted(path.glob(f"*{_TENSORS}"))}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    return Checkpoint(step, state, tensors)


def load_newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Return the newest good checkpoint, and what is wrong with newer ones."""
    wrong: dict[int, str] = {}
    # Looked for anew each time: while one is read, a run may publish others and remove it.
    while untried := [step for step in steps(folder) if step not in wrong]:
        step = untried[-1]
        path = folder / _name(step)
        try:
            found = load(path)
        except CheckpointError as error:
            wrong[step] = str(error)
            continue
        if found.step == step:
            return found, [wrong[later] for later in sorted(wrong, reverse=True) if later > step]
        wrong[step] = f"{path} cannot be used: it holds step {found.step}"
    if wrong:
        raise CheckpointError("no checkpoint is good: " + "; ".join(wrong.values()))
    raise CheckpointError(f"{folder} holds no checkpoint to go on from")


def problem(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; None if every file is as it was written."""
    try:
        return _mismatch(path, _read_manifest(path / MANIFEST))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except ValueError as error:
        return str(error)
    # A disk that fails to read is damage like any other.
    except OSError as error:
        return f"it cannot be read: {error}"


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be used, so that it does not count as one; nothing is lost.

    Else it would be among the newest that are kept, and a good one would go in its place.
    """
    return path.rename(path.with_name(f"damaged-{path.name}-{uuid.uuid4().hex[:8]}"))


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Set aside all checkpoints after a step: those passed over when a run goes on from it."""
    return [set_aside(folder / _name(later)) for later in steps(folder) if later > step]


def tidy(folder: Path, newest: int, keep: int) -> None:
    """Do what a process that was killed at its last save could not: remove leftovers and old ones.

    A run that goes on would do so at its next save; one that is complete has none.
    """
    _clear_leftovers(folder)
    _prune(folder, newest, keep)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _write_files(aside: Path, checkpoint: Checkpoint) -> None:
    """Write what is in a checkpoint and bring it to disk, the manifest last."""
    for name, tensors in checkpoint.tensors.items():
        contiguous = {key: value.contiguous() for key, value in tensors.items()}
        save_file(contiguous, aside / f"{name}{_TENSORS}")
    state = {"format": _FORMAT, "step": checkpoint.step, **checkpoint.state}
    (aside / _STATE).write_bytes(_text(state))
    files = {path.name: _fingerprint(path) for path in sorted(aside.iterdir())}
    (aside / MANIFEST).write_bytes(_manifest(files))
    for path in (*aside.iterdir(), aside):
        sync(path)


def _manifest(files: dict[str, dict[str, Any]]) -> bytes:
    """Return a manifest that vouches for itself: a bit turned in it blames no other file."""
    content = {"format": 2, "files": files}
    return _text(content | {"sha256": hashlib.sha256(_text(content)).hexdigest()})


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return sizes and checksums by name of file; a ValueError says what is wrong with them."""
    content = read_plain(path)
    manifest = parse_object(content, MANIFEST)
    form = manifest.get("format")
    if type(form) is not int or form not in _MANIFEST_KEYS:
        known = " and ".join(map(str, _MANIFEST_KEYS))
        raise ValueError(f"{MANIFEST} is of format {form!r}, this release reads {known}")
    try:
        expected = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} does not list files with bytes and sha256") from error
    own = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(_text(own)).hexdigest()
    # Spelled otherwise, or with more in it, it is not what was written, whatever it says.
    as_written = set(manifest) == _MANIFEST_KEYS[form] and content == _text(manifest)
    if not as_written or manifest.get("sha256", digest) != digest:
        raise ValueError(f"{MANIFEST} is damaged: it is not as it was written")
    if _STATE not in expected:
        raise ValueError(f"{MANIFEST} does not name {_STATE}")
    odd = [name for name in expected if name != _STATE and not name.endswith(_TENSORS)]
    if odd:
        raise ValueError(f"{MANIFEST} names {odd[0]!r}, which is no file of a checkpoint")
    return expected


def _mismatch(path: Path, expected: dict[str, tuple[int, str]]) -> str | None:
    """Say where the files of a checkpoint differ from the sizes and checksums expected."""
    # Names are compared, never followed: those that lead elsewhere are in no folder.
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    for what, names in (
        ("is missing", set(expected) - present),
        (f"is not in {MANIFEST}", present - set(expected)),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            return f"{min(names)!r} {what}{more}"
    for name, (size, digest) in expected.items():
        found = refuse_odd_file(path / name).st_size
        if found != size:
            return f"{name} has {found} bytes, not {size}"
        if _fingerprint(path / name)["sha256"] != digest:
            return f"{name} is damaged: its SHA-256 is not the one it was written with"
    return None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Return copies of the tensors in a file, so that nothing depends on the file any more."""
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    # Offsets and sizes are checked when it is opened, shapes and types when a tensor is made.
    except (SafetensorError, RuntimeError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def _prune(folder: Path, newest: int, keep: int) -> None:
    for step in [step for step in steps(folder) if step <= newest][:-keep]:
        old = folder / _name(step)
        # Out of sight first: a half-removed folder must not look like a checkpoint.
        gone = folder / f".{old.name}.{uuid.uuid4().hex[:8]}"
        old.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _clear_leftovers(folder: Path) -> None:
    """Remove what a killed process was writing or removing: each is as large as a checkpoint."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _text(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}

"""Checkpoints that cannot be lost: safetensors and JSON, written aside and published by a rename.

A checkpoint is a folder `step-00001000` with its files and a manifest of their checksums. It is
never changed after the rename; older ones go only when newer ones are complete. Loading verifies
and falls back to the newest good one. No pickle on the way in or out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

MANIFEST = "manifest.json"
_STATE = "state.json"
_NAME = re.compile(r"step-([0-9]{8,})")
_FORMAT = 1


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
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            if problem(target) is None:
                return target
            set_aside(target)
        _clear_leftovers(folder)
        aside.mkdir()
        for name, tensors in checkpoint.tensors.items():
            save_file(
                {key: value.contiguous() for key, value in tensors.items()},
                aside / f"{name}.safetensors",
            )
        _write(aside / _STATE, {"format": _FORMAT, "step": checkpoint.step, **checkpoint.state})
        files = {path.name: _fingerprint(path) for path in sorted(aside.iterdir())}
        _write(aside / MANIFEST, {"format": _FORMAT, "files": files})
        for path in (*aside.iterdir(), aside):
            _sync(path)
        aside.rename(target)
        _sync(folder)
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
    _prune(folder, checkpoint.step, keep)
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
    tensors: dict[str, dict[str, Tensor]] = {}
    # The files are as they were written; that need not have been by this release.
    try:
        state = _read(path / _STATE)
        step, form = state.pop("step", None), state.pop("format", None)
        if type(step) is not int or form != _FORMAT:
            raise ValueError(f"{_STATE} tells no step, or is not of format {_FORMAT}")
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                tensors[file.stem] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    return Checkpoint(step, state, tensors)


def load_newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Return the newest good checkpoint, and what is wrong with newer ones."""
    wrong: list[str] = []
    for step in reversed(steps(folder)):
        path = folder / _name(step)
        try:
            found = load(path)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        if found.step == step:
            return found, wrong
        wrong.append(f"{path} cannot be used: it holds step {found.step}")
    if wrong:
        raise CheckpointError("no checkpoint is good: " + "; ".join(wrong))
    raise CheckpointError(f"{folder} holds no checkpoint to go on from")


def problem(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; None if every file is as it was written."""
    try:
        manifest = _read(path / MANIFEST)
        files = manifest["files"]
        expected = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    if manifest.get("format") != _FORMAT:
        return f"{MANIFEST} is of format {manifest.get('format')!r}, this release reads {_FORMAT}"
    if _STATE not in expected:
        return f"{MANIFEST} does not name {_STATE}"
    try:
        return _mismatch(path, expected)
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


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _mismatch(path: Path, expected: dict[str, tuple[Any, Any]]) -> str | None:
    """Say where the files of a checkpoint differ from the sizes and checksums expected."""
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    if present != set(expected):
        odd = sorted(present ^ set(expected))
        return f"files and {MANIFEST} disagree about {', '.join(odd)}"
    for name, (size, digest) in expected.items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            return f"{name} is not a plain file"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
        if _fingerprint(file)["sha256"] != digest:
            return f"{name} is damaged: its SHA-256 is not the one it was written with"
    return None


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


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a ValueError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no object")
    return found


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf8")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

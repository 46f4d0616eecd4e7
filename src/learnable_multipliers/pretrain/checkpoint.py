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
_NAME = re.compile(r"step-(\d{8,})")
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
    """Write a checkpoint and return its folder; then remove all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{checkpoint.step:08d}"
    if target.exists():
        if problem(target) is None:
            return target
        shutil.rmtree(target)
    aside = folder / f".{target.name}.{uuid.uuid4().hex[:8]}"
    try:
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
    _prune(folder, keep)
    return target


def steps(folder: Path) -> list[int]:
    """Return the steps that checkpoints were published for, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, verified."""
    wrong = problem(path)
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be used: {wrong}")
    state = json.loads((path / _STATE).read_text(encoding="utf8"))
    tensors: dict[str, dict[str, Tensor]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors[file.stem] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    state.pop("format")
    return Checkpoint(state.pop("step"), state, tensors)


def load_newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Return the newest good checkpoint, and what is wrong with newer ones."""
    wrong: list[str] = []
    for step in reversed(steps(folder)):
        path = folder / f"step-{step:08d}"
        trouble = problem(path)
        if trouble is None:
            return load(path), wrong
        wrong.append(f"{path}: {trouble}")
    if wrong:
        raise CheckpointError("no checkpoint is good: " + "; ".join(wrong))
    raise CheckpointError(f"{folder} holds no checkpoint to go on from")


def problem(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; None if every file is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf8"))
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


def _prune(folder: Path, keep: int) -> None:
    for step in steps(folder)[:-keep]:
        old = folder / f"step-{step:08d}"
        # Out of sight first: a half-removed folder must not look like a checkpoint.
        gone = folder / f".{old.name}.{uuid.uuid4().hex[:8]}"
        old.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


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

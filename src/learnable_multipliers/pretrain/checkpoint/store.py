"""Checkpoints: safetensors and JSON, written under a hidden name and published by a rename.

A checkpoint is a folder `step-00001000` with its files and a manifest of their names, sizes and
SHA-256 checksums. It never changes after the rename, and older ones are removed only when newer
ones are complete. Loading verifies, and falls back to the newest good checkpoint. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from learnable_multipliers.pretrain.checkpoint import tensor_files
from learnable_multipliers.pretrain.checkpoint.atomic import (
    hidden,
    make_folder,
    publish,
    remove,
    sync,
)
from learnable_multipliers.pretrain.checkpoint.tensor_files import SUFFIX, Tensors
from learnable_multipliers.pretrain.distributed import ALONE, World
from learnable_multipliers.pretrain.plain_data import (
    parse_object,
    read_bytes,
    read_object,
    regular_size,
)

FORMAT = 2
"""Version of manifest.json and state.json."""
MANIFEST = "manifest.json"
_STATE = "state.json"
_NAME = re.compile(r"step-([0-9]{8,18})")
_MANIFEST_KEYS = {"format", "files", "sha256"}

Files = dict[str, dict[str, Any]]
"""Size and checksum, by file name."""


class CheckpointError(OSError):
    """A checkpoint could not be saved or read."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint."""

    step: int
    state: dict[str, Any]
    """Plain data: counters, positions, the model's config."""
    tensors: Tensors = field(default_factory=dict)


# -- saving ------------------------------------------------------------------------------------


def save(folder: Path, checkpoint: Checkpoint, keep: int, world: World = ALONE) -> Path:
    """Write a checkpoint and return its folder; then remove all but the newest `keep`.

    All ranks of one run call this together. An existing good checkpoint of the step is left as it
    is: it is the same step of the same run.
    """
    target = folder / _name(checkpoint.step)
    partial = world.broadcast(hidden(target))
    try:
        exists = world.run_on_all(lambda: world.is_first and _prepare(folder, target, partial))
        if world.broadcast(exists):
            return target
        own = world.run_on_all(lambda: _write_tensors(partial, checkpoint.tensors, world))
        files = {name: entry for files in world.all_gather(own) for name, entry in files.items()}
        world.run_on_all(lambda: world.is_first and _publish(partial, target, checkpoint, files))
    except BaseException as error:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        saved = steps(folder)
        left = f"the newest one is that of step {saved[-1]}" if saved else "there is none yet"
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} could not be saved to {folder}: {error}. "
            f"Earlier checkpoints are untouched ({left}); make room or choose another folder, "
            "then go on with --resume"
        ) from error
    try:
        world.run_on_all(lambda: world.is_first and _prune(folder, checkpoint.step, keep))
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} is saved, but an older one could not be "
            f"removed from {folder}: {error}"
        ) from error
    return target


def _prepare(folder: Path, target: Path, partial: Path) -> bool:
    """Make the folder to write to; return whether the checkpoint exists already."""
    make_folder(folder)
    if target.exists():
        if problem(target) is None:
            # The process that renamed it may have been killed before the name was on disk.
            sync(folder)
            return True
        set_aside(target)
    _clear_leftovers(folder)
    partial.mkdir()
    return False


def _write_tensors(partial: Path, tensors: Tensors, world: World) -> Files:
    """Write and sync this rank's tensors; return size and checksum of each file."""
    files = {}
    for group, named in tensors.items():
        path = partial / tensor_files.file_name(group, world)
        tensor_files.write(path, named, world)
        sync(path)
        files[path.name] = _fingerprint(path)
    return files


def _publish(partial: Path, target: Path, checkpoint: Checkpoint, files: Files) -> None:
    state = {"format": FORMAT, "step": checkpoint.step, **checkpoint.state}
    (partial / _STATE).write_bytes(_to_json(state))
    files = {**files, _STATE: _fingerprint(partial / _STATE)}
    (partial / MANIFEST).write_bytes(_manifest(dict(sorted(files.items()))))
    publish(partial, target, (partial / _STATE, partial / MANIFEST))


# -- loading -----------------------------------------------------------------------------------


def load(path: Path, like: Tensors | None = None, *, verified: bool = False) -> Checkpoint:
    """Read one checkpoint, after verifying it unless that was done.

    Args:
        like: Tensors as this rank holds them; only this rank's part is read.
    """
    wrong = None if verified else problem(path)
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be used: {wrong}")
    # The files match the manifest, but the manifest may have been written by anyone.
    try:
        state = read_object(path / _STATE)
        _check_format(_STATE, state.pop("format", None))
        step = state.pop("step", None)
        if type(step) is not int:
            raise ValueError(f"{_STATE} has no step")
        tensors = tensor_files.read(path, like)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    return Checkpoint(step, state, tensors)


def load_newest(
    folder: Path, like: Tensors | None = None, world: World = ALONE
) -> tuple[Checkpoint, list[str]]:
    """Return the newest good checkpoint, and what is wrong with newer ones."""
    found, wrong = load_newest_of(lambda: steps(folder), folder, like, world)
    if found is not None:
        return found, wrong
    if not world.is_first:
        raise CheckpointError(f"{folder} holds no good checkpoint: the first rank says why")
    if wrong:
        raise CheckpointError("no checkpoint is good: " + "; ".join(wrong))
    raise CheckpointError(f"{folder} holds no checkpoint to go on from")


def load_newest_of(
    candidates: Callable[[], list[int]],
    folder: Path,
    like: Tensors | None = None,
    world: World = ALONE,
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest good checkpoint of some steps or None, and what is wrong with newer ones.

    The first rank verifies and chooses; all others load the same one.
    """
    found, wrong = None, []
    try:
        if world.is_first:
            found, wrong = _newest_good(candidates, folder, like)
    finally:
        step = world.broadcast(found and found.step)
    if step is None:
        return None, wrong
    path = folder / _name(step)
    return world.run_on_all(lambda: found or load(path, like, verified=True)), wrong


def _newest_good(
    candidates: Callable[[], list[int]], folder: Path, like: Tensors | None
) -> tuple[Checkpoint | None, list[str]]:
    wrong: dict[int, str] = {}
    # Listed again each time: while one is read, a run may publish others and remove it.
    while untried := [step for step in candidates() if step not in wrong]:
        step = max(untried)
        path = folder / _name(step)
        try:
            found = load(path, like)
        except CheckpointError as error:
            wrong[step] = str(error)
            continue
        if found.step == step:
            return found, [wrong[later] for later in sorted(wrong, reverse=True) if later > step]
        wrong[step] = f"{path} cannot be used: it holds step {found.step}"
    return None, list(wrong.values())


# -- verification ------------------------------------------------------------------------------


def problem(path: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if every file is as it was written."""
    try:
        return _mismatch(path, _read_manifest(path / MANIFEST))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except ValueError as error:
        return str(error)
    # A read error of the disk is damage like any other.
    except OSError as error:
        return f"it cannot be read: {error}"


def _check_format(name: str, found: Any) -> None:
    if type(found) is not int or found != FORMAT:
        raise ValueError(f"{name} is of format {found!r}, this release reads format {FORMAT}")


def _manifest(files: Files) -> bytes:
    """Return a manifest with a checksum of itself, so that damage to it blames no other file."""
    content = {"format": FORMAT, "files": files}
    return _to_json(content | {"sha256": hashlib.sha256(_to_json(content)).hexdigest()})


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return sizes and checksums by file name; a ValueError says what is wrong."""
    content = read_bytes(path)
    manifest = parse_object(content, MANIFEST)
    _check_format(MANIFEST, manifest.get("format"))
    try:
        files: Files = manifest["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} does not list files with bytes and sha256") from error
    # Compared as bytes: any other spelling or extra key is not what was written.
    if set(manifest) != _MANIFEST_KEYS or content != _manifest(files):
        raise ValueError(f"{MANIFEST} is damaged: it is not as it was written")
    if _STATE not in expected:
        raise ValueError(f"{MANIFEST} does not name {_STATE}")
    odd = [name for name in expected if name != _STATE and not name.endswith(SUFFIX)]
    if odd:
        raise ValueError(f"{MANIFEST} names {odd[0]!r}, which is no file of a checkpoint")
    return expected


def _mismatch(path: Path, expected: dict[str, tuple[int, str]]) -> str | None:
    """Return where the files of a checkpoint differ from the manifest."""
    # Names are compared with the folder's entries and never followed out of it.
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    for what, names in (
        ("is missing", set(expected) - present),
        (f"is not in {MANIFEST}", present - set(expected)),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            return f"{min(names)!r} {what}{more}"
    for name, (size, digest) in expected.items():
        found = regular_size(path / name)
        if found != size:
            return f"{name} has {found} bytes, not {size}"
        if _fingerprint(path / name)["sha256"] != digest:
            return f"{name} is damaged: its SHA-256 is not the one it was written with"
    return None


# -- retention ---------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """Return the steps of all published checkpoints, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    # Each step has one name; a folder with another spelling is not ours.
    return sorted(int(match[1]) for match in found if match and match[0] == _name(int(match[1])))


def num_to_keep(saved: Sequence[int], every: int, keep: int) -> int:
    """Return how many of the newest checkpoints include `keep` at multiples of `every`."""
    scheduled = [place for place, step in enumerate(reversed(saved), 1) if step % every == 0]
    return scheduled[keep - 1] if len(scheduled) >= keep else max(len(saved), keep)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be used, so that it no longer counts as one.

    It would otherwise be kept as one of the newest, and a good one removed in its place.
    """
    return path.rename(path.with_name(f"damaged-{path.name}-{uuid.uuid4().hex[:8]}"))


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Set aside all checkpoints after the step from which a run continues."""
    return [set_aside(folder / _name(later)) for later in steps(folder) if later > step]


def tidy(folder: Path, newest: int, keep: int) -> None:
    """Finish the clean-up of a save that was killed."""
    _clear_leftovers(folder)
    _prune(folder, newest, keep)


def _prune(folder: Path, newest: int, keep: int) -> None:
    for step in [step for step in steps(folder) if step <= newest][:-keep]:
        remove(folder / _name(step))


def _clear_leftovers(folder: Path) -> None:
    """Remove the partial folders of killed processes; the run's lock keeps other runs out."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _to_json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}

"""Checkpoints: safetensors and JSON, written under a hidden name and published by a rename.

A checkpoint is a folder `step-00001000` with its files and a manifest of their names, sizes and
SHA-256 checksums. It never changes after the rename, and older ones are removed only when newer
ones are complete. Loading verifies, and falls back to the newest good checkpoint. No pickle.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from learnable_multipliers._atomic import fsync, hidden_sibling
from learnable_multipliers._serialization import read_object
from learnable_multipliers.pretrain import atomic_folder
from learnable_multipliers.pretrain.checkpoint import manifest, tensor_files
from learnable_multipliers.pretrain.checkpoint.manifest import STATE, Files
from learnable_multipliers.pretrain.checkpoint.tensor_files import Tensors
from learnable_multipliers.pretrain.distributed import SINGLE_PROCESS, World

_NAME = re.compile(r"step-([0-9]{8,18})")


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


def save(folder: Path, checkpoint: Checkpoint, keep: int, world: World = SINGLE_PROCESS) -> Path:
    """Write a checkpoint and return its folder; then remove all but the newest `keep`.

    All ranks of one run call this together. An existing good checkpoint of the step is left as it
    is: it is the same step of the same run.
    """
    target = folder / _name(checkpoint.step)
    partial = world.broadcast(hidden_sibling(target))
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
        left = f"; the newest one is that of step {saved[-1]}, untouched" if saved else ""
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} could not be saved to {folder}: {error}"
            f"{left}"
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
    atomic_folder.make_folder(folder)
    if target.exists():
        if manifest.problem(target) is None:
            # The process that renamed it may have been killed before the name was on disk.
            fsync(folder)
            return True
        set_aside(target)
    _clear_leftovers(folder)
    partial.mkdir()
    return False


def _write_tensors(partial: Path, tensors: Tensors, world: World) -> Files:
    """Write and sync this rank's tensors; return size and checksum of each file."""
    files = {}
    for group, named in tensors.items():
        path = tensor_files.write(partial, group, named, world)
        fsync(path)
        files[path.name] = manifest.fingerprint(path)
    return files


def _publish(partial: Path, target: Path, checkpoint: Checkpoint, files: Files) -> None:
    state, listing = partial / STATE, partial / manifest.MANIFEST
    state.write_bytes(
        manifest.to_json({"format": manifest.FORMAT, "step": checkpoint.step, **checkpoint.state})
    )
    files = {**files, STATE: manifest.fingerprint(state)}
    listing.write_bytes(manifest.manifest_json(dict(sorted(files.items()))))
    atomic_folder.publish(partial, target, (state, listing))


# -- loading -----------------------------------------------------------------------------------


def load(path: Path, like: Tensors | None = None, *, verified: bool = False) -> Checkpoint:
    """Read one checkpoint, after verifying it unless that was done.

    Args:
        like: Tensors as this rank holds them; only this rank's part is read.
    """
    wrong = None if verified else manifest.problem(path)
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be used: {wrong}")
    # The files match the manifest, but the manifest itself is untrusted.
    try:
        state = read_object(path / STATE)
        manifest.check_format(STATE, state.pop("format", None))
        step = state.pop("step", None)
        if type(step) is not int:
            raise ValueError(f"{STATE} has no step")
        tensors = tensor_files.read(path, like)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    return Checkpoint(step, state, tensors)


def load_newest(
    folder: Path, like: Tensors | None = None, world: World = SINGLE_PROCESS
) -> tuple[Checkpoint, list[str]]:
    """Return the newest valid checkpoint, and what is wrong with newer ones."""
    newest, wrong = load_newest_of(lambda: steps(folder), folder, like, world)
    if newest is not None:
        return newest, wrong
    if not world.is_first:
        raise CheckpointError(f"{folder} holds no good checkpoint: the first rank says why")
    if wrong:
        raise CheckpointError("no checkpoint is good: " + "; ".join(wrong))
    raise CheckpointError(f"{folder} holds no checkpoint to resume from")


def load_newest_of(
    candidates: Callable[[], list[int]], folder: Path, like: Tensors | None, world: World
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest good checkpoint of some steps or None, and what is wrong with newer ones.

    The first rank verifies and chooses; all others load the same one.
    """
    newest, wrong = None, []
    try:
        if world.is_first:
            newest, wrong = _newest_good(candidates, folder, like)
    finally:
        step = world.broadcast(newest and newest.step)
    if step is None:
        return None, wrong
    path = folder / _name(step)
    return world.run_on_all(lambda: newest or load(path, like, verified=True)), wrong


def _newest_good(
    candidates: Callable[[], list[int]], folder: Path, like: Tensors | None
) -> tuple[Checkpoint | None, list[str]]:
    wrong: dict[int, str] = {}
    # Listed again each time: while one is read, a run may publish others and remove it.
    while untried := [step for step in candidates() if step not in wrong]:
        step = max(untried)
        path = folder / _name(step)
        try:
            loaded = load(path, like)
        except CheckpointError as error:
            wrong[step] = str(error)
            continue
        if loaded.step == step:
            return loaded, [wrong[later] for later in sorted(wrong, reverse=True) if later > step]
        wrong[step] = f"{path} cannot be used: it holds step {loaded.step}"
    return None, list(wrong.values())


def load_last(folder: Path, count: int) -> Iterator[Checkpoint]:
    """Yield the last `count` checkpoints, oldest first; all of them must exist and be valid."""
    saved = steps(folder)
    if not 1 <= count <= len(saved):
        raise ValueError(f"{count} checkpoints were requested, but {folder} holds {len(saved)}")
    return (load(folder / _name(step)) for step in saved[-count:])


# -- retention ---------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """Return the steps of all published checkpoints, in order."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    # Ignore folders that spell the step in another way.
    return sorted(int(match[1]) for match in matches if match and match[0] == _name(int(match[1])))


def num_to_keep(saved: Sequence[int], every: int, keep: int) -> int:
    """Return how many of the newest checkpoints to keep, so `keep` are at multiples of `every`."""
    scheduled = [place for place, step in enumerate(reversed(saved), 1) if step % every == 0]
    return scheduled[keep - 1] if len(scheduled) >= keep else max(len(saved), keep)


def set_aside(path: Path, why: str = "damaged") -> Path:
    """Rename a checkpoint so that it no longer counts as one.

    Otherwise it would be kept as one of the newest, and a valid one removed instead.
    """
    return path.rename(path.with_name(f"{why}-{path.name}-{uuid.uuid4().hex[:8]}"))


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Set aside all checkpoints after the step from which a run continues."""
    return [set_aside(folder / _name(later)) for later in steps(folder) if later > step]


def tidy(folder: Path, newest: int, keep: int) -> None:
    """Finish the clean-up of a save that was killed."""
    _clear_leftovers(folder)
    _prune(folder, newest, keep)


def _prune(folder: Path, newest: int, keep: int) -> None:
    for step in [step for step in steps(folder) if step <= newest][:-keep]:
        atomic_folder.remove(folder / _name(step))


def _clear_leftovers(folder: Path) -> None:
    """Remove the partial folders of killed processes; the run's lock keeps other runs out."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"

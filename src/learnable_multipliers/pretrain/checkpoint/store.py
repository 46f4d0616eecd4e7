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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from learnable_multipliers.pretrain.checkpoint import tensor_files
from learnable_multipliers.pretrain.checkpoint.atomic import make_folder, sync
from learnable_multipliers.pretrain.checkpoint.tensor_files import SUFFIX, Tensors
from learnable_multipliers.pretrain.distributed import ALONE, World
from learnable_multipliers.pretrain.strict_json import (
    parse_object,
    read_object,
    read_plain,
    refuse_odd_file,
)

MANIFEST = "manifest.json"
_STATE = "state.json"
_NAME = re.compile(r"step-([0-9]{8,18})")
_FORMAT = 1
# The first one had no checksum of its own.
_MANIFEST_KEYS = {1: {"format", "files"}, 2: {"format", "files", "sha256"}}


Files = dict[str, dict[str, Any]]
"""Size and checksum, by name."""


class CheckpointError(OSError):
    """A checkpoint could not be saved or read."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    step: int
    state: dict[str, Any]
    """Plain data: counters, positions, the model's config."""
    tensors: Tensors = field(default_factory=dict)


def save(folder: Path, checkpoint: Checkpoint, keep: int, world: World = ALONE) -> Path:
    """Write a checkpoint and return its folder; then remove all but the newest `keep`.

    One run at a time writes to a folder of checkpoints, all its ranks together. A checkpoint that
    is there already and good is left as it is: the same step of the same run.
    """
    target = folder / _name(checkpoint.step)
    (number,) = world.tell([uuid.uuid4().int & 0xFFFFFFFF])
    aside = folder / f".{target.name}.{number:08x}"
    try:
        is_there = world.together(lambda: world.is_first and _make_ready(folder, target, aside))
        if world.tell([is_there])[0]:
            return target
        files = world.together(lambda: _write_tensors(aside, checkpoint.tensors, world))
        files = _of_all(files, world)
        world.together(lambda: world.is_first and _publish(aside, target, checkpoint, files))
    except (OSError, SafetensorError) as error:
        _give_up(aside, world)
        kept = steps(folder)
        left = f"the newest one is that of step {kept[-1]}" if kept else "there is none yet"
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} could not be saved to {folder}: {error}. "
            f"Earlier checkpoints are untouched ({left}); make room or choose another folder, "
            "then go on with --resume"
        ) from error
    except BaseException:
        _give_up(aside, world)
        raise
    try:
        world.together(lambda: world.is_first and _prune(folder, checkpoint.step, keep))
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


def load(path: Path, like: Tensors | None = None, *, verified: bool = False) -> Checkpoint:
    """Read one checkpoint, verified unless it has been.

    Args:
        like: Tensors as this rank holds them, so that it reads no more than its part.
    """
    wrong = None if verified else problem(path)
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be used: {wrong}")
    # The files are as they were written; that need not have been by us.
    try:
        state = read_object(path / _STATE)
        step, form = state.pop("step", None), state.pop("format", None)
        if type(step) is not int or form != _FORMAT:
            raise ValueError(f"{_STATE} tells no step, or is not of format {_FORMAT}")
        tensors = tensor_files.read(path, like)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    return Checkpoint(step, state, tensors)


def load_newest(
    folder: Path, like: Tensors | None = None, world: World = ALONE
) -> tuple[Checkpoint, list[str]]:
    """Return the newest good checkpoint, and what is wrong with newer ones.

    The first rank verifies and chooses; all others take the same one.
    """
    found, wrong = load_newest_of(lambda: steps(folder), folder, like, world)
    if found is not None:
        return found, wrong
    if not world.is_first:
        raise CheckpointError(f"{folder} holds no good checkpoint: the first rank says why")
    if wrong:
        raise CheckpointError("no checkpoint is good: " + "; ".join(wrong))
    raise CheckpointError(f"{folder} holds no checkpoint to go on from")


def load_newest_of(
    among: Callable[[], list[int]],
    folder: Path,
    like: Tensors | None = None,
    world: World = ALONE,
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest good one of some steps, None without any, and what is wrong with others."""
    found, wrong = None, []
    try:
        if world.is_first:
            found, wrong = _newest_good(among, folder, like)
    finally:
        (step,) = world.tell([-1 if found is None else found.step])
    if step < 0:
        return None, wrong
    path = folder / _name(step)
    return world.together(lambda: found or load(path, like, verified=True)), wrong


def _newest_good(
    among: Callable[[], list[int]], folder: Path, like: Tensors | None
) -> tuple[Checkpoint | None, list[str]]:
    wrong: dict[int, str] = {}
    # Looked for anew each time: while one is read, a run may publish others and remove it.
    while untried := [step for step in among() if step not in wrong]:
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


def _make_ready(folder: Path, target: Path, aside: Path) -> bool:
    """Make room to write to, and tell whether the checkpoint is there already."""
    make_folder(folder)
    if target.exists():
        if problem(target) is None:
            # The process that renamed it may have been killed before it was on disk.
            sync(folder)
            return True
        set_aside(target)
    _clear_leftovers(folder)
    aside.mkdir()
    return False


def _write_tensors(aside: Path, tensors: Tensors, world: World) -> Files:
    """Write this rank's tensors, bring them to disk, and return the fingerprints of its files."""
    files = {}
    for group, named in tensors.items():
        path = aside / tensor_files.file_name(group, world)
        tensor_files.write(path, named, world)
        sync(path)
        files[path.name] = _fingerprint(path)
    return files


def _of_all(files: Files, world: World) -> Files:
    """Return the fingerprints of all ranks' files; each has the same ones under its own names."""
    content = b"".join(
        f["bytes"].to_bytes(8, "big") + bytes.fromhex(f["sha256"]) for f in files.values()
    )
    found = {}
    for rank, told in enumerate(world.gather(content)):
        for place, name in enumerate(files):
            entry = told[40 * place : 40 * (place + 1)]
            of_rank = tensor_files.name_on(name, rank, world)
            found[of_rank] = {
                "bytes": int.from_bytes(entry[:8], "big"),
                "sha256": entry[8:].hex(),
            }
    return found


def _publish(aside: Path, target: Path, checkpoint: Checkpoint, files: Files) -> None:
    """Complete what ranks have written and give it its name."""
    state = {"format": _FORMAT, "step": checkpoint.step, **checkpoint.state}
    (aside / _STATE).write_bytes(_text(state))
    files = {**files, _STATE: _fingerprint(aside / _STATE)}
    (aside / MANIFEST).write_bytes(_manifest(dict(sorted(files.items()))))
    for path in (aside / _STATE, aside / MANIFEST, aside):
        sync(path)
    aside.rename(target)
    sync(target.parent)


def _give_up(aside: Path, world: World) -> None:
    if world.is_first:
        shutil.rmtree(aside, ignore_errors=True)


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
    odd = [name for name in expected if name != _STATE and not name.endswith(SUFFIX)]
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

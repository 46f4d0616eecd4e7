"""Crash-safe atomic writes of folders, and locks.

Datasets, exports and checkpoints are folders written under a hidden name and published by a rename.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from learnable_multipliers._atomic import fsync, hidden_sibling, new_parents

try:
    import fcntl
except ImportError:  # Windows has no flock.
    fcntl = None


def make_folder(path: Path) -> None:
    """Make a folder and its parents, and flush the entry of each new one to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync(folder.parent)


def lock(path: Path) -> int | None:
    """Lock a file or folder until the returned descriptor is closed.

    The system releases it when the process ends. Returns None where locks are not supported, and
    raises BlockingIOError if another process holds the lock.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        # Some network file systems have no locks. Locking is best effort.
        return None
    return descriptor


# -- folders ------------------------------------------------------------------------------------


def publish(partial: Path, target: Path, unsynced: Iterable[Path]) -> None:
    """Flush what is not on disk yet, rename the folder to `target`, and flush its new name."""
    for path in (*unsynced, partial):
        fsync(path)
    partial.rename(target)
    fsync(target.parent)


def remove(folder: Path) -> None:
    """Remove a folder; it is hidden first, so a crash never leaves half of it visible."""
    gone = hidden_sibling(folder)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def new_folder(
    target: Path, *, check_replaceable: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """Yield a folder to write to; it becomes `target` at the end, or is removed on any error.

    Enter it before any work, so it fails early if the folder cannot be created.

    Args:
        check_replaceable: Raises a FileExistsError unless an existing `target` may be replaced;
            None: nothing may be.
    """
    clear_leftovers(target)
    _check_target(target, check_replaceable)
    partial, old = hidden_sibling(target), hidden_sibling(target, "old")
    with new_parents(target), _errors_naming(target, partial):
        partial.mkdir()
        descriptor = lock(partial)
        try:
            yield partial
            _check_target(target, check_replaceable)
            if target.exists():
                target.rename(old)
            try:
                publish(partial, target, partial.rglob("*"))
            except BaseException:
                if old.exists():
                    old.rename(target)
                raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _errors_naming(target: Path, partial: Path) -> Iterator[None]:
    """Make a failed write name the target folder and say that nothing was kept."""
    try:
        yield
    except OSError as error:
        # Failing writes name no file; copies name two.
        named = [str(name) for name in (error.filename, error.filename2) if name is not None]
        if error.errno is None or (named and not any(n.startswith(str(partial)) for n in named)):
            raise
        text = f"{error.strerror}; nothing was kept"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += ": free some space or choose another folder"
        raise OSError(error.errno, text, str(target)) from error


def clear_leftovers(target: Path) -> None:
    """Remove leftovers of killed processes next to `target`.

    If a process died between moving the old folder away and publishing the new one, the old one is
    restored.
    """
    for partial in target.parent.glob(f".{escape(target.name)}.*.partial"):
        with suppress(BlockingIOError, FileNotFoundError):
            descriptor = lock(partial)
            if descriptor is not None:
                shutil.rmtree(partial, ignore_errors=True)
                os.close(descriptor)
    for old in target.parent.glob(f".{escape(target.name)}.*.old"):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)


def _check_target(target: Path, check_replaceable: Callable[[Path], None] | None) -> None:
    """Raise unless `target` is free, or may be replaced."""
    if not target.exists() and not target.is_symlink():
        return
    if check_replaceable is None:
        raise FileExistsError(f"{target} exists; choose another folder")
    check_replaceable(target)

"""Crash-safe atomic writes of files, and locks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no flock.
    fcntl = None

# Some network file systems cannot sync a folder, and a folder that can be written to cannot always
# be opened. Neither can be helped.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: readers, now or after a crash, see the old or the new content.

    The temporary file has a fixed name, so a killed process leaves at most one. One process at a
    time may call this for a path.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    is_folder = path.is_dir()
    # Windows cannot sync folders.
    if is_folder and os.name == "nt":
        return
    try:
        # Some systems only sync files that are open for writing.
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in _NO_SYNC:
            raise


def make_folder(path: Path) -> None:
    """Make a folder and its parents, and flush the entry of each new one to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


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

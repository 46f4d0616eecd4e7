"""Crash-safe atomic writes of files: readers, now or after a crash, see the old or the new content.

A full disk leaves nothing half-written.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Some network file systems cannot sync a folder, and some writable folders cannot be opened. Both
# are ignored.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}


def replace_file(path: Path, content: bytes) -> None:
    """Write one of our own files atomically.

    The temporary file has a fixed name, so a killed process leaves at most one. One process at a
    time may call this for a path.
    """
    _replace(path, path.with_name(f"{path.name}.tmp"), content)


def write_output(path: Path, content: bytes) -> None:
    """Write or replace a file that a user named, and create the folders above it.

    The temporary file has a new name: no other file is touched. A link stays a link; devices and
    pipes cannot be replaced and are written to.
    """
    if path.exists() and not path.is_file():
        # A pipe without a reader is an error. A blocking open would wait forever.
        descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    with new_parents(target):
        _replace(target, hidden_sibling(target, "tmp"), content)


def _replace(path: Path, temporary: Path, content: bytes) -> None:
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            with suppress(OSError):
                shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            # Failed writes name no file, other errors the temporary one.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    fsync(path.parent)


def hidden_sibling(target: Path, kind: str = "partial") -> Path:
    """Return a new hidden path beside `target`."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.{kind}")


@contextmanager
def new_parents(path: Path) -> Iterator[None]:
    """Create the missing folders above a path; remove them again on any error."""
    missing = [parent for parent in path.absolute().parents if not parent.exists()]
    try:
        if not path.parent.is_dir() and path.parent.exists():
            code = errno.ENOTDIR
            raise NotADirectoryError(code, os.strerror(code), str(path.parent))
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


def fsync(path: Path) -> None:
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

"""Files that a power cut finds either as they were or as they were to become."""

from __future__ import annotations

import errno
import os
from pathlib import Path

# A folder on some network file systems cannot be synced, and one that may be written to cannot
# always be opened: there is nothing to be done about either.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one go: readers, now or after a crash, see the old one or the new one.

    What is written meanwhile lies beside it, under a name that the next try takes again: a process
    that is killed leaves no more than one such file. One process at a time.
    """
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the list of names in a folder, to disk."""
    if not path.is_dir():
        # Some systems sync only what they may write.
        _sync(path, os.O_RDWR)
        return
    # Windows has no such call for folders.
    if os.name == "nt":
        return
    try:
        _sync(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def make_folder(path: Path) -> None:
    """Make a folder and those above it, each known to the one that holds it."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def _sync(path: Path, access: int) -> None:
    descriptor = os.open(path, access)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A folder that a command makes: there when it is complete, and not before."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no flock: there, what a killed process left stays.
    fcntl = None

MANIFEST_FILE = "manifest.json"


@contextmanager
def new_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a folder to write in; it becomes `out` at the end, or vanishes if anything fails."""
    refuse_existing(out, overwrite=overwrite)
    made = [parent for parent in out.absolute().parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    partial = out.with_name(f".{out.name}.{mark}.partial")
    old = out.with_name(f".{out.name}.{mark}.old")
    partial.mkdir()
    held = _hold(partial)
    try:
        yield partial
        refuse_existing(out, overwrite=overwrite)
        if out.exists():
            out.rename(old)
        try:
            partial.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"{error.strerror}; nothing was kept: free some space or choose another folder"
            raise OSError(error.errno, text, str(out)) from error
        raise
    finally:
        if held is not None:
            os.close(held)
    shutil.rmtree(old, ignore_errors=True)


def clear_leftovers(out: Path) -> None:
    """Remove what processes that were killed have left beside `out`, however large.

    One of them may have died between moving an old dataset away and the new one to its place: then
    the old one is put back.
    """
    for partial in out.parent.glob(f".{_literal(out.name)}.*.partial"):
        held = _hold(partial)
        if held is not None:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(held)
    for old in out.parent.glob(f".{_literal(out.name)}.*.old"):
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out)


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Raise unless `out` is free, or a dataset that may be overwritten."""
    if not out.exists() and not out.is_symlink():
        refuse_unreachable(out)
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists; choose another folder or give --overwrite")
    is_dataset = (out / MANIFEST_FILE).is_file() or (out.is_dir() and not any(out.iterdir()))
    if out.is_symlink() or not is_dataset:
        raise FileExistsError(
            f"{out} is not a token dataset, so it is not overwritten; choose another folder"
        )


def refuse_unreachable(out: Path) -> None:
    """Raise if a folder cannot be made at `out`, before any work is done for it."""
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{above} is a file, so {out} cannot be made in it")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"{out} cannot be made: {above} may not be written to")


def _hold(folder: Path) -> int | None:
    """Lock a folder, until it is closed or the process is gone; None if another holds it."""
    if fcntl is None:
        return None
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Held by another process, or on a file system that keeps no locks.
        os.close(held)
        return None
    return held


def _literal(name: str) -> str:
    """Return a name for `glob` that stands for itself."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)

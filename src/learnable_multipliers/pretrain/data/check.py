"""A check of a run's data in the background: each shard has the SHA-256 of its manifest.

Training starts at once without waiting for it. Verified shards are recorded in a cache folder, so
the next start does not read them again.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from learnable_multipliers.pretrain.data.shards import FileIdentity, ShardFile, verify_sha256

_SETTLED = 2.0
"""Seconds after which a change of a file changes its time stamps, on every file system."""


class DataCheck:
    """Checks shards in a separate thread, up to the first error.

    Args:
        cache: Folder that records verified shards; ignored if it is not writable.
    """

    def __init__(self, files: Sequence[ShardFile], cache: Path) -> None:
        self._files, self._cache = files, cache
        self._good: dict[Path, FileIdentity] = {}
        self._error: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Check all shards that have changed since they were last verified."""
        if self._is_running or self.failed:
            return
        changed = self._changed()
        if changed:
            # A daemon: a process that ends does not wait for it.
            self._thread = threading.Thread(target=self._run, args=(changed,), daemon=True)
            self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether a shard is bad, all are verified as they are now, or the check is closed."""
        return self.failed or self._closed or not (self._is_running or self._changed())

    @property
    def failed(self) -> bool:
        """Whether a shard is not what its manifest says."""
        return self._error is not None

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the running check, or until a timeout."""
        if self._thread is not None:
            self._thread.join(seconds)

    def raise_if_failed(self) -> None:
        """Raise the error of a bad shard, if there is one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop after the current shard."""
        self._closed = True

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _changed(self) -> list[ShardFile]:
        return [file for file in self._files if self._is_changed(file)]

    def _is_changed(self, file: ShardFile) -> bool:
        try:
            return self._good.get(file.path) != FileIdentity.of(file.path)
        except OSError:
            # A removed file is still mapped, with its verified content.
            return file.path not in self._good

    def _run(self, files: Sequence[ShardFile]) -> None:
        for file in files:
            if self._closed:
                return
            try:
                self._good[file.path] = self._verified(file)
            except OSError as error:
                # Errors of reading do not name the file.
                self._error = OSError(
                    f"{file.path} cannot be read: {error.strerror or error}; copy it again"
                )
            # Whatever it is, the shard is not known to be good.
            except Exception as error:
                self._error = error
            if self.failed:
                return

    def _verified(self, file: ShardFile) -> FileIdentity:
        """Return the identity of a shard whose content is right."""
        identity = FileIdentity.of(file.path)
        if identity.inode != file.opened.inode and file.path not in self._good:
            raise ValueError(
                f"{file.path} was replaced after the run had opened it: start the run again"
            )
        mark = self._cache / _key(file, identity)
        if mark.exists():
            return identity
        verify_sha256(file.path, file.sha256)
        if FileIdentity.of(file.path) != identity:
            raise ValueError(
                f"{file.path} is being changed while the run reads it: start the run again when "
                "it is complete"
            )
        # Two changes in quick succession could have the same time stamp.
        if time.time() - identity.ctime_ns / 1e9 > _SETTLED:
            with suppress(OSError):
                self._cache.mkdir(parents=True, exist_ok=True)
                mark.touch()
        return identity


def _key(file: ShardFile, identity: FileIdentity) -> str:
    """Return the name of the empty file that marks a shard as verified.

    The name holds all information, so no content can be damaged or half written.
    """
    return hashlib.sha256(
        repr((str(file.path.resolve()), *identity, file.sha256)).encode()
    ).hexdigest()

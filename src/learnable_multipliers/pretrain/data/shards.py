"""Token shards: flat files of raw little-endian tokens, written once and memory-mapped."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learnable_multipliers.pretrain.data.manifest import Manifest, Shard, verify_sha256


class ShardWriter:
    """Writes the documents of one split to files of `shard_tokens` tokens, the last one shorter."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        self._folder = folder
        self._split = split
        self._item = dtype.itemsize
        self._room_in_full = shard_tokens * dtype.itemsize
        self._file: BinaryIO | None = None
        self._shards: list[Shard] = []

    def add(self, document: bytes, num_bytes: int) -> None:
        """Append the token bytes of a document that had `num_bytes` bytes of text."""
        rest = memoryview(document)
        while rest:
            if self._file is None:
                self._begin()
            part = rest[: self._room]
            self._write(part)
            rest = rest[len(part) :]
            self._room -= len(part)
            if not rest:
                self._documents += 1
                self._bytes += num_bytes
            if not self._room:
                self._end()

    def close(self) -> tuple[Shard, ...]:
        """Finish the last file and return all of them."""
        if self._file is not None:
            self._end()
        return tuple(self._shards)

    def abandon(self) -> None:
        """Close the open file of a writer that will not be finished."""
        if self._file is not None:
            # What is still buffered may fail to be written once more; the first error counts.
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _begin(self) -> None:
        self._name = f"{self._split}-{len(self._shards):05d}.bin"
        self._file = (self._folder / self._name).open("wb")
        self._room = self._room_in_full
        self._documents = self._bytes = 0
        self._hash = hashlib.sha256()

    def _write(self, part: memoryview) -> None:
        assert self._file is not None
        self._hash.update(part)
        self._file.write(part)

    def _end(self) -> None:
        assert self._file is not None
        self._file.flush()
        # On disk before the folder takes its final name.
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._shards.append(
            Shard(
                file=self._name,
                tokens=(self._room_in_full - self._room) // self._item,
                documents=self._documents,
                bytes=self._bytes,
                sha256=self._hash.hexdigest(),
            )
        )


class TokenDataset:
    """One split of a dataset: a flat, memory-mapped sequence of tokens."""

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        if split not in manifest.splits:
            raise ValueError(
                f"{folder} has no split {split!r}, only {', '.join(manifest.splits)}; "
                "prepare it with a validation part (valid_fraction or valid_sources)"
            )
        self.folder = folder
        self.manifest = manifest
        self.split = split
        self._maps = [self._map(shard) for shard in manifest.splits[split]]
        self._starts = np.cumsum([0] + [len(one) for one in self._maps])

    @classmethod
    def open(cls, folder: Path | str, split: str = "train") -> TokenDataset:
        """Map the files of a split into memory and check that their sizes are right."""
        folder = Path(folder)
        return cls(folder, Manifest.load(folder), split)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def num_bytes(self) -> int:
        """How many bytes of text the split has."""
        return self.manifest.num_bytes(self.split)

    def tokens(self, start: int, stop: int) -> NDArray[np.unsignedinteger]:
        """Return tokens start .. stop - 1, also across the borders of files."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start}:{stop} are outside the {len(self)} of {self.split}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        for begin, tokens in zip(self._starts[first:], self._maps[first:], strict=False):
            if begin >= stop:
                break
            parts.append(tokens[max(start - begin, 0) : stop - begin])
        if len(parts) == 1:
            return np.asarray(parts[0])
        return np.concatenate(parts) if parts else np.empty(0, self.manifest.dtype)

    def samples(self, indices: NDArray[np.integer], length: int) -> Tensor:
        """Return samples as int64 rows of `length` inputs and the last target."""
        rows = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, sample in zip(rows, indices.tolist(), strict=True):
            row[:] = self.tokens(sample * length, sample * length + length + 1)
        return torch.from_numpy(rows)

    def verify(self) -> None:
        """Read every file of this split and compare its checksum."""
        for shard in self.manifest.splits[self.split]:
            verify_sha256(self.folder / shard.file, shard.sha256)

    def _map(self, shard: Shard) -> NDArray[np.unsignedinteger]:
        path = self.folder / shard.file
        dtype = np.dtype(self.manifest.dtype)
        size = path.stat().st_size if path.is_file() else 0
        if size != shard.tokens * dtype.itemsize:
            raise ValueError(
                f"{path} has {size} bytes, the manifest says {shard.tokens * dtype.itemsize}; "
                "copy it again or prepare the dataset again"
            )
        return np.memmap(path, dtype, mode="r")

"""A dataset on disk: flat files of raw little-endian tokens, written once and memory-mapped.

A manifest says what its files are, and their checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learnable_multipliers._checksum import add_checksum, file_sha256, verify_checksum
from learnable_multipliers._serialization import (
    from_dict,
    parse_object,
    read_bytes,
    to_dict,
)
from learnable_multipliers.pretrain.data.documents import first_text

TRAIN, VALID = "train", "valid"
FORMAT = "lrm-tokens-2"
TOKENIZER_FILE = "tokenizer.json"
DATASET_MANIFEST = "manifest.json"
_MOST = 1 << 63
"""No count is as large; sums of some such counts can still be floats."""


Tokens = NDArray[np.unsignedinteger]


@dataclass(kw_only=True)
class Shard:
    """One file of raw tokens. A document and its bytes count where its last token stands."""

    file: str
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a dataset except the tokens."""

    format: str = FORMAT
    dtype: str
    vocab_size: int
    eos_id: int
    eos_token: str
    tokenizer_file: str
    tokenizer_sha256: str
    splits: dict[str, list[Shard]]
    source: dict[str, Any]
    """Where the text came from, as it was named: for people, and no part of the fingerprint."""

    def fingerprint(self) -> str:
        """Return a SHA-256 of all that training depends on, in hexadecimal.

        The names of files and sources are left out: the same text prepared in another place is the
        same data.
        """
        content = {
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "eos": [self.eos_id, self.eos_token],
            "tokenizer": self.tokenizer_sha256,
            "splits": {
                name: [[one.sha256, one.tokens, one.documents, one.bytes] for one in shards]
                for name, shards in self.splits.items()
            },
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def num_tokens(self, split: str) -> int:
        """Count the tokens of a split, end-of-document tokens included."""
        return sum(shard.tokens for shard in self.splits[split])

    def num_documents(self, split: str) -> int:
        """Count the documents of a split."""
        return sum(shard.documents for shard in self.splits[split])

    def num_bytes(self, split: str) -> int:
        """Count the bytes of text of a split, as UTF-8."""
        return sum(shard.bytes for shard in self.splits[split])

    def save(self, folder: Path) -> None:
        """Write the manifest of a folder."""
        text = json.dumps(add_checksum(to_dict(self)), indent=1) + "\n"
        (folder / DATASET_MANIFEST).write_text(text, encoding="utf-8", newline="\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder."""
        path = folder / DATASET_MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"no token dataset at {folder}: {_why_none(folder)}")
        try:
            # Data may be linked: what counts is where the links lead.
            fields = parse_object(read_bytes(path.resolve()), DATASET_MANIFEST)
            stored_format = fields.get("format")
            if stored_format != FORMAT:
                raise ValueError(f"its format is {stored_format!r}, this version reads {FORMAT}")
            manifest: Manifest = from_dict(
                cls, verify_checksum(fields, DATASET_MANIFEST), DATASET_MANIFEST
            )
            manifest.check()
            return manifest
        # Content can be parsed that is nested too deeply to be hashed.
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} cannot be used ({error}); prepare the dataset again"
            ) from error

    def check(self) -> None:
        """Raise a ValueError if the values cannot be those of a dataset, whoever wrote them."""
        if not 0 < self.vocab_size <= 1 << 32:
            raise ValueError(f"vocab_size is {self.vocab_size}")
        if self.dtype != (expected := token_dtype(self.vocab_size).str):
            raise ValueError(f"dtype is {self.dtype!r}; for this vocab_size it is {expected!r}")
        if not 0 <= self.eos_id < self.vocab_size:
            raise ValueError(f"eos_id is {self.eos_id}, with a vocab_size of {self.vocab_size}")
        files = [shard.file for shards in self.splits.values() for shard in shards]
        for name in (self.tokenizer_file, *files):
            # By Windows' rules, which know the separators of all systems.
            if PureWindowsPath(name).name != name or name in ("", ".."):
                raise ValueError(f"{name!r} is not the name of a file in the folder")
        for split, shards in self.splits.items():
            for shard in shards:
                counts = (shard.tokens, shard.documents, shard.bytes)
                if not (0 < shard.tokens < _MOST and all(0 <= n < _MOST for n in counts)):
                    raise ValueError(f"{shard.file} has impossible counts: {counts}")
            if self.num_tokens(split) < max(1, self.num_documents(split)) or (
                min(self.num_documents(split), self.num_bytes(split)) < 1
            ):
                raise ValueError(f"split {split!r} has no text, or more documents than tokens")


def _why_none(folder: Path) -> str:
    """Return why a path without a manifest is not a dataset, and what to do."""
    if folder.is_file():
        return "it is a file; give the folder that `lrm data prepare` wrote"
    if not folder.is_dir():
        return "there is no such folder; make one with `lrm data prepare`"
    if (text := first_text(folder)) is not None:
        return (
            f"it holds text ({text.relative_to(folder)}), not tokens; make them with `lrm data "
            f"prepare --sources {shlex.quote(str(folder))} --out DATA`, and give DATA"
        )
    return f"{DATASET_MANIFEST} is missing; make one with `lrm data prepare`"


def is_dataset(folder: Path) -> bool:
    """Return whether a folder has the manifest of a dataset, and not that of a checkpoint."""
    try:
        return (
            parse_object(read_bytes(folder / DATASET_MANIFEST), DATASET_MANIFEST)["format"]
            == FORMAT
        )
    except (OSError, ValueError, KeyError, RecursionError):
        return False


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest little-endian type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class FileIdentity(NamedTuple):
    """Identifies an unchanged file by its metadata, not its content.

    The time of the last change (ctime) cannot be set: an edit that restores size and mtime shows.
    """

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileIdentity:
        """Return the identity of the file that a path leads to, or of an open one."""
        status = os.stat(file)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class ShardFile(NamedTuple):
    """A shard as it was opened."""

    path: Path
    sha256: str
    """As the manifest says."""
    opened: FileIdentity


def verify_sha256(path: Path, expected: str) -> None:
    """Raise unless a file has the SHA-256 that its manifest says."""
    # Reading a pipe or a device may never end.
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file: copy it again")
    if (actual := file_sha256(path)) != expected:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {actual}, the manifest says {expected}; "
            "copy it again or prepare the dataset again"
        )


class ShardWriter:
    """Writes the documents of one split to files of `shard_tokens` tokens, the last one shorter."""

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        self.shards: list[Shard] = []
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._file: BinaryIO | None = None

    def add(self, tokens: Tokens, num_bytes: int) -> None:
        """Append the tokens, one at least, of a document that had `num_bytes` bytes of text."""
        while len(tokens):
            if self._file is None:
                shard = Shard(file=f"{self._split}-{len(self.shards):05d}.bin")
                self._file = (self._folder / shard.file).open("wb")
                self._hash = hashlib.sha256()
                self.shards.append(shard)
            shard = self.shards[-1]
            room = self._shard_tokens - shard.tokens
            part, tokens = tokens[:room], tokens[room:]
            self._file.write(part.data)
            self._hash.update(part.data)
            shard.tokens += len(part)
            if shard.tokens == self._shard_tokens:
                self.close()
        self.shards[-1].documents += 1
        self.shards[-1].bytes += num_bytes

    def close(self) -> None:
        """Finish the last file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.shards[-1].sha256 = self._hash.hexdigest()


class TokenDataset:
    """One split of a dataset: a flat, memory-mapped sequence of tokens.

    Opening it checks that the sizes of its files are right; `verify` reads them.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.manifest = manifest = Manifest.load(folder)
        if split not in manifest.splits:
            raise ValueError(
                f"{folder} has no split {split!r}, only {', '.join(manifest.splits)}; "
                "prepare it with a validation part (valid_fraction or valid_sources)"
            )
        self.folder = folder
        self.split = split
        self.files: list[ShardFile] = []
        self._maps = [self._map(shard) for shard in manifest.splits[split]]
        self._starts = np.cumsum([0] + [len(one) for one in self._maps])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return a copy of tokens start .. stop - 1, also across the borders of files."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start}:{stop} are outside the {len(self)} of {self.split}")
        first = np.searchsorted(self._starts, start, side="right") - 1
        last = np.searchsorted(self._starts, stop)
        files = zip(self._starts[first:last], self._maps[first:last], strict=True)
        parts = [tokens[max(start - begin, 0) : stop - begin] for begin, tokens in files]
        tokens_read = np.concatenate([np.empty(0, self.manifest.dtype), *parts])
        if tokens_read.max(initial=0) >= self.manifest.vocab_size:
            path = next(
                file.path
                for file, part in zip(self.files[first:last], parts, strict=True)
                if part.max(initial=0) >= self.manifest.vocab_size
            )
            raise ValueError(
                f"{path} holds the token {tokens_read.max()}, beyond the vocabulary of "
                f"{self.manifest.vocab_size}; copy it again or prepare the dataset again"
            )
        return tokens_read

    def samples(self, indices: NDArray[np.integer], length: int) -> Tensor:
        """Return samples as int64 rows of `length` inputs and the last target."""
        rows = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, sample in zip(rows, indices.tolist(), strict=True):
            row[:] = self.tokens(sample * length, sample * length + length + 1)
        return torch.from_numpy(rows)

    def verify(self) -> None:
        """Read every file of this split and compare its checksum."""
        for file in self.files:
            verify_sha256(file.path, file.sha256)

    def _map(self, shard: Shard) -> Tokens:
        path = self.folder / shard.file
        dtype = np.dtype(self.manifest.dtype)
        if not path.is_file():
            raise ValueError(
                f"{path} is missing or not a regular file; copy it again or prepare the dataset "
                "again"
            )
        with path.open("rb") as file:
            opened = FileIdentity.of(file.fileno())
            if opened.size != shard.tokens * dtype.itemsize:
                raise ValueError(
                    f"{path} has {opened.size} bytes, the manifest says "
                    f"{shard.tokens * dtype.itemsize}; copy it again or prepare the dataset again"
                )
            self.files.append(ShardFile(path, shard.sha256, opened))
            return np.memmap(file, dtype, mode="r")

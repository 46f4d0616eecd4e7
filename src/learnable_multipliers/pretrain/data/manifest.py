"""The manifest of a token dataset: what its files are, and their checksums."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from learnable_multipliers.pretrain.checkpoint.atomic import MANIFEST_FILE as MANIFEST_FILE

FORMAT = "lrm-tokens-1"
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of raw tokens. A document and its bytes count where its last token stands."""

    file: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of a dataset but the tokens."""

    format: str = FORMAT
    dtype: str
    vocab_size: int
    eos_id: int
    eos_token: str
    tokenizer_file: str
    tokenizer_sha256: str
    splits: dict[str, tuple[Shard, ...]]
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
        with (folder / MANIFEST_FILE).open("w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(asdict(self), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder."""
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"no token dataset at {folder}: {MANIFEST_FILE} is missing; "
                "make one with `lrm data prepare`"
            )
        try:
            fields = json.loads(path.read_text("utf-8"))
            if fields["format"] != FORMAT:
                raise ValueError(f"its format is {fields['format']!r}, this version reads {FORMAT}")
            fields["splits"] = {
                name: tuple(Shard(**shard) for shard in shards)
                for name, shards in fields["splits"].items()
            }
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} cannot be used ({error}); prepare the dataset again"
            ) from error


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest little-endian type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_sha256(path: Path, expected: str) -> None:
    """Raise unless a file has the SHA-256 that its manifest says."""
    if (found := file_sha256(path)) != expected:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {found}, the manifest says {expected}; "
            "copy it again or prepare the dataset again"
        )

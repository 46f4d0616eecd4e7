"""Train or validation: each document is placed by a keyed hash of its text and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from learnable_multipliers.pretrain.data.documents import Corpus
from learnable_multipliers.pretrain.data.formats import DocumentError
from learnable_multipliers.pretrain.data.shards import Shard

TRAIN, VALID = "train", "valid"


class Document(NamedTuple):
    """A text with its place and its size in bytes of UTF-8."""

    text: str
    split: str
    num_bytes: int


class Splitter:
    """Gives every document of a corpus its split.

    Either a fraction of the documents is held out, or a second corpus is; then the documents of the
    first that are in the second as well are dropped.
    """

    def __init__(
        self, corpus: Corpus, *, fraction: float, held_out: Corpus | None, seed: int
    ) -> None:
        self._corpus = corpus
        self._held_out = held_out
        self._fraction = 0.0 if held_out else fraction
        self._seed = seed
        self._held_out_digests = frozenset(
            self._digest(text.encode()) for text in held_out or () if text
        )
        self._num_empty = 0
        self._num_dropped = 0

    def documents(self, max_bytes: int | None) -> Iterator[Document]:
        """Yield the documents in order, and count what is left out."""
        yield from self.corpus_documents(max_bytes)
        for text in self._held_out or ():
            if text:
                yield Document(text, VALID, len(text.encode()))
            else:
                self._num_empty += 1

    def corpus_documents(self, max_bytes: int | None) -> Iterator[Document]:
        """Yield the documents but those of a second corpus.

        The document that brings the corpus to `max_bytes` is its last.
        """
        self._num_empty = self._num_dropped = 0
        total = 0
        for text in self._corpus:
            data = text.encode()
            split = self._split(data)
            if not text:
                self._num_empty += 1
            elif split is None:
                self._num_dropped += 1
            else:
                yield Document(text, split, len(data))
                total += len(data)
            if max_bytes is not None and total >= max_bytes:
                break

    def check(self, splits: dict[str, tuple[Shard, ...]]) -> None:
        """Raise if a split that was asked for came out empty."""
        count = sum(shard.documents for shards in splits.values() for shard in shards)
        names = ", ".join(self._corpus.names)
        if not splits:
            raise DocumentError(f"no document with any text in {names}; give another source")
        if TRAIN not in splits:
            raise DocumentError(
                f"none of the {count} documents of {names} is left to train on; lower "
                "--valid-fraction, change --seed, or give --valid-sources that are other documents"
            )
        if VALID not in splits and self._fraction:
            raise DocumentError(
                f"none of the {count} documents of {names} fell into validation "
                f"(--valid-fraction {self._fraction:g}); raise it, give --valid-sources, cut files "
                "into documents with --text-separator, or set it to 0 for no validation"
            )

    def describe(self) -> dict[str, Any]:
        """Return what the manifest says about the source."""
        return {
            "sources": list(self._corpus.names),
            "valid_sources": list(self._held_out.names) if self._held_out else [],
            "valid_fraction": self._fraction,
            "seed": self._seed,
            "skipped_files": self._skipped(),
            "empty_documents": self._num_empty,
            "dropped_because_in_validation": self._num_dropped,
        }

    def _skipped(self) -> dict[str, int]:
        skipped = self._corpus.skipped.copy()
        if self._held_out:
            skipped += self._held_out.skipped
        return dict(sorted(skipped.items()))

    def _digest(self, data: bytes) -> bytes:
        key = (self._seed & ((1 << 64) - 1)).to_bytes(8, "little")
        return hashlib.blake2b(data, digest_size=16, key=key).digest()

    def _split(self, data: bytes) -> str | None:
        digest = self._digest(data)
        if digest in self._held_out_digests:
            return None
        # 53 bits: exact as a float.
        place = (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)
        return VALID if place < self._fraction else TRAIN

"""Prepare a dataset: documents to a tokenizer, token shards and a manifest.

Tokens and tokenizer are a function of the text and the settings: neither the number of threads nor
the place of the files changes them; the manifest says beside them where the text lay.
Which split a document belongs to is decided by a hash of its text, so copies of a document are
never on both sides.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from learnable_multipliers._checksum import file_sha256
from learnable_multipliers.pretrain.atomic_folder import new_folder
from learnable_multipliers.pretrain.cores import check_threads
from learnable_multipliers.pretrain.data.documents import Corpus, Document
from learnable_multipliers.pretrain.data.encoding import encode_documents
from learnable_multipliers.pretrain.data.readers import DocumentError
from learnable_multipliers.pretrain.data.shards import (
    DATASET_MANIFEST,
    TOKENIZER_FILE,
    TRAIN,
    VALID,
    Manifest,
    Shard,
    ShardWriter,
    Tokens,
    token_dtype,
)
from learnable_multipliers.pretrain.data.threads import Threads
from learnable_multipliers.pretrain.data.tokenizer import (
    TextSample,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)

# Enough to rank the merges of a small vocabulary, and training stays a fraction of the whole.
_SAMPLE_PER_TOKEN = 1000
_LARGEST_VOCABULARY = 1 << 20
_NAME = re.compile("[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to tokenize, and how."""

    sources: tuple[str, ...] = ()
    """Files, folders or hf:NAME[@CONFIG][:SPLIT]; none: the Python standard library's sources."""
    out: Path
    """Folder to create."""
    tokenizer: Path | None = None
    """A tokenizer.json to use; none: train a byte-level BPE on the training documents."""
    vocab_size: int = 4096
    """Vocabulary size of a new tokenizer, at least 257 (bytes only)."""
    tokenizer_sample: int | None = None
    """Characters of text to train a tokenizer on; none: 1000 per token."""
    eos_token: str | None = None
    """End-of-document token of a given tokenizer; none: found by the usual names."""
    add_eos: bool = False
    """Add <|endoftext|> to a given tokenizer without an end-of-document token."""
    text_field: str = "text"
    """Field (JSON Lines) or column (parquet, Hugging Face) that holds the text."""
    text_separator: str | None = None
    """Split plain text files into documents at this string; none: one document per file."""
    valid_fraction: float = 0.02
    """Fraction of the documents held out for validation; `lrm train` needs some."""
    valid_sources: tuple[str, ...] = ()
    """Sources to validate on instead; equal training documents are dropped."""
    test_sources: tuple[str, ...] = ()
    """More held-out text, NAME=SOURCE each: `lrm train` evaluates it by name at the end of a run.
    Documents of the training and validation text are dropped from it."""
    seed: int = 0
    """Seed of the choice of held-out documents."""
    shard_tokens: int = 100_000_000
    """Maximum tokens per file."""
    max_bytes: int | None = None
    """Stop after the document that reaches this many bytes of text; none: read everything."""
    num_threads: int | None = None
    """Threads that parse and tokenize; none: one per core. The result does not depend on it."""
    overwrite: bool = False
    """Replace a dataset at `out`, once the new one is complete."""

    def __post_init__(self) -> None:
        for name in ("tokenizer_sample", "shard_tokens", "max_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        check_threads("num_threads", self.num_threads or 1)
        if self.vocab_size > _LARGEST_VOCABULARY:
            raise ValueError(
                f"vocab_size is {self.vocab_size:,}; {_LARGEST_VOCABULARY:,} is the most that a "
                "tokenizer is trained for here, several times the largest in use"
            )
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(f"valid_fraction is {self.valid_fraction}; it must be in [0, 1)")
        named_sources(self.test_sources)
        if self.eos_token is not None and self.tokenizer is None:
            raise ValueError("eos_token belongs to a given tokenizer; pass tokenizer as well")
        if self.add_eos and (self.tokenizer is None or self.eos_token is not None):
            raise ValueError("add_eos goes with a given tokenizer, and without an eos_token")
        if self.tokenizer is not None and self.vocab_size != type(self).vocab_size:
            raise ValueError(
                "vocab_size is that of a tokenizer trained here; a given one brings its own"
            )

    def check_replaceable(self, folder: Path) -> None:
        """Raise a FileExistsError unless an existing folder may be replaced by the dataset."""
        if not self.overwrite:
            raise FileExistsError(f"{folder} exists; choose another folder or give --overwrite")
        is_empty = folder.is_dir() and not any(folder.iterdir())
        if folder.is_symlink() or not (is_empty or (folder / DATASET_MANIFEST).is_file()):
            raise FileExistsError(
                f"{folder} is not a token dataset, so it is not overwritten; choose another folder"
            )


def named_sources(given: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the sources of each name, from NAME=SOURCE."""
    sources: dict[str, tuple[str, ...]] = {}
    for each in given:
        name, _, source = each.partition("=")
        if not _NAME.fullmatch(name) or name in (TRAIN, VALID) or not source:
            raise ValueError(
                f"test_sources has {each!r}: give NAME=SOURCE, with a name of small letters, "
                f"digits, - and _ that is not {TRAIN} or {VALID}"
            )
        sources[name] = (*sources.get(name, ()), source)
    return sources


class Progress(NamedTuple):
    """How far a preparation has come."""

    stage: Literal["tokenizer", "encode"]
    documents: int
    bytes: int
    tokens: int


Report = Callable[[Progress], None]


def prepare(config: PrepareConfig, report: Report | None = None) -> Manifest:
    """Make the dataset of a config; `report` is called for each document, read or encoded."""
    report = report or (lambda progress: None)
    with (
        new_folder(config.out, check_replaceable=config.check_replaceable) as folder,
        Threads(config.num_threads) as threads,
    ):
        splitter = _Splitter(config, threads)
        if config.tokenizer is not None:
            tokenizer = load_tokenizer(config.tokenizer, config.eos_token, add_eos=config.add_eos)
        else:
            sample = _training_sample(config, splitter, report)
            tokenizer = train_tokenizer(sample, config.vocab_size)
        if config.tokenizer is None or config.add_eos:
            # Not by its own `save`, whose errors are plain Exceptions.
            text = tokenizer.tokenizer.to_str(pretty=True)
            (folder / TOKENIZER_FILE).write_bytes(text.encode())
        else:
            shutil.copyfile(config.tokenizer, folder / TOKENIZER_FILE)
        encoded = encode_documents(splitter.documents(), tokenizer, threads)
        splits = _write_shards(config, encoded, tokenizer, folder, report)
        splitter.check(splits)
        manifest = Manifest(
            dtype=token_dtype(tokenizer.vocab_size).str,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            eos_token=tokenizer.eos_token,
            tokenizer_file=TOKENIZER_FILE,
            tokenizer_sha256=file_sha256(folder / TOKENIZER_FILE),
            splits=splits,
            source=splitter.describe(),
        )
        manifest.save(folder)
    return manifest


def _training_sample(config: PrepareConfig, splitter: _Splitter, report: Report) -> Iterator[str]:
    """Yield text to train a tokenizer on, from all over the training documents.

    All of them are read for it, as they are again to be encoded, which takes many times as long.
    """
    sample = TextSample(config.tokenizer_sample or _SAMPLE_PER_TOKEN * config.vocab_size)
    num_bytes = 0
    for number, document in enumerate(splitter.corpus_documents(), start=1):
        if document.split == TRAIN:
            sample.add(document.text)
        num_bytes += document.num_bytes
        report(Progress("tokenizer", number, num_bytes, 0))
    yield from sample


def _write_shards(
    config: PrepareConfig,
    encoded: Iterator[tuple[Document, Tokens]],
    tokenizer: TextTokenizer,
    folder: Path,
    report: Report,
) -> dict[str, list[Shard]]:
    splits = (TRAIN, VALID, *named_sources(config.test_sources))
    writers = {split: ShardWriter(folder, split, config.shard_tokens) for split in splits}
    num_bytes = num_tokens = 0
    report(Progress("encode", 0, 0, 0))
    try:
        for number, (document, tokens) in enumerate(encoded, start=1):
            if tokenizer.eos_id in tokens[:-1]:
                raise DocumentError(
                    f"document {number:,} has text that the tokenizer encodes as its "
                    f"end-of-document token {tokenizer.eos_token!r}, so it would end there; name a "
                    "token that no text contains with --eos-token, or take it out of the text"
                )
            writers[document.split].add(tokens, document.num_bytes)
            num_bytes += document.num_bytes
            num_tokens += len(tokens)
            report(Progress("encode", number, num_bytes, num_tokens))
        for writer in writers.values():
            writer.close()
        return {split: writer.shards for split, writer in writers.items() if writer.shards}
    finally:
        # Of several errors the first one counts.
        for writer in writers.values():
            with suppress(OSError):
                writer.close()


class _HashedText(NamedTuple):
    text: str
    num_bytes: int
    digest: bytes


class _Splitter:
    """Gives every document of a corpus its split, by a keyed hash of its text and nothing else.

    Either a fraction of the documents is held out, or other corpora are; documents of the first
    corpus that are in one of those as well are dropped.
    """

    def __init__(self, config: PrepareConfig, threads: Threads) -> None:
        def corpus(sources: tuple[str, ...]) -> Corpus:
            return Corpus(sources, text_field=config.text_field, separator=config.text_separator)

        self._corpus = corpus(config.sources)
        held_out = {VALID: config.valid_sources} if config.valid_sources else {}
        self._fraction = 0.0 if held_out else config.valid_fraction
        held_out |= named_sources(config.test_sources)
        self._held_out = {split: corpus(sources) for split, sources in held_out.items()}
        self._seed, self._max_bytes = config.seed, config.max_bytes
        self._threads = threads
        self._num_empty = self._num_dropped = 0
        self._held_out_digests = {
            one.digest
            for corpus in self._held_out.values()
            for one in corpus.map(self._hashed, threads)
            if one.text
        }

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order, and count what is left out."""
        yield from self.corpus_documents()
        seen: dict[bytes, str] = {}
        for split, corpus in self._held_out.items():
            for text, num_bytes, digest in corpus.map(self._hashed, self._threads):
                if not text:
                    self._num_empty += 1
                # A document in two held-out texts belongs to the first.
                elif seen.setdefault(digest, split) == split:
                    yield Document(text, split, num_bytes)
                else:
                    self._num_dropped += 1

    def corpus_documents(self) -> Iterator[Document]:
        """Yield the documents but those of held-out corpora.

        The document that brings the corpus to `max_bytes` is its last.
        """
        self._num_empty = self._num_dropped = 0
        total = 0
        for text, num_bytes, digest in self._corpus.map(self._hashed, self._threads):
            if not text:
                self._num_empty += 1
            elif digest in self._held_out_digests:
                self._num_dropped += 1
            else:
                # 53 bits: exact as a float.
                place = (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)
                yield Document(text, VALID if place < self._fraction else TRAIN, num_bytes)
                total += num_bytes
            if self._max_bytes is not None and total >= self._max_bytes:
                break

    def _hashed(self, text: str) -> _HashedText:
        key = (self._seed & ((1 << 64) - 1)).to_bytes(8, "little")
        data = text.encode()
        return _HashedText(text, len(data), hashlib.blake2b(data, digest_size=16, key=key).digest())

    def check(self, splits: dict[str, list[Shard]]) -> None:
        """Raise if a requested split is empty."""
        count = sum(shard.documents for shards in splits.values() for shard in shards)
        names = ", ".join(self._corpus.names)
        if not splits:
            raise DocumentError(f"no document with any text in {names}; give another source")
        if TRAIN not in splits:
            raise DocumentError(
                f"none of the {count} documents of {names} is left to train on; lower "
                "--valid-fraction, change --seed, or give --valid-sources that are other documents"
            )
        for split, corpus in self._held_out.items():
            if split not in splits:
                raise DocumentError(
                    f"{', '.join(corpus.names)} leaves nothing to hold out as {split}: its "
                    "documents are empty, or in the held-out text before it; give another source"
                )
        if VALID not in splits and self._fraction:
            raise DocumentError(
                f"none of the {count} documents of {names} fell into validation "
                f"(--valid-fraction {self._fraction:g}); raise it, give --valid-sources, cut files "
                "into documents with --text-separator, or set it to 0 for no validation"
            )

    def describe(self) -> dict[str, Any]:
        """Return what the manifest says about the source."""
        held_out = {split: list(corpus.names) for split, corpus in self._held_out.items()}
        corpora = (self._corpus, *self._held_out.values())
        skipped = sum((corpus.skipped for corpus in corpora), Counter())
        return {
            "sources": list(self._corpus.names),
            "valid_sources": held_out.pop(VALID, []),
            "test_sources": held_out,
            "valid_fraction": self._fraction,
            "seed": self._seed,
            "skipped_files": dict(sorted(skipped.items())),
            "empty_documents": self._num_empty,
            "dropped_because_in_validation": self._num_dropped,
        }

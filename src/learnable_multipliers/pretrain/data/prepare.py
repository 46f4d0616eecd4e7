"""Prepare a dataset: documents to a tokenizer, token shards and a manifest.

Tokens and tokenizer are a function of the text and the settings: neither the number of threads nor
the place of the files changes them; the manifest says beside them where the text lay.
Which split a document belongs to is decided by a hash of its text, so copies of a document are
never on both sides.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from learnable_multipliers.pretrain.checkpoint.atomic import (
    check_target,
    clear_leftovers,
    new_folder,
)
from learnable_multipliers.pretrain.data.documents import Corpus
from learnable_multipliers.pretrain.data.encoding import encode_documents
from learnable_multipliers.pretrain.data.formats import DocumentError
from learnable_multipliers.pretrain.data.shards import (
    TOKENIZER_FILE,
    Manifest,
    Shard,
    ShardWriter,
    file_sha256,
    token_dtype,
)
from learnable_multipliers.pretrain.data.splits import TRAIN, VALID, Splitter
from learnable_multipliers.pretrain.data.tokenizer import (
    TextSample,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)

# Text handed to a thread at once.
_BATCH_BYTES = 1 << 19
# Enough to rank the merges of a small vocabulary, and training stays a fraction of the whole.
_SAMPLE_PER_TOKEN = 1000


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to make tokens of, and how."""

    sources: tuple[str, ...] = ()
    """Files, folders or hf:NAME[@CONFIG][:SPLIT]; none: the Python standard library's sources."""
    out: Path
    """Folder to make."""
    tokenizer: Path | None = None
    """A tokenizer.json to use; none: train a byte-level BPE on the training documents."""
    vocab_size: int = 4096
    """Tokens of a tokenizer trained here, 257 (bytes alone) or more."""
    tokenizer_sample: int | None = None
    """Characters of text to train a tokenizer on; none: 1000 for each token."""
    eos_token: str | None = None
    """End-of-document token of a given tokenizer; none: found by the usual names."""
    add_eos: bool = False
    """Add <|endoftext|> to a given tokenizer that has no token to end a document with."""
    text_field: str = "text"
    """Field (JSON Lines) or column (parquet, Hugging Face) that holds the text."""
    text_separator: str | None = None
    """Cut plain text files into documents at this string; none: one document a file."""
    valid_fraction: float = 0.02
    """Part of the documents held out for validation; 0: none, and `lrm train` needs some."""
    valid_sources: tuple[str, ...] = ()
    """Sources to validate on instead; training documents equal to one of theirs are dropped."""
    seed: int = 0
    """Decides which documents are held out."""
    shard_tokens: int = 100_000_000
    """Most tokens in one file."""
    max_bytes: int | None = None
    """Stop after the document that reaches this many bytes of text; none: read everything."""
    num_threads: int | None = None
    """Threads that tokenize; none: one for each core. The result does not depend on it."""
    overwrite: bool = False
    """Replace a dataset at `out`, once the new one is complete."""

    def __post_init__(self) -> None:
        for name in ("tokenizer_sample", "shard_tokens", "max_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(f"valid_fraction is {self.valid_fraction}; it must be in [0, 1)")
        if self.eos_token is not None and self.tokenizer is None:
            raise ValueError("eos_token belongs to a given tokenizer; pass tokenizer as well")
        if self.add_eos and (self.tokenizer is None or self.eos_token is not None):
            raise ValueError("add_eos goes with a given tokenizer, and without an eos_token")
        if self.tokenizer is not None and self.vocab_size != type(self).vocab_size:
            raise ValueError(
                "vocab_size is that of a tokenizer trained here; a given one brings its own"
            )


class Progress(NamedTuple):
    """How far a preparation has come."""

    stage: Literal["tokenizer", "encode"]
    documents: int
    bytes: int
    tokens: int


Report = Callable[[Progress], None]


def prepare(config: PrepareConfig, report: Report | None = None) -> Manifest:
    """Make the dataset of a config; `report` is called as a stage begins and after each batch."""
    report = report or (lambda progress: None)
    clear_leftovers(config.out)
    check_target(config.out, overwrite=config.overwrite)
    splitter = _splitter(config)
    report(Progress("tokenizer", 0, 0, 0))
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer, config.eos_token, add_eos=config.add_eos)
    else:
        sample = _training_sample(config, splitter, report)
        tokenizer = train_tokenizer(sample, config.vocab_size)
    dtype = token_dtype(tokenizer.vocab_size)
    with new_folder(config.out, overwrite=config.overwrite) as folder:
        if config.tokenizer is None or config.add_eos:
            tokenizer.tokenizer.save(str(folder / TOKENIZER_FILE))
        else:
            shutil.copyfile(config.tokenizer, folder / TOKENIZER_FILE)
        splits = _write_shards(config, splitter, tokenizer, folder, report)
        splitter.check(splits)
        manifest = Manifest(
            dtype=dtype.str,
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


def _splitter(config: PrepareConfig) -> Splitter:
    def corpus(sources: tuple[str, ...]) -> Corpus:
        return Corpus(sources, text_field=config.text_field, separator=config.text_separator)

    return Splitter(
        corpus(config.sources),
        fraction=config.valid_fraction,
        held_out=corpus(config.valid_sources) if config.valid_sources else None,
        seed=config.seed,
    )


def _training_sample(config: PrepareConfig, splitter: Splitter, report: Report) -> Iterator[str]:
    """Yield text to train a tokenizer on, from all over the training documents.

    All of them are read for it, as they are again to be encoded, which takes many times as long.
    """
    sample = TextSample(config.tokenizer_sample or _SAMPLE_PER_TOKEN * config.vocab_size)
    num_bytes = reported = 0
    read = splitter.corpus_documents(config.max_bytes)
    for documents, (text, split, size) in enumerate(read, start=1):
        if split == TRAIN:
            sample.add(text)
        num_bytes += size
        if num_bytes - reported >= _BATCH_BYTES:
            reported = num_bytes
            report(Progress("tokenizer", documents, num_bytes, 0))
    yield from sample


def _write_shards(
    config: PrepareConfig,
    splitter: Splitter,
    tokenizer: TextTokenizer,
    folder: Path,
    report: Report,
) -> dict[str, tuple[Shard, ...]]:
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {
        split: ShardWriter(folder, split, dtype, config.shard_tokens) for split in (TRAIN, VALID)
    }
    num_bytes = num_tokens = number = reported = 0
    report(Progress("encode", 0, 0, 0))
    documents = splitter.documents(config.max_bytes)
    encoded = encode_documents(documents, tokenizer, config.num_threads, _BATCH_BYTES)
    try:
        for number, (document, tokens) in enumerate(encoded, start=1):
            if (np.frombuffer(tokens, dtype)[:-1] == tokenizer.eos_id).any():
                raise DocumentError(
                    f"document {number:,} has text that the tokenizer encodes as its "
                    f"end-of-document token {tokenizer.eos_token!r}, so it would end there; name a "
                    "token that no text contains with --eos-token, or take it out of the text"
                )
            writers[document.split].add(tokens, document.num_bytes)
            num_bytes += document.num_bytes
            num_tokens += len(tokens) // dtype.itemsize
            if num_bytes - reported >= _BATCH_BYTES:
                reported = num_bytes
                report(Progress("encode", number, num_bytes, num_tokens))
        report(Progress("encode", number, num_bytes, num_tokens))
        return {split: shards for split, one in writers.items() if (shards := one.close())}
    finally:
        for writer in writers.values():
            writer.abandon()

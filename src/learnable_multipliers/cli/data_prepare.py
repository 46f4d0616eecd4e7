"""`lrm data prepare`."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from rich.console import Console

from learnable_multipliers._formats import count
from learnable_multipliers.cli.arguments import read
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, Progress, prepare
from learnable_multipliers.pretrain.data.splits import VALID


def data_prepare(arguments: Sequence[str]) -> None:
    """Tokenize text into shards."""
    # Sources may come first without their option, as files do in most commands.
    sources = list(takewhile(lambda word: not word.startswith("-"), arguments))
    if sources:
        arguments = [*arguments[len(sources) :], "--sources", *sources]
    config = read(
        PrepareConfig,
        "data prepare",
        arguments,
        description="lrm data prepare SOURCES --out DATA: tokenize text files (plain, JSON Lines, "
        "parquet; also .xz, .gz, .zst), folders of them, or a Hugging Face dataset into shards to "
        "train on. Without sources: the source code of Python's standard library.",
    )
    console = Console()
    start = time.perf_counter()
    with console.status("reading") as status:

        def report(progress: Progress) -> None:
            read = f"{count(progress.documents)} documents, {count(progress.bytes)}B"
            if progress.stage == "encode":
                status.update(f"{read}, {count(progress.tokens)} tokens")
            elif config.tokenizer is None:
                status.update(f"training the tokenizer: {read}")

        with _clean_up_on_sigterm():
            manifest = prepare(config, report)
    seconds = time.perf_counter() - start
    size = sum(manifest.num_bytes(split) for split in manifest.splits)
    for split in manifest.splits:
        print(
            f"{split}: {manifest.num_documents(split):,} documents, "
            f"{manifest.num_tokens(split):,} tokens, {count(manifest.num_bytes(split))}B"
        )
    print(f"vocabulary: {manifest.vocab_size:,} tokens; read at {size / 1e6 / seconds:.1f} MB/s")
    for line in _left_out(manifest.source):
        print(line)
    if VALID not in manifest.splits:
        print(
            "Nothing is held out, and lrm train needs text to evaluate on: give --valid-fraction "
            "or --valid-sources"
        )
        return
    print(
        f"Train on it: lrm train tiny --data.path {shlex.quote(str(config.out))} "
        f"--model.vocab-size {manifest.vocab_size}"
    )


def _left_out(source: dict[str, Any]) -> Iterator[str]:
    """Yield what was left out of the sources."""
    skipped = {kind: count for kind, count in source["skipped_files"].items() if count}
    if skipped:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in skipped.items())
        yield (
            f"left out, files of other kinds in the folders: {kinds}. To have one read, name it "
            "itself; .json is read as JSON Lines"
        )
    if empty := source["empty_documents"]:
        yield f"left out, documents without text: {empty:,}"
    if dropped := source["dropped_because_in_validation"]:
        yield f"left out, documents that are in the validation text too: {dropped:,}"


@contextmanager
def _clean_up_on_sigterm() -> Iterator[None]:
    """Let SIGTERM clean up as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

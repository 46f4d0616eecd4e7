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
from learnable_multipliers.pretrain.data.shards import VALID


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
        description="Tokenize text into shards to train on: lrm data prepare --sources SOURCES "
        "--out DATA. Sources are files (plain text, JSON Lines, parquet; also .xz, .gz, .zst), "
        "folders of them, or a Hugging Face dataset; without any, the source code of Python's "
        "standard library. They may also come first, without --sources.",
    )
    start = time.perf_counter()
    progress = _Progress()
    with Console().status(progress), _clean_up_on_sigterm():
        manifest = prepare(config, progress.update)
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
            "Nothing is held out, but lrm train needs text to evaluate on: set --valid-fraction or "
            "--valid-sources"
        )
        return
    print(
        f"Train on it: lrm train tiny --data.path {shlex.quote(str(config.out))} "
        f"--model.vocab-size {manifest.vocab_size}"
    )


class _Progress:
    """The last progress report, formatted when the status line is redrawn."""

    def __init__(self) -> None:
        self._last: Progress | None = None

    def update(self, progress: Progress) -> None:
        """Store a report."""
        self._last = progress

    def __rich__(self) -> str:
        if self._last is None:
            return "reading"
        read = f"{count(self._last.documents)} documents, {count(self._last.bytes)}B"
        if self._last.stage == "tokenizer":
            return f"training the tokenizer: {read}"
        return f"{read}, {count(self._last.tokens)} tokens"


def _left_out(source: dict[str, Any]) -> Iterator[str]:
    """Yield messages about files and documents that were left out."""
    if skipped := source["skipped_files"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in skipped.items())
        yield (
            f"left out, files of other kinds in the folders: {kinds}. To read one, name the file "
            "itself; .json is read as JSON Lines"
        )
    if empty := source["empty_documents"]:
        yield f"left out, documents without text: {empty:,}"
    if dropped := source["dropped_because_in_validation"]:
        yield f"left out, documents that are in the validation text too: {dropped:,}"


@contextmanager
def _clean_up_on_sigterm() -> Iterator[None]:
    """Make SIGTERM clean up like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        # None stands for a handler that Python did not set and cannot set again.
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

"""`lrm data prepare`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from itertools import takewhile

from rich.console import Console

from learnable_multipliers.cli.arguments import read
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, Progress, prepare
from learnable_multipliers.pretrain.progress import in_short


def run(arguments: Sequence[str]) -> None:
    """Turn text into token shards."""
    # Sources may come first without their option, as files do in most commands.
    sources = list(takewhile(lambda word: not word.startswith("-"), arguments))
    if sources:
        arguments = [*arguments[len(sources) :], "--sources", *sources]
    config = read(
        PrepareConfig,
        "data prepare",
        arguments,
        description="lrm data prepare SOURCES --out DATA: turn text (plain, JSON Lines, parquet; "
        "also .xz, .gz, .zst), folders of it, or a Hugging Face dataset into token shards to train "
        "on. With no sources: the sources of Python's own standard library.",
        elsewhere={"source": "--sources", "input": "--sources", "output": "--out"},
    )
    console = Console()
    start = time.perf_counter()
    with console.status("reading") as status:

        def report(progress: Progress) -> None:
            read = f"{in_short(progress.documents)} documents, {in_short(progress.bytes)}B"
            if progress.stage == "encode":
                status.update(f"{read}, {in_short(progress.tokens)} tokens")
            elif config.tokenizer is None:
                status.update(f"training the tokenizer: {read}")

        manifest = prepare(config, report)
    seconds = time.perf_counter() - start
    size = sum(manifest.num_bytes(split) for split in manifest.splits)
    for split in manifest.splits:
        print(
            f"{split}: {manifest.num_documents(split):,} documents, "
            f"{manifest.num_tokens(split):,} tokens, {in_short(manifest.num_bytes(split))}B"
        )
    print(f"vocabulary: {manifest.vocab_size:,} tokens; read at {size / 1e6 / seconds:.1f} MB/s")
    print(
        f"Train on it: lrm train tiny --data.path {shlex.quote(str(config.out))} "
        f"--model.vocab-size {manifest.vocab_size}"
    )

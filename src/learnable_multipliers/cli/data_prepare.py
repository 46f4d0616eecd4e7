"""`lrm data prepare`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import tyro
from rich.console import Console

from learnable_multipliers.pretrain.data.prepare import PrepareConfig, Progress, prepare
from learnable_multipliers.pretrain.progress import in_short


def run(arguments: Sequence[str]) -> None:
    """Turn text into token shards."""
    config = tyro.cli(
        PrepareConfig,
        prog="lrm data prepare",
        description="Turn text (plain, JSON Lines, parquet; also .xz, .gz, .zst), folders of it, "
        "or a Hugging Face dataset into token shards to train on. With no sources: Python's own "
        "standard library.",
        args=arguments,
    )
    console = Console()
    start = time.perf_counter()
    with console.status("reading") as status:

        def report(progress: Progress) -> None:
            if progress.stage == "tokenizer":
                status.update("training the tokenizer" if config.tokenizer is None else "reading")
            else:
                status.update(
                    f"{in_short(progress.documents)} documents, {in_short(progress.bytes)}B, "
                    f"{in_short(progress.tokens)} tokens"
                )

        manifest = prepare(config, report)
    seconds = time.perf_counter() - start
    size = sum(manifest.num_bytes(split) for split in manifest.splits)
    for split in manifest.splits:
        console.print(
            f"{split}: {manifest.num_documents(split):,} documents, "
            f"{manifest.num_tokens(split):,} tokens, {in_short(manifest.num_bytes(split))}B",
            highlight=False,
        )
    console.print(
        f"Vocabulary {manifest.vocab_size:,}. {size / 1e6 / seconds:.1f} MB/s. "
        f"Train on it: lrm train 20m --data.path {config.out}",
        highlight=False,
    )

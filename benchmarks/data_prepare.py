"""How fast text becomes tokens: MB/s of one core for the Python standard library's sources.

    python benchmarks/data_prepare.py --out results/data-prepare.json

Times are CPU seconds of this process and its threads, so that other work on the machine does not
count, with wall clock beside them; each figure is the median over the rounds. `tokenizer` trains
the BPE on its bounded sample, `encode` reads, splits, encodes and writes everything, `whole` is
both. The same text through `tokenizers` alone is the peer of `encode`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

# Before tokenizers is imported: one core is one thread.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from learnable_multipliers.pretrain.data.documents import Corpus
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, Progress, prepare
from learnable_multipliers.pretrain.data.shards import Manifest
from learnable_multipliers.pretrain.data.tokenizer import load_tokenizer

Clock = tuple[float, float]


def clock() -> Clock:
    """Return CPU seconds and wall seconds."""
    return time.process_time(), time.perf_counter()


def measure(config: PrepareConfig) -> tuple[Manifest, dict[str, Clock]]:
    """Prepare once and return the seconds of each part."""
    begun: dict[str, Clock] = {}

    def note(progress: Progress) -> None:
        begun.setdefault(progress.stage, clock())

    start = clock()
    manifest = prepare(config, note)
    end = clock()
    parts = {
        "tokenizer": (begun["tokenizer"], begun["encode"]),
        "encode": (begun["encode"], end),
        "whole": (start, end),
    }
    return manifest, {name: (b[0] - a[0], b[1] - a[1]) for name, (a, b) in parts.items()}


def measure_peer(tokenizer_file: Path, texts: list[str]) -> Clock:
    """Return the seconds `tokenizers` alone takes for the same text."""
    tokenizer = load_tokenizer(tokenizer_file).tokenizer
    start = clock()
    for first in range(0, len(texts), 64):
        batch = tokenizer.encode_batch_fast(texts[first : first + 64], add_special_tokens=False)
        for one in batch:
            len(one.ids)
    end = clock()
    return end[0] - start[0], end[1] - start[1]


def main() -> None:
    """Measure, print and perhaps write the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", help="default: the standard library")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts = list(Corpus(options.sources))
    times: defaultdict[str, list[Clock]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        config = PrepareConfig(
            sources=tuple(options.sources),
            out=Path(folder) / "tokens",
            vocab_size=options.vocab_size,
            num_threads=options.threads,
            overwrite=True,
        )
        for _ in range(options.rounds):
            manifest, parts = measure(config)
            parts["tokenizers alone"] = measure_peer(config.out / "tokenizer.json", texts)
            for name, seconds in parts.items():
                times[name].append(seconds)
    megabytes = sum(manifest.num_bytes(split) for split in manifest.splits) / 1e6
    results = {
        "source": manifest.source["sources"],
        "megabytes": round(megabytes, 2),
        "documents": sum(manifest.num_documents(split) for split in manifest.splits),
        "tokens": sum(manifest.num_tokens(split) for split in manifest.splits),
        "vocab_size": manifest.vocab_size,
        "threads": options.threads,
        "rounds": options.rounds,
        "processor": platform.processor() or platform.machine(),
        "tiktoken": version("tiktoken"),
        "tokenizers": version("tokenizers"),
    }
    for name, found in times.items():
        cpu, wall = (statistics.median(column) for column in zip(*found, strict=True))
        results[name] = {
            "cpu_seconds": round(cpu, 3),
            "wall_seconds": round(wall, 3),
            "mb_per_cpu_second": round(megabytes / cpu, 2),
            "mb_per_wall_second": round(megabytes / wall, 2),
        }
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

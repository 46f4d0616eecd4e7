"""How fast text becomes tokens with 1, 2, 4, ... threads, and what takes the time.

    python benchmarks/data_prepare.py SOURCES --tokenizer tokenizer.json --add-eos \
        --threads 1 2 4 8 16 --out results/data-prepare.json

Without sources it reads the Python standard library's; without a tokenizer it trains one. Each
figure is the median over the rounds. `wall` is the whole preparation, `speed-up` is over the first
number of threads. The other columns are CPU seconds, which other work on the machine does not
change: `read` reads and decompresses, one thread a file; `parse` parses and hashes and `encode`
tokenizes, on the number of threads; `main` trains a tokenizer, keeps the order and writes.
`tokenizers alone` encodes the first 10 MB of the same text on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if missing := [
    name
    for name in ("numpy", "safetensors", "tiktoken", "tokenizers", "torch")
    if not find_spec(name)
]:
    sys.exit(f"lrm data prepare needs {', '.join(missing)}: pip install {' '.join(missing)}")

# Before tokenizers is imported: one core is one thread.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from learnable_multipliers.pretrain.data.documents import Corpus
from learnable_multipliers.pretrain.data.encoding import DocumentEncoder
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.shards import Manifest
from learnable_multipliers.pretrain.data.tokenizer import load_tokenizer

COLUMNS = ("wall", "MB/s", "speed-up", "CPU", "read", "parse", "encode", "main")
_PEER_BYTES = 10_000_000


class Clocks:
    """CPU seconds of the threads of a preparation."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        threading.Thread.run = self._counted(threading.Thread.run, lambda thread: thread.name[:8])
        DocumentEncoder.encode_all = self._counted(
            lambda *given, real=DocumentEncoder.encode_all: list(real(*given)), lambda _: "encode"
        )

    def _counted(self, function: Any, name: Any) -> Any:
        def counted(self_: Any, *arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return function(self_, *arguments)
            finally:
                # Appending needs no lock, adding would.
                self._seconds[name(self_)].append(time.thread_time() - start)

        return counted

    def measure(self, config: PrepareConfig) -> tuple[Manifest, dict[str, float]]:
        """Prepare once; return the seconds."""
        self._seconds.clear()
        wall, cpu, main = time.perf_counter(), time.process_time(), time.thread_time()
        manifest = prepare(config)
        seconds = {name: sum(found) for name, found in self._seconds.items()}
        return manifest, {
            "wall": time.perf_counter() - wall,
            "CPU": time.process_time() - cpu,
            "read": seconds["lrm-read"],
            "parse": seconds["lrm-work"] - seconds["encode"],
            "encode": seconds["encode"],
            "main": time.thread_time() - main,
        }


def measure_peer(tokenizer_file: Path, eos_token: str, corpus: Corpus) -> float:
    """Return the MB a CPU second that `tokenizers` alone encodes."""
    tokenizer = load_tokenizer(tokenizer_file, eos_token).tokenizer
    num_bytes, cpu = 0, 0.0
    for text in corpus:
        start = time.process_time()
        (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        len(found.ids)
        cpu += time.process_time() - start
        num_bytes += len(text.encode())
        if num_bytes >= _PEER_BYTES:
            break
    return num_bytes / 1e6 / cpu


def table(rows: dict[int, dict[str, float]]) -> str:
    """Put the figures of each number of threads into a line."""
    lines = [" ".join(f"{name:>8}" for name in ("threads", *COLUMNS))]
    lines += [
        " ".join([f"{count:8}", *(f"{row[name]:8.2f}" for name in COLUMNS)])
        for count, row in rows.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and perhaps write the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", help="default: the standard library")
    parser.add_argument("--tokenizer", type=Path, help="default: train one")
    parser.add_argument("--add-eos", action="store_true", help="as lrm data prepare")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of one that is trained")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clocks = Clocks()
    times: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for count in options.threads:
                config = PrepareConfig(
                    sources=tuple(options.sources),
                    out=Path(folder) / "tokens",
                    tokenizer=options.tokenizer,
                    add_eos=options.add_eos,
                    vocab_size=4096 if options.tokenizer else options.vocab_size,
                    num_threads=count,
                    overwrite=True,
                )
                manifest, seconds = clocks.measure(config)
                times[count].append(seconds)
        peer = measure_peer(
            config.out / "tokenizer.json", manifest.eos_token, Corpus(options.sources)
        )
    megabytes = sum(manifest.num_bytes(split) for split in manifest.splits) / 1e6
    rows: dict[int, dict[str, float]] = {}
    for count, found in times.items():
        row = {name: statistics.median(one[name] for one in found) for name in found[0]}
        first = rows.get(options.threads[0], row)
        row |= {"MB/s": megabytes / row["wall"], "speed-up": first["wall"] / row["wall"]}
        rows[count] = {name: round(row[name], 3) for name in COLUMNS}
    results = {
        "source": manifest.source["sources"],
        "megabytes": round(megabytes, 2),
        "documents": sum(manifest.num_documents(split) for split in manifest.splits),
        "tokens": sum(manifest.num_tokens(split) for split in manifest.splits),
        "vocab_size": manifest.vocab_size,
        "rounds": options.rounds,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "tiktoken": version("tiktoken"),
        "tokenizers": version("tokenizers"),
        "tokenizers alone": {"mb_per_cpu_second": round(peer, 2)},
        "threads": rows,
    }
    print(f"{results['megabytes']} MB, {results['documents']:,} documents; seconds:")
    print(table(rows))
    print(f"tokenizers alone: {peer:.2f} MB per CPU second")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

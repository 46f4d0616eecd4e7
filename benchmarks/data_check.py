"""What the check of the data costs a run: the delay of its first step, and when it finds a change.

    python benchmarks/data_check.py --gigabytes 2

Makes random tokens of the given size, takes the first step of runs on them with and without the
check, times the check of a run, and again with the last token changed, which ends the run. The
files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from learnable_multipliers._checksum import file_sha256
from learnable_multipliers.pretrain.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    RuntimeConfig,
    ScheduleConfig,
    TrainConfig,
)
from learnable_multipliers.pretrain.data.check import DataCheck
from learnable_multipliers.pretrain.data.shards import TOKENIZER_FILE, Manifest, ShardWriter
from learnable_multipliers.pretrain.data.tokenizer import train_tokenizer
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.trainer.trainer import Trainer

_SHARD_TOKENS = 50_000_000
_MODEL = ModelConfig(
    vocab_size=0,
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=128,
    ssm_size=0,
)


def make(folder: Path, gigabytes: float) -> None:
    """Write random tokens of two bytes each."""
    folder.mkdir()
    tokenizer = train_tokenizer((), 257)
    tokenizer.tokenizer.save(str(folder / TOKENIZER_FILE))
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", int(gigabytes * 5e8)), ("valid", 1_000_000)):
        writer = ShardWriter(folder, split, _SHARD_TOKENS)
        for _ in range(0, count, 1_000_000):
            writer.add(random.integers(0, 257, 1_000_000, dtype=np.uint16), 1_000_000)
        writer.close()
        splits[split] = writer.shards
    Manifest(
        dtype="<u2",
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        eos_token=tokenizer.eos_token,
        tokenizer_file=TOKENIZER_FILE,
        tokenizer_sha256=file_sha256(folder / TOKENIZER_FILE),
        splits=splits,
        source={},
    ).save(folder)


def config_of(data: Path, out: Path, *, resume: bool = False) -> TrainConfig:
    """Return a run of a small model on one thread."""
    return TrainConfig(
        out=out,
        resume=resume,
        model=_MODEL,
        data=DataConfig(path=data, sequence_length=128, batch_sequences=8),
        schedule=ScheduleConfig(tokens=2 * 10**7, warmup_tokens=10**4, decay_tokens=10**4),
        log=LogConfig(tensorboard=False, drift=False, sample_tokens=0),
        checkpoint=CheckpointConfig(every=0),
        runtime=RuntimeConfig(device="cpu", num_threads=1),
    )


def first_step(config: TrainConfig) -> float:
    """Return the seconds from nothing to the end of the first step."""
    began = time.perf_counter()
    trainer = Trainer(config)
    next(trainer.steps())
    seconds = time.perf_counter() - began
    trainer.close()
    trainer._data_check.wait()
    return seconds


def delays(data: Path, root: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds to the first step, with and without the check, new and resumed."""
    saved = config_of(data, root / "saved", resume=True)
    trainer = Trainer(replace(saved, resume=False))
    next(trainer.steps())
    trainer.save()
    trainer.close()
    found: dict[str, list[float]] = {}
    for index in range(rounds):
        for name, config in (("new", config_of(data, root / f"new-{index}")), ("resumed", saved)):
            # Nothing is known of the data.
            os.environ["LRM_CACHE"] = str(root / f"cache-{name}-{index}")
            found.setdefault(f"{name}, with the check", []).append(first_step(config))
            with patch.object(DataCheck, "start", lambda check: None):
                config = replace(config, out=config.out if config.resume else root / f"off-{index}")
                found.setdefault(f"{name}, without", []).append(first_step(config))
    return found


def seconds_of_check(config: TrainConfig) -> float:
    """Return how long a run lasts until its data are known to be good, or ends because of them."""
    began = time.perf_counter()
    with closing(Trainer(config)) as trainer:
        try:
            for _ in trainer.steps():
                if trainer._data_check.has_ended and not trainer._data_check.failed:
                    break
        except ValueError as error:
            print(error)
    return time.perf_counter() - began


def main() -> None:
    """Print medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make(root / "data", options.gigabytes)
        files = sorted((root / "data").glob("*.bin"))
        medians = {
            name: round(statistics.median(seconds), 3)
            for name, seconds in delays(root / "data", root, options.rounds).items()
        }
        for name in ("good", "changed"):
            if name == "changed":
                with files[-2].open("r+b") as file:
                    file.seek(-2, os.SEEK_END)
                    file.write(b"\x00\x00")
            began = time.perf_counter()
            for path in files:
                file_sha256(path)
            alone = time.perf_counter() - began
            os.environ["LRM_CACHE"] = str(root / f"cache-{name}")
            beside = seconds_of_check(config_of(root / "data", root / name))
            medians[f"{name} tokens: one pass alone"] = round(alone, 3)
            medians[f"{name} tokens: from start to the end of the check"] = round(beside, 3)
        print(json.dumps({"gigabytes": options.gigabytes, "seconds": medians}, indent=1))


if __name__ == "__main__":
    main()

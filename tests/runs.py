"""Small data and small runs for tests of the trainer."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from learnable_multipliers._checksum import decode_line, encode_line
from learnable_multipliers.pretrain.checkpoint.manifest import MANIFEST, fingerprint, manifest_json
from learnable_multipliers.pretrain.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    RuntimeConfig,
    ScheduleConfig,
    TrainConfig,
)
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.shards import VALID
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.trainer.run_state import tensors_of
from learnable_multipliers.pretrain.trainer.trainer import Trainer

HYBRID = ModelConfig(
    vocab_size=0,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    ssm_size=32,
    ssm_head_dim=16,
    ssm_state_size=16,
    ssm_chunk_size=16,
)
LLAMA = replace(HYBRID, ssm_size=0)
LENGTH, BATCH = 32, 4


def prepared(folder: Path) -> Path:
    """Prepare some lines of text, byte by byte."""
    source = folder / "text"
    source.mkdir()
    for index in range(40):
        lines = [f"{index} times {n} is {index * n}, or nearly so." for n in range(30)]
        (source / f"{index:02d}.txt").write_text("\n".join(lines))
    prepare(
        PrepareConfig(
            sources=(str(source),), out=folder / "data", vocab_size=257, valid_fraction=0.2
        )
    )
    return folder / "data"


def bytes_per_token(data: TrainingData) -> float:
    """Return the bytes of held-out text that one token stands for, on average."""
    return data.manifest.num_bytes(VALID) / data.manifest.num_tokens(VALID)


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records as the lines of a metrics.jsonl."""
    path.write_bytes(b"".join(map(encode_line, records)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl as they are written."""
    return [decode_line(line) for line in path.read_bytes().splitlines(keepends=True)]


def small_run(data: Path, out: Path, steps: int = 12, **changes: object) -> TrainConfig:
    """Return a run of a few steps; `changes` replace fields of the whole config."""
    tokens = steps * LENGTH * BATCH
    config = TrainConfig(
        out=out,
        model=HYBRID,
        data=DataConfig(path=data, sequence_length=LENGTH, batch_sequences=BATCH),
        schedule=ScheduleConfig(
            tokens=tokens, warmup_tokens=2 * LENGTH * BATCH, decay_tokens=tokens // 3
        ),
        optimizer=OptimizerConfig(lr=4e-3),
        log=LogConfig(
            every=2,
            weights_every=4,
            evaluate_every=6,
            evaluate_tokens=640,
            sample_tokens=8,
            tensorboard=False,
            drift=False,
        ),
        checkpoint=CheckpointConfig(every=5),
        runtime=RuntimeConfig(device="cpu"),
    )
    return replace(config, **changes)


def trained(config: TrainConfig) -> Trainer:
    """Train a run to its end."""
    trainer = Trainer(config)
    assert trainer.train() == "finished"
    return trainer


def killed_after(config: TrainConfig, step: int) -> Trainer:
    """Train a run up to a step and leave it there, as if the process were gone."""
    trainer = Trainer(config)
    for done in trainer.steps():
        if done == step:
            break
    trainer.close()
    return trainer


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return weights, raw weights, multipliers and moments."""
    kept = tensors_of(trainer.model, trainer.optimizer)
    return {f"{file}/{name}": value for file in kept for name, value in kept[file].items()}


def assert_same(first: Trainer, second: Trainer) -> None:
    """Compare two runs bit for bit."""
    mine, other = everything(first), everything(second)
    assert mine.keys() == other.keys()
    for name in mine:
        assert torch.equal(mine[name], other[name]), name


def damage(path: Path) -> None:
    """Turn one bit of a file."""
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)


def rewritten(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and make the manifest agree, as one with bad intent would."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / MANIFEST).read_text())
    files = manifest["files"] | {name: fingerprint(path / name)}
    (path / MANIFEST).write_bytes(manifest_json(files))

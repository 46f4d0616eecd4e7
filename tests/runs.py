"""Small data and small runs for tests of the trainer."""

from dataclasses import replace
from pathlib import Path

from learnable_multipliers.pretrain.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    RuntimeConfig,
    TrainConfig,
)
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.models.config import ModelConfig
from learnable_multipliers.pretrain.schedule import ScheduleConfig

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
        ),
        checkpoint=CheckpointConfig(every=5),
        runtime=RuntimeConfig(device="cpu"),
    )
    return replace(config, **changes)

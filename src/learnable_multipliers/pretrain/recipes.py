"""Whole training runs by name: a model's shape and a recipe for it."""

from __future__ import annotations

from pathlib import Path

from learnable_multipliers.pretrain.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    SpikeConfig,
    TrainConfig,
)
from learnable_multipliers.pretrain.model.presets import PRESETS

# Long runs roll back automatically; short runs are compared, spikes included.
_WATCHED = SpikeConfig(max_rollbacks=3)


def _tiny(shape: str) -> TrainConfig:
    return TrainConfig(
        out=Path("runs") / shape,
        model=PRESETS[shape],
        data=DataConfig(sequence_length=128, batch_sequences=16),
        schedule=ScheduleConfig(tokens=1_024_000, warmup_tokens=51_200, decay_tokens=348_160),
        optimizer=OptimizerConfig(lr=8e-3),
        log=LogConfig(
            every=5, weights_every=25, evaluate_every=100, evaluate_tokens=32_768, prompt="def "
        ),
        checkpoint=CheckpointConfig(every=200),
    )


def _20m(shape: str) -> TrainConfig:
    return TrainConfig(
        out=Path("runs") / shape,
        model=PRESETS[shape],
        data=DataConfig(sequence_length=1024, batch_sequences=64),
        schedule=ScheduleConfig(
            tokens=80_000_000, warmup_tokens=4_000_000, decay_tokens=16_000_000
        ),
        optimizer=OptimizerConfig(lr=4e-3),
        log=LogConfig(evaluate_every=200),
    )


def _90m() -> TrainConfig:
    return TrainConfig(
        out=Path("runs/90m"),
        model=PRESETS["90m"],
        data=DataConfig(sequence_length=2048, batch_sequences=256, micro_batch_sequences=32),
        schedule=ScheduleConfig(
            tokens=4_000_000_000, warmup_tokens=50_000_000, decay_tokens=700_000_000
        ),
        optimizer=OptimizerConfig(lr=2e-3),
        spikes=_WATCHED,
    )


def _paper(shape: str, micro_batch_sequences: int = 16) -> TrainConfig:
    """Return the paper's run: 25 GT at a constant rate, 5 GT of decay by 8.

    Learning rate and batch are from a public script by the model's authors for 0.5B; with their
    forward multipliers the rate is the same for all sizes. The paper sweeps it and does not give
    the ramp.
    """
    return TrainConfig(
        out=Path("runs") / shape,
        model=PRESETS[shape],
        data=DataConfig(
            sequence_length=2048,
            batch_sequences=512,
            micro_batch_sequences=micro_batch_sequences,
        ),
        schedule=ScheduleConfig(
            tokens=30_000_000_000,
            warmup_tokens=100_000_000,
            decay_tokens=5_000_000_000,
            decay_factor=8.0,
            rampup_tokens=500_000_000,
            rampup_start_sequences=64,
            rampup_increment_sequences=64,
        ),
        optimizer=OptimizerConfig(lr=1.28e-3, eps=1e-16),
        spikes=_WATCHED,
    )


RECIPES: dict[str, tuple[str, TrainConfig]] = {
    "tiny": ("hybrid of 0.8M parameters, minutes on a laptop's CPU", _tiny("tiny")),
    "tiny-llama": ("Llama of the same size", _tiny("tiny-llama")),
    "20m": ("hybrid of 21M parameters, 80M tokens: under a minute on an H200", _20m("20m")),
    "20m-llama": ("Llama of the same size", _20m("20m-llama")),
    "90m": ("hybrid of the shape of Falcon-H1-Tiny-90M, 4G tokens", _90m()),
    "falcon-h1-0.5b": (
        "Falcon-H1-0.5B with the paper's recipe, 30G tokens",
        _paper("falcon-h1-0.5b"),
    ),
    "llama-0.5b": ("Llama of the same size with the same recipe", _paper("llama-0.5b")),
    "falcon-h1-1.5b": ("Falcon-H1-1.5B with that recipe", _paper("falcon-h1-1.5b", 8)),
    "falcon-h1-3b": ("Falcon-H1-3B with that recipe", _paper("falcon-h1-3b", 4)),
}

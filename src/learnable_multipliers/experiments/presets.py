"""The runs that experiments vary: a small Llama and a small hybrid for each preset.

Runs of the `cpu` and `gpu` presets are far shorter than the paper's, so they decay more: after
2 wd sum(lr) = 4 a matrix has forgotten where it started, and its norm is that of the equilibrium
(eq. 1). The paper's own runs reach about 6.7.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from learnable_multipliers.experiments.run import Preset
from learnable_multipliers.pretrain.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.optimizer_config import OptimizerKind
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.schedule import Schedule

Family = Literal["llama", "hybrid"]
OPTIMIZERS: tuple[OptimizerKind, ...] = ("adamw", "muon")
NAMES = {"adamw": "AdamW", "muon": "Muon", "llama": "Llama", "hybrid": "hybrid"}
"""Of optimizers and models, in plots and tables."""
SEEDS: dict[Preset, tuple[int, ...]] = {"cpu": (0,), "gpu": (0, 1, 2), "paper": (0,)}
SCALARS: dict[Preset, tuple[Literal["linear", "log"], float]] = {
    "cpu": ("log", 6e-2),
    "gpu": ("log", 2e-2),
    "paper": ("linear", 1e-2),
}
"""Parametrization and peak learning rate of scalars on all matrices. The rate bounds how far a
multiplier gets from its start of 1: the paper's 1e-2 (app. B) is a change of 290 over 30 GT, but of
5 over 600 steps, too little for a narrow model, whose head wants a factor of 15. In logarithms the
short runs reach e^5 (cpu) and e^10 (gpu)."""

_CPU = ModelConfig(
    vocab_size=0,
    hidden_size=64,
    num_layers=2,
    max_length=256,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=192,
)
_GPU = ModelConfig(
    vocab_size=0,
    hidden_size=256,
    num_layers=6,
    max_length=2048,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=768,
)
# Without it the residual stream of a small Llama has one direction in common at all positions, and
# training begins with a plateau (`lrm experiment initialization`).
_EMBEDDING = 2**2.5
SHAPES: dict[tuple[Preset, Family], ModelConfig] = {
    ("cpu", "llama"): replace(_CPU, mup_embedding=_EMBEDDING),
    ("cpu", "hybrid"): replace(
        _CPU,
        num_kv_heads=1,
        intermediate_size=128,
        ssm_size=64,
        ssm_head_dim=32,
        ssm_state_size=16,
        ssm_chunk_size=32,
    ),
    ("gpu", "llama"): replace(_GPU, mup_embedding=_EMBEDDING),
    ("gpu", "hybrid"): replace(
        _GPU,
        mup_embedding=_EMBEDDING,
        num_kv_heads=1,
        intermediate_size=512,
        ssm_size=384,
        ssm_head_dim=64,
        ssm_state_size=64,
    ),
}


def base(preset: Preset, family: Family) -> TrainConfig:
    """Return the plain run of a family, without multipliers, that experiments change."""
    if preset == "paper":
        name = "falcon-h1-0.5b" if family == "hybrid" else "llama-0.5b"
        config = RECIPES[name][1]
        return replace(config, optimizer=replace(config.optimizer, placement="none"))
    length, sequences, steps = (64, 8, 100) if preset == "cpu" else (512, 64, 600)
    tokens = steps * length * sequences
    return TrainConfig(
        model=SHAPES[preset, family],
        data=DataConfig(sequence_length=length, batch_sequences=sequences),
        schedule=ScheduleConfig(
            tokens=tokens, warmup_tokens=tokens // 10, decay_tokens=tokens // 5
        ),
        optimizer=OptimizerConfig(
            placement="none",
            lr=8e-3 if preset == "cpu" else 4e-3,
            weight_decay=4.0 if preset == "cpu" else 1.0,
        ),
        log=LogConfig(
            every=max(1, steps // 60),
            weights_every=steps // 10,
            drift=False,
            evaluate_every=0,
            evaluate_tokens=16_384 if preset == "cpu" else 0,
            sample_tokens=0,
            tensorboard=False,
        ),
        # A run of seconds is repeated, not resumed.
        checkpoint=CheckpointConfig(every=0),
    )


def with_optimizer(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Return a run with other settings of its optimizer."""
    return replace(config, optimizer=replace(config.optimizer, **changes))


def with_scalars(config: TrainConfig, preset: Preset, *, head: bool = False) -> TrainConfig:
    """Return a run with one multiplier on every matrix, trained as `SCALARS` says.

    Args:
        head: Also on the head, whose scale is otherwise that of the final norm.
    """
    scale, lr = SCALARS[preset]
    rules = (". only=head kind=scalar",) if head else ()
    return with_optimizer(
        config, placement="scalar", multiplier_scale=scale, multiplier_lr=lr, rules=rules
    )


def with_signals(config: TrainConfig) -> TrainConfig:
    """Return a run with about ten records of its signals."""
    every = max(1, len(Schedule.of_run(config)) // 10)
    return replace(config, log=replace(config.log, signals_every=every))


def lengthened(config: TrainConfig, times: int) -> TrainConfig:
    """Return a run so many times as long, with as many records of it."""
    lengths = ("tokens", "warmup_tokens", "decay_tokens", "minimum_tokens", "rampup_tokens")
    every = ("every", "weights_every", "signals_every", "evaluate_every")
    return replace(
        config,
        schedule=replace(
            config.schedule, **{name: times * getattr(config.schedule, name) for name in lengths}
        ),
        log=replace(config.log, **{name: times * getattr(config.log, name) for name in every}),
    )


def settling(config: TrainConfig) -> float:
    """Return 2 wd sum(lr): how thoroughly matrices forget their start; at least 4 is enough."""
    return 2 * config.optimizer.weight_decay * summed_lr(config)


def summed_lr(config: TrainConfig) -> float:
    """Return the sum of the learning rates of all steps."""
    return sum(rates(config))


def rates(config: TrainConfig) -> list[float]:
    """Return the learning rate of each step."""
    return [config.optimizer.lr * step.lr_factor for step in Schedule.of_run(config)]

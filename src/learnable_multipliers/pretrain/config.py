"""The configuration of a training run, as typed data; the command line is made from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from learnable_multipliers._serialization import from_dict, to_dict
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.optimizer_config import OptimizerConfig

DecayShape = Literal["exponential", "linear", "cosine"]
MultiplierSchedule = Literal["same", "no-warmup", "no-decay"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data and batches."""

    path: Path | None = None
    """Output folder of `lrm data prepare`. Default: the Python standard library's source code,
    prepared on first use."""
    sequence_length: int = 2048
    """Tokens in a sequence."""
    batch_sequences: int = 512
    """Sequences in a step, over all micro-batches (paper: about 1M tokens)."""
    micro_batch_sequences: int = 0
    """Sequences in one forward and backward pass; 0 is the whole batch."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Length of the run, learning-rate schedule and batch ramp-up."""

    tokens: int = 30_000_000_000
    """Length of the whole run, in tokens. Paper: 30e9 (25e9 before the decay); long run 240e9."""

    warmup_tokens: int = 100_000_000
    """Linear warmup from zero, in tokens. Paper: 0.1e9."""

    decay_tokens: int = 5_000_000_000
    """Length of the decay, in tokens; 0 is no decay. Paper: 5e9; long run 40e9."""

    decay_factor: float = 8.0
    """Peak learning rate over final learning rate. Paper: 8; long run 32."""

    decay_shape: DecayShape = "exponential"
    """Shape of the decay. Paper: exponential."""

    minimum_tokens: int = 0
    """Tokens after the decay, at the final learning rate. Paper: 0; long run 40e9."""

    multipliers: MultiplierSchedule = "same"
    """Schedule of the multipliers' learning rate: the same as the matrices', or without its warmup
    or its decay. Paper: same."""

    rampup_tokens: int = 0
    """Length of the batch ramp-up, in tokens; 0 is no ramp. Paper: uses a ramp, length not
    given."""

    rampup_start_sequences: int = 64
    """Batch at the start of the ramp, in sequences. Paper: not given."""

    rampup_increment_sequences: int = 64
    """Batch increment of the ramp, in sequences. Paper: not given."""

    def __post_init__(self) -> None:
        counts = ("tokens", "rampup_start_sequences", "rampup_increment_sequences")
        _check_at_least(1, "schedule.", self, *counts)
        lengths = ("warmup_tokens", "decay_tokens", "minimum_tokens", "rampup_tokens")
        _check_at_least(0, "schedule.", self, *lengths)
        if self.warmup_tokens > self.decay_start:
            raise ValueError(
                f"warmup_tokens ({self.warmup_tokens}), decay_tokens ({self.decay_tokens}) and "
                f"minimum_tokens ({self.minimum_tokens}) are longer than the run, tokens "
                f"({self.tokens}): shorten them, for instance {self._shortened()}, or lengthen "
                "the run"
            )
        if self.rampup_tokens > self.tokens:
            raise ValueError(
                f"rampup_tokens={self.rampup_tokens} is longer than the run ({self.tokens} tokens)"
            )
        if not 1 <= self.decay_factor < math.inf:
            raise ValueError(
                f"decay_factor divides the learning rate and is at least 1, got {self.decay_factor}"
            )

    @property
    def decay_start(self) -> int:
        """Tokens seen when the decay begins."""
        return self.tokens - self.decay_tokens - self.minimum_tokens

    def _shortened(self) -> str:
        """Return options for parts that are too long: shares of the run that leave half of it."""
        twentieth, fifth = self.tokens // 20, self.tokens // 5
        shorter = [
            f"{option} {most}"
            for option, given, most in (
                ("--schedule.warmup-tokens", self.warmup_tokens, twentieth),
                ("--schedule.decay-tokens", self.decay_tokens, fifth),
                ("--schedule.minimum-tokens", self.minimum_tokens, fifth),
            )
            if given > most
        ]
        return " ".join(shorter)


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Loss spikes, and steps that are skipped."""

    max_rollbacks: int = 0
    """Maximum number of rollbacks to the checkpoint before a loss spike, skipping its data; 0 only
    warns."""
    window: int = 50
    """Logged losses (one per log.every steps) in the median that defines a normal loss; no spike is
    detected before."""
    deviations: float = 6.0
    """A loss is high if it exceeds the median by this many robust standard deviations ..."""
    min_rise: float = 0.2
    """... and by at least this many nats (a smooth curve has almost no deviation)."""
    patience: int = 3
    """Consecutive high losses that count as a spike; a non-finite loss is high."""
    max_skipped: int = 50
    """Consecutive steps with non-finite gradients after which the run fails; 0 disables this."""

    def __post_init__(self) -> None:
        _check_at_least(0, "spikes.", self, "max_rollbacks", "max_skipped")
        _check_at_least(1, "spikes.", self, "patience")
        _check_at_least(2, "spikes.", self, "window")
        _check_at_most(10_000, "every checkpoint holds these losses", "spikes.", self, "window")
        for name in ("deviations", "min_rise"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"spikes.{name} must be a positive number, got {getattr(self, name):g}"
                )


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is logged, and how often (in steps)."""

    every: int = 10
    """Steps between records of loss, learning rate and speed; 0 logs only the first step."""
    weights_every: int = 100
    """Steps between statistics of norms and multipliers; always at the first and last step."""
    drift: bool = True
    """Scale symmetries of the model, found at the start in seconds to half a minute the first time,
    and how far multipliers drift along them."""
    drift_bound: float = 10.0
    """Factor of drift that raises an alarm."""
    signals_every: int = 0
    """Steps between records of the sizes of activations and of rows, layer by layer; always at the
    first and last step; 0 is never."""
    evaluate_every: int = 250
    """Steps between evaluations on held-out text; always at the last step."""
    evaluate_tokens: int = 500_000
    """Maximum number of held-out tokens per evaluation; 0 is all."""
    sample_every: int = 0
    """Steps between samples; always at the last step."""
    sample_tokens: int = 120
    """Length of a sample; 0 samples nothing."""
    prompt: str = "The"
    """Prompt of samples."""
    tensorboard: bool = True
    """Scalars for TensorBoard, where it is installed."""
    wandb: str = ""
    """Weights & Biases project to log to as well."""
    trackio: str = ""
    """Trackio project to log to as well."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints to continue from."""

    every: int = 1000
    """Steps between checkpoints; 0 saves only at the end and when interrupted."""
    keep: int = 2
    """Number of newest checkpoints to keep, at least 2."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism over the ranks of torchrun; not needed for one process."""

    data: int = 0
    """Replicas of the model (DDP), each on its part of a batch; 0 is world size / (shard x
    tensor)."""
    shard: int = 1
    """Ranks that a replica is sharded over (FSDP2)."""
    tensor: int = 1
    """Tensor-parallel ranks: heads, MLP features and vocabulary are sharded over them."""
    timeout: float = 600.0
    """Collective timeout, in seconds; the run then fails."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Device, precision and compilation."""

    device: str = "auto"
    """cuda, mps or cpu; auto is the first available."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the matrix products; auto is bfloat16 on a GPU."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of the layers' matrices; the optimizer keeps float32 raw weights. bfloat16
    needs no casts and less memory, and trains as float32 does, from a rounded start. One process
    only."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile, layer by layer; auto is on for CUDA."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Capture forward and backward as a CUDA graph and replay it, so that the GPU never waits for
    Python; auto is on for CUDA. Turn it off to debug."""
    recompute: Literal["none", "layers"] = "none"
    """Activation checkpointing: layers keeps only each layer's input and recomputes the layer in
    the backward pass. Saves memory for up to a third more computation."""
    num_threads: int = 0
    """CPU threads; 0 is torch's default."""
    peak_tflops: float = 0.0
    """Peak TFLOP/s of the device at this dtype, for MFU; 0 uses the known value of the device."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    out: Path = Path("runs/run")
    """Output folder: config, metrics, checkpoints."""
    name: str = ""
    """Name in reports; the folder's name if empty."""
    seed: int = 0
    """Seed of weights and sample order."""
    z_loss: float = 1e-4
    """Weight of the squared log normalizer in the loss (paper: 1e-4)."""
    resume: bool = False
    """Resume from the newest valid checkpoint in the folder."""
    dry_run: bool = False
    """Show plan, sizes, memory and the first batch without training."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def check(self) -> None:
        """Raise a ValueError for invalid settings, or settings that cannot work together."""
        # The command line knows the types; a config made in Python may hold anything.
        from_dict(TrainConfig, to_dict(self))
        self.model.check()
        _check_at_least(1, "data.", self.data, "sequence_length", "batch_sequences")
        if self.data.sequence_length > self.model.max_length:
            raise ValueError(
                f"data.sequence_length is {self.data.sequence_length}, but model.max_length, which "
                f"goes into exported models, is {self.model.max_length}: raise it as well"
            )
        self.optimizer.check()
        self._check_variant()
        if not self.log.drift_bound > 1:
            raise ValueError(
                f"log.drift_bound is a factor greater than 1, got {self.log.drift_bound:g}"
            )
        reason = "each is a pass of the model over all tokens before it"
        _check_at_most(10_000, reason, "log.", self.log, "sample_tokens")
        _check_at_least(1, "parallel.", self.parallel, "shard", "tensor")
        if not self.parallel.timeout > 0:
            raise ValueError(f"parallel.timeout must be positive, got {self.parallel.timeout:g}")
        if self.log.signals_every and max(self.parallel.shard, self.parallel.tensor) > 1:
            raise ValueError(
                "log.signals_every measures whole weights and activations, which sharded runs do "
                "not have: set parallel.shard=1 and parallel.tensor=1, or log.signals_every=0"
            )
        if self.checkpoint.keep < 2:
            raise ValueError(
                "checkpoint.keep must be at least 2: with one, a damaged checkpoint leaves nothing "
                "to resume from"
            )
        if self.spikes.max_rollbacks and not (self.log.every and self.checkpoint.every):
            raise ValueError(
                "spikes.max_rollbacks needs logged losses and checkpoints to go back to: set "
                "log.every and checkpoint.every, or spikes.max_rollbacks=0"
            )
        _check_at_least(0, "", self, "z_loss")
        for section in ("data", "log", "checkpoint", "parallel", "runtime"):
            config = getattr(self, section)
            numbers = {
                name for name, value in vars(config).items() if isinstance(value, int | float)
            }
            # An infinite drift bound never warns.
            _check_at_least(0, f"{section}.", config, *sorted(numbers - {"drift_bound"}))

    def _check_variant(self) -> None:
        if self.optimizer.variant == "none":
            return
        if self.runtime.param_dtype != "float32":
            raise ValueError(
                "optimizer.variant trains the model's own weights: set runtime.param_dtype=float32"
            )
        if max(self.parallel.shard, self.parallel.tensor) > 1:
            raise ValueError(
                "optimizer.variant does not support sharded matrices: set parallel.shard=1 and "
                "parallel.tensor=1"
            )


def _check_at_least(least: int, prefix: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not least <= value < math.inf:
            raise ValueError(f"{prefix}{name} must be a number of at least {least}, got {value:g}")
        if isinstance(value, int) and value >= 1 << 63:
            raise ValueError(f"{prefix}{name} must be below 2^63, got {value}")


def _check_at_most(most: int, reason: str, prefix: str, config: object, name: str) -> None:
    value = getattr(config, name)
    if value > most:
        raise ValueError(f"{prefix}{name} must be at most {most:,}, got {value:,}: {reason}")

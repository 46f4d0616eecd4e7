"""Describe a run without training: its plan, length, memory and first batch."""

from __future__ import annotations

import math

import torch

from learnable_multipliers._formats import count, size
from learnable_multipliers._plan import render
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.distributed import Axes, resolve_axes
from learnable_multipliers.pretrain.metrics.progress import printable
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.trainer.build import make_plan, resolve_config
from learnable_multipliers.pretrain.trainer.device import (
    Device,
    choose_device,
    performance_warnings,
)
from learnable_multipliers.pretrain.trainer.memory import estimate, memory_warning
from learnable_multipliers.pretrain.trainer.schedule import Schedule, repeated_data_warning

# How much of the first batch is shown.
_TOKENS, _LINES = 48, 8


def describe(config: TrainConfig, columns: int | None = None) -> str:
    """Return the description of a run, with the plan as wide as the terminal."""
    device = choose_device(config.runtime)
    data = TrainingData.open(config.data, config.model.vocab_size, config.seed)
    config = resolve_config(config, data)
    with torch.device("meta"):
        model = HybridLM(config.model)
    planned = make_plan(model, config.optimizer)
    taken = Schedule.of_run(config)
    lines = [render(planned, columns), ""]
    lines += _run(config, data, taken) + [""]
    axes = resolve_axes(config.parallel.data, config.parallel.shard, config.parallel.tensor)
    lines += _memory(config, device, axes) + [""]
    slow = performance_warnings(config, device.for_world_size(math.prod(axes)))
    if slow:
        lines += ["Slower than it could be:", *(f"  {path.message}" for path in slow), ""]
    lines += _first_batch(data, taken[0].sequences)
    return "\n".join(lines)


def _run(config: TrainConfig, data: TrainingData, taken: Schedule) -> list[str]:
    last = taken[-1]
    total = taken.tokens_before(len(taken))
    peak = taken.peak_factor * config.optimizer.lr
    full = config.data.batch_sequences
    lines = [
        f"Run: {len(taken):,} steps, {count(total)} tokens, "
        f"{total / data.num_tokens:.2f} epochs of {count(data.num_tokens)} tokens at "
        f"{data.folder}",
        f"  batch {taken[0].sequences}"
        + (f" -> {full}" if taken[0].sequences != full else "")
        + f" sequences of {config.data.sequence_length}",
        f"  learning rate: first {taken[0].lr_factor * config.optimizer.lr:.3g}, peak {peak:.3g}, "
        f"final {last.lr_factor * config.optimizer.lr:.3g}",
    ]
    repeated = repeated_data_warning(config.schedule, data.num_tokens)
    return lines if repeated is None else [*lines, f"  Warning: {repeated}"]


def _memory(config: TrainConfig, device: Device, axes: Axes) -> list[str]:
    estimated = estimate(config, device, axes)
    rows = {**estimated.rows, "peak": estimated.peak}
    width = max(map(len, rows))
    each = f" of each of {math.prod(axes)} ranks" if math.prod(axes) > 1 else ""
    lines = [
        f"Memory{each} on {device.name} ({device.precision}"
        f"{', compiled' if device.compiled else ''}), estimated from shapes:",
        *(f"  {name:<{width}}  {size(used):>10}" for name, used in rows.items()),
    ]
    if not estimated.accumulates:
        lines.append("  Gradients are written while activations are freed: the larger one counts.")
    short = memory_warning(estimated, device)
    return lines if short is None else [*lines, f"  Does not fit: {short}"]


def _first_batch(data: TrainingData, sequences: int) -> list[str]:
    # Read one sequence: a batch meant for another machine may not fit into this one.
    first = data.batch(0, 1, torch.device("cpu"))[0]
    text = printable(data.decode(first[:_TOKENS].tolist()))
    return [
        f"First batch: {sequences} sequences of {len(first) - 1} tokens; it begins",
        *(f"  | {line}" for line in text.splitlines()[:_LINES]),
    ]

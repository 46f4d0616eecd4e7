"""What a run would be: plan, sizes, memory and the first batch, without training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learnable_multipliers.optim.muon import is_hidden
from learnable_multipliers.plan import Plan
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.device import Device, choose_device
from learnable_multipliers.pretrain.models.hybrid import HybridLM
from learnable_multipliers.pretrain.optimizer import make_plan
from learnable_multipliers.pretrain.progress import in_short
from learnable_multipliers.pretrain.schedule import Step, steps
from learnable_multipliers.pretrain.train import resolved
from learnable_multipliers.pretrain.training_data import TrainingData


def describe(config: TrainConfig) -> str:
    """Return the description of a run, for a reader."""
    device = choose_device(config.runtime)
    data = TrainingData.open(config.data, config.model.vocab_size, config.seed)
    config = resolved(config, data)
    config.check()
    with torch.device("meta"):
        model = HybridLM(config.model)
    planned = make_plan(model, config.optimizer)
    taken = steps(config.schedule, config.data.batch_sequences, config.data.sequence_length)
    lines = [str(planned), ""]
    lines += _run(config, data, taken) + [""]
    lines += _memory(config, model, planned, device) + [""]
    lines += _first_batch(config, data, taken)
    return "\n".join(lines)


def _run(config: TrainConfig, data: TrainingData, taken: list[Step]) -> list[str]:
    last = taken[-1]
    total = last.tokens_before + last.sequences * config.data.sequence_length
    peak = max(step.lr_factor for step in taken) * config.optimizer.lr
    full = config.data.batch_sequences
    return [
        f"Run: {len(taken):,} steps, {in_short(total)} tokens, "
        f"{total / data.num_tokens:.2f} epochs of {in_short(data.num_tokens)} tokens at "
        f"{data.folder}",
        f"  batch {taken[0].sequences}"
        + (f" -> {full}" if taken[0].sequences != full else "")
        + f" sequences of {config.data.sequence_length}, learning rate "
        f"{taken[0].lr_factor * config.optimizer.lr:.3g} -> {peak:.3g} -> "
        f"{last.lr_factor * config.optimizer.lr:.3g}",
    ]


def _memory(config: TrainConfig, model: HybridLM, plan: Plan, device: Device) -> list[str]:
    parameters = model.num_parameters
    carrying = sum(math.prod(entry.shape) for entry in plan.entries if entry.carries)
    hidden = 0
    if config.optimizer.kind == "muon":
        # Muon keeps one moment of a hidden matrix, AdamW two.
        hidden = sum(math.prod(entry.shape) for entry in plan.entries if is_hidden(entry.matrix))
    rows = [
        ("weights", 4 * parameters),
        ("gradients", 4 * parameters),
        ("raw weights", 4 * carrying),
        ("moments", 8 * (parameters - hidden) + 4 * hidden),
        ("multipliers and moments", 12 * plan.num_multipliers),
        ("activations, before the compiler saves some", _activations(config, model, device)),
    ]
    total = sum(size for _, size in rows)
    width = max(len(name) for name, _ in rows)
    return [
        f"Memory on {device.name} ({str(device.dtype).removeprefix('torch.')}"
        f"{', compiled' if device.compiled else ''}):",
        *(f"  {name:<{width}}  {_gib(size):>10}" for name, size in rows),
        f"  {'together':<{width}}  {_gib(total):>10}",
    ]


def _activations(config: TrainConfig, model: HybridLM, device: Device) -> int:
    """Return the bytes autograd keeps for one micro-batch, from a pass without numbers."""
    data = config.data
    sequences = data.micro_batch_sequences or data.batch_sequences
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
            # Held on to, so that no other tensor takes its place in memory and in the count.
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    model = model.to(device.dtype)
    tokens = torch.zeros(1, data.sequence_length + 1, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.loss(tokens, config.z_loss)
    return sequences * sum(kept.values())


def _first_batch(config: TrainConfig, data: TrainingData, taken: list[Step]) -> list[str]:
    batch = data.batch(0, taken[0].sequences, torch.device("cpu"))
    text = data.decode(batch[0, :48].tolist())
    return [
        f"First batch: {batch.shape[0]} sequences of {batch.shape[1] - 1} tokens; it begins",
        *(f"  | {line}" for line in text.splitlines()[:8]),
    ]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"

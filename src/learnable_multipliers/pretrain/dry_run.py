"""What a run would be: plan, sizes, memory and the first batch, without training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from learnable_multipliers.multiplier import initial_values
from learnable_multipliers.optim.muon import is_hidden
from learnable_multipliers.plan import Plan
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.device import Device, choose_device
from learnable_multipliers.pretrain.models.hybrid import HybridLM
from learnable_multipliers.pretrain.optimizer import make_plan
from learnable_multipliers.pretrain.progress import in_short, printable
from learnable_multipliers.pretrain.schedule import Step, steps
from learnable_multipliers.pretrain.slow_paths import slow_paths
from learnable_multipliers.pretrain.train import resolved
from learnable_multipliers.pretrain.training_data import TrainingData

# Weights, raw weights, multipliers and all moments are float32.
_FLOAT = 4
# Of the first batch, what is shown.
_TOKENS, _LINES = 48, 8


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
    slow = slow_paths(config, device)
    if slow:
        lines += ["Slower than it could be:", *(f"  {path.in_words}" for path in slow), ""]
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
    rows = state_bytes(config, model, plan)
    saves = ", before the compiler saves some" if device.compiled else ""
    rows[f"activations of a micro-batch{saves}"] = activation_bytes(config, device)
    rows["together"] = sum(rows.values())
    width = max(map(len, rows))
    return [
        f"Memory on {device.name} ({str(device.dtype).removeprefix('torch.')}"
        f"{', compiled' if device.compiled else ''}):",
        *(f"  {name:<{width}}  {_in_words(size):>10}" for name, size in rows.items()),
    ]


def state_bytes(config: TrainConfig, model: HybridLM, plan: Plan) -> dict[str, int]:
    """Return the bytes of everything that lasts from step to step, and of the gradients."""
    matrices = {entry.name: entry.matrix for entry in plan.entries}
    sizes = dict.fromkeys(("raw weights", "moments", "multipliers and their moments"), 0)
    gradients = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        size, matrix = _FLOAT * parameter.numel(), matrices[name]
        gradients += size
        # Muon keeps one moment of a hidden matrix and an average over it, AdamW two moments; both
        # count steps.
        one = config.optimizer.kind == "muon" and is_hidden(matrix)
        sizes["moments"] += size + 2 * _FLOAT if one else 2 * size + _FLOAT
        if matrix is not None and matrix.carries:
            carried = sum(value.numel() for value in initial_values(matrix).values())
            sizes["raw weights"] += size
            sizes["multipliers and their moments"] += 3 * _FLOAT * carried
    return {"weights": _FLOAT * model.num_parameters, "gradients": gradients, **sizes}


def activation_bytes(config: TrainConfig, device: Device) -> int:
    """Return the bytes autograd keeps for one micro-batch, from a pass without numbers."""
    data = config.data
    sequences = data.micro_batch_sequences or data.batch_sequences
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
            # Held on to, so that no other tensor takes its place in memory and in the count.
            alive.append(tensor)
        return tensor

    # Fake tensors know their device, so autocast and kernels choose as they would in training.
    with FakeTensorMode(), device.device:
        model = HybridLM(config.model)
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        tokens = torch.zeros(sequences, data.sequence_length + 1, dtype=torch.long)
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with device.autocast(), hooks:
            model.loss(tokens, config.z_loss)
    return sum(kept.values())


def _first_batch(config: TrainConfig, data: TrainingData, taken: list[Step]) -> list[str]:
    batch = data.batch(0, taken[0].sequences, torch.device("cpu"))
    text = printable(data.decode(batch[0, :_TOKENS].tolist()))
    return [
        f"First batch: {batch.shape[0]} sequences of {batch.shape[1] - 1} tokens; it begins",
        *(f"  | {line}" for line in text.splitlines()[:_LINES]),
    ]


def _in_words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"

"""The state of a run in a checkpoint, and how a run continues from it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from learnable_multipliers._formats import first_of
from learnable_multipliers._serialization import from_dict, to_dict
from learnable_multipliers.pretrain.checkpoint.store import Checkpoint, CheckpointError
from learnable_multipliers.pretrain.checkpoint.tensor_files import Tensors
from learnable_multipliers.pretrain.config import RuntimeConfig, TrainConfig
from learnable_multipliers.pretrain.metrics.meters import LossReading
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.trainer.schedule import Schedule
from learnable_multipliers.pretrain.trainer.spikes import SpikeState


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything except the tensors."""

    samples: int
    """Sequences trained on."""
    passed_over: int
    """Sequences of the data that were skipped after a spike."""
    seconds: float
    skipped_steps: int
    loss: LossReading
    """Losses since the last record."""
    spikes: SpikeState
    config: TrainConfig
    """Of the run."""
    model: ModelConfig
    """Config of the model; fixed factors that were folded into multipliers are 1."""
    data: str
    """Fingerprint of the data."""
    tokenizer: str
    """SHA-256 of the tokenizer's file, a part of the data."""
    eos_token: str


def state_of(checkpoint: Checkpoint) -> RunState:
    """Return the validated state of a checkpoint."""
    return parse_state(checkpoint, RunState, checkpoint.state, "state.json")


def parse_state(checkpoint: Checkpoint, kind: Any, values: Any, where: str) -> Any:
    """Return a `kind` made from state of a checkpoint; a CheckpointError says what is wrong."""
    try:
        return from_dict(kind, values, where)
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} cannot be read by this release: {error}"
        ) from error


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the model config of a checkpoint, validated against its tensors."""
    stored = checkpoint.state.get("model")
    config: ModelConfig = parse_state(checkpoint, ModelConfig, stored, "state.json.model")
    check_model(config, checkpoint)
    return config


def check_model(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError if the weights in a checkpoint do not fit a model config.

    Nothing is allocated for the model, since a small file may claim any size.
    """
    stored = {name: _kind(value) for name, value in checkpoint.tensors.get("model", {}).items()}
    try:
        config.check()
        # Building even meta layers takes time, and each layer has several tensors.
        if config.num_layers > len(stored):
            raise ValueError(f"it holds {len(stored)} tensors for {config.num_layers} layers")
        with torch.device("meta"):
            model = HybridLM(config)
        if _param_dtype(checkpoint) == "bfloat16":
            model.store_matrices_(torch.bfloat16, torch.bfloat16)
        expected = {name: _kind(p) for name, p in model.named_parameters()}
        odd = sorted(n for n in {*expected, *stored} if expected.get(n) != stored.get(n))
        if odd:
            raise ValueError(f"its weights and its config disagree about {first_of(odd, 1)}")
    # torch raises other errors for sizes whose product overflows.
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} cannot be used: {str(error).splitlines()[0]}"
        ) from error


def _param_dtype(checkpoint: Checkpoint) -> Any:
    """Return the storage dtype of the matrices, as the checkpoint states it."""
    value: Any = checkpoint.state
    for key in ("config", "runtime", "param_dtype"):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return weights and optimizer state by name, not copied; a tied weight is there once."""
    # Not optimizer.state: a wrapped optimizer has one of its own.
    state = optimizer.state_dict()["state"]
    return {
        "model": {name: p.detach() for name, p in model.named_parameters()},
        "optimizer": {
            f"{name}/{key}": value
            for index, name in enumerate(_names(optimizer))
            for key, value in state.get(index, {}).items()
        },
    }


@torch.no_grad()
def restore_(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Load weights and optimizer state; nothing is changed if any of it does not fit."""
    for file, expected in tensors_of(model, optimizer).items():
        stored = checkpoint.tensors.get(file, {})
        _check_fits(f"{file}.safetensors", expected, stored)
    for name, parameter in model.named_parameters():
        parameter.copy_(checkpoint.tensors["model"][name])
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in checkpoint.tensors["optimizer"].items():
        name, _, entry = key.rpartition("/")
        states.setdefault(name, {})[entry] = value
    optimizer.load_state_dict(
        {
            "param_groups": optimizer.state_dict()["param_groups"],
            "state": {index: states[name] for index, name in enumerate(_names(optimizer))},
        }
    )


def check_same_settings(config: TrainConfig, before: TrainConfig, taken: int) -> None:
    """Raise a ValueError if a run would continue with other settings than it began with.

    The schedule may change if the steps taken so far stay the same: a run at its constant rate can
    be made longer, or start its decay right away.
    """
    now, then, may_change = to_dict(config), to_dict(before), _MAY_CHANGE
    if _same_steps(config, before, taken):
        may_change = may_change | {"schedule"}
    changed = [
        f"{where}: {old} -> {new}"
        for section in sorted(now.keys() - may_change)
        for where, old, new in _differences(section, then[section], now[section])
        if where not in may_change
    ]
    if changed:
        hint = ""
        if any(one.startswith("schedule.") for one in changed):
            hint = (
                f". A schedule may change where the {taken:,} steps already taken stay as they "
                "were: a run can be made longer or shorter before its decay begins"
            )
        raise ValueError(
            "a resumed run keeps the settings it started with; these differ: "
            + "; ".join(changed)
            + hint
        )


# Settings that may differ between a run and its continuation: they do not change what is trained.
_MAY_CHANGE = {
    *("out", "name", "resume", "dry_run"),
    *("log", "checkpoint", "spikes", "parallel"),
    *(f"runtime.{one.name}" for one in fields(RuntimeConfig) if one.name != "param_dtype"),
    # A smaller micro-batch saves memory and changes rounding only.
    *("data.path", "data.micro_batch_sequences"),
}


def _same_steps(config: TrainConfig, before: TrainConfig, taken: int) -> bool:
    """Return whether both settings have the same steps, up to the number taken."""
    now, then = (
        (each.data.batch_sequences, each.data.sequence_length) for each in (config, before)
    )
    if now != then:
        return False
    return Schedule(config.schedule, *now).begins_like(Schedule(before.schedule, *then), taken)


def _differences(where: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            (f"{where}.{key}", old.get(key), new.get(key))
            for key in sorted({*old, *new})
            if old.get(key) != new.get(key)
        ]
    return [] if old == new else [(where, old, new)]


def _check_fits(file: str, expected: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    for what, names in (
        ("misses", expected.keys() - stored.keys()),
        ("holds, beyond this run's,", stored.keys() - expected.keys()),
        (
            "has other shapes or types for",
            {n for n in expected.keys() & stored.keys() if _kind(expected[n]) != _kind(stored[n])},
        ),
    ):
        if names:
            raise CheckpointError(
                f"the checkpoint does not fit this run, though its settings do: {file} {what} "
                f"{first_of(sorted(names), 3)}. Was it written by another release?"
            )


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _names(optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]

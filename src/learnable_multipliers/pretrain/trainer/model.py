"""Build the model of a run."""

from __future__ import annotations

import torch

from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from learnable_multipliers.pretrain.trainer.device import Device


def build_model(config: TrainConfig, device: torch.device | str = "cpu") -> HybridLM:
    """Return the model with the weights of the run's seed, in the configured storage dtype."""
    model = build(config.model, config.seed, device)
    store_matrices_(model, config)
    return model


def store_matrices_(model: HybridLM, config: TrainConfig) -> None:
    """Store the matrices of a model's layers in the configured dtype."""
    dtype = getattr(torch, config.runtime.param_dtype)
    if dtype != torch.float32:
        # A sum over micro-batches in bfloat16 would lose small gradients.
        adds_up = config.data.micro_batch_sequences > 0
        model.store_matrices_(dtype, torch.float32 if adds_up else dtype)


def check_param_dtype(config: TrainConfig, device: Device, num_ranks: int) -> None:
    """Raise a ValueError if matrices cannot be stored in the configured dtype."""
    name = config.runtime.param_dtype
    if name == "float32":
        return
    if device.precision != name:
        raise ValueError(
            f"runtime.param_dtype is {name}, but matrix products are in {device.precision}: set "
            f"runtime.dtype to {name} as well, or runtime.param_dtype to float32"
        )
    if num_ranks > 1:
        raise ValueError(
            f"runtime.param_dtype={name} is for one process: {num_ranks} ranks would add up their "
            f"gradients in {name}. Set runtime.param_dtype=float32"
        )

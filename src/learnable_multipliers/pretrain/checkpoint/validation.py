"""Validate a checkpoint's model config against its tensors."""

from __future__ import annotations

import torch

from learnable_multipliers.pretrain.checkpoint.store import Checkpoint, CheckpointError
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.plain_data import from_dict


def model_config(kept: Checkpoint) -> ModelConfig:
    """Return the model config of a checkpoint, validated against its tensors."""
    try:
        config: ModelConfig = from_dict(ModelConfig, kept.state.get("model"), "state.json.model")
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint of step {kept.step} is not one that this release reads: {error}"
        ) from error
    check_model(config, kept)
    return config


def check_model(config: ModelConfig, kept: Checkpoint) -> None:
    """Raise a CheckpointError if the weights in a checkpoint do not fit a model config.

    Nothing is allocated for the model: a file of a few bytes may claim any size.
    """
    found = {name: value.shape for name, value in kept.tensors.get("model", {}).items()}
    try:
        config.check()
        # Building even meta layers takes time, and each layer has several tensors.
        if config.num_layers > len(found):
            raise ValueError(f"it holds {len(found)} tensors for {config.num_layers} layers")
        with torch.device("meta"):
            expected = {name: p.shape for name, p in HybridLM(config).named_parameters()}
        odd = sorted(n for n in {*expected, *found} if expected.get(n) != found.get(n))
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise ValueError(f"its weights and its config disagree about {odd[0]}{more}")
    # torch raises other errors for sizes whose product overflows.
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint of step {kept.step} cannot be used: {str(error).splitlines()[0]}"
        ) from error

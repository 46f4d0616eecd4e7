"""The model that a checkpoint says it holds, believed only as far as its tensors bear it out."""

from __future__ import annotations

import torch

from learnable_multipliers.pretrain.checkpoint.store import Checkpoint, CheckpointError
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.plain_data import from_dict


def held_model(kept: Checkpoint) -> ModelConfig:
    """Return the config of the model in a checkpoint; a CheckpointError if it holds another."""
    try:
        config: ModelConfig = from_dict(ModelConfig, kept.state.get("model"), "state.json.model")
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint of step {kept.step} is not one that this release reads: {error}"
        ) from error
    refuse_another_model(config, kept)
    return config


def refuse_another_model(config: ModelConfig, kept: Checkpoint) -> None:
    """Raise a CheckpointError if the weights in a checkpoint are not those of such a model.

    Nothing is allocated for the model: a file of a few bytes may claim any size.
    """
    found = {name: value.shape for name, value in kept.tensors.get("model", {}).items()}
    try:
        config.check()
        # A layer has several tensors; the layers claimed are built one by one.
        if config.num_layers > len(found):
            raise ValueError(f"it holds {len(found)} tensors for {config.num_layers} layers")
        with torch.device("meta"):
            expected = {name: p.shape for name, p in HybridLM(config).named_parameters()}
        odd = sorted(n for n in {*expected, *found} if expected.get(n) != found.get(n))
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise ValueError(f"its weights and its config disagree about {odd[0]}{more}")
    # Sizes whose product no integer holds are no ValueError to torch.
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint of step {kept.step} cannot be used: {str(error).splitlines()[0]}"
        ) from error

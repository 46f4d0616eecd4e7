"""The settings that a run fills in itself."""

from __future__ import annotations

import math
from dataclasses import replace

from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.rules import read_rules

_VOCAB_MULTIPLE = 64
"""A vocabulary size taken from data is rounded up to this: an odd one doubles a GPU's time."""


def resolve_config(config: TrainConfig, data: TrainingData) -> TrainConfig:
    """Return a checked config with vocabulary size, name and the rules from files filled in."""
    if config.model.vocab_size == 0:
        vocab_size = math.ceil(data.manifest.vocab_size / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        model = replace(config.model, vocab_size=vocab_size)
        config = replace(config, model=model)
    config = replace(config, name=config.name or config.out.resolve().name)
    config.check()
    optimizer = replace(config.optimizer, rules=read_rules(config.optimizer.rules))
    return replace(config, optimizer=optimizer)

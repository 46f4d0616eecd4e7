"""The `lrm train` command that trains a config."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.recipes import RECIPES

_DATA = "DATA"
"""Stands for the folder of the data where a config names none."""


def command_of(config: TrainConfig, num_ranks: int = 1) -> str:
    """Return the command: the nearest recipe, and each setting in which the config differs."""
    start = ["lrm"]
    if num_ranks > 1:
        start = ["torchrun", "--nproc-per-node", str(num_ranks), "--no-python", "lrm"]
    return shlex.join([*start, "train", *arguments(config)])


def arguments(config: TrainConfig) -> list[str]:
    """Return what follows `lrm train`, word by word."""
    differing = {name: list(_differences(config, recipe)) for name, (_, recipe) in RECIPES.items()}
    name = min(differing, key=lambda name: len(differing[name]))
    words = [word for setting in differing[name] for word in setting]
    return [name, *(["--data.path", _DATA] if config.data.path is None else []), *words]


def _differences(config: Any, base: Any, prefix: str = "") -> Iterator[list[str]]:
    """Yield each setting that differs, as the words of an option."""
    for field in fields(config):
        value, default = getattr(config, field.name), getattr(base, field.name)
        name = field.name.replace("_", "-")
        if is_dataclass(value):
            yield from _differences(value, default, f"{prefix}{name}.")
        elif isinstance(value, bool) and value != default:
            # A switch is named for what it does to the default.
            yield [f"--{prefix}{name if value else f'no-{name}'}"]
        elif value != default:
            yield [f"--{prefix}{name}", *_words(value)]


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [word for item in value.items() for word in map(str, item)]
    return list(map(str, value)) if isinstance(value, tuple) else [str(value)]

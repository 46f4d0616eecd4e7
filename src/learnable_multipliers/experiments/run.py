"""One training run of an experiment: what it is called there, and its whole config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from learnable_multipliers._serialization import from_dict, to_dict
from learnable_multipliers.pretrain.config import CheckpointConfig, RuntimeConfig, TrainConfig

Preset = Literal["cpu", "gpu", "paper"]
"""The size of an experiment: seconds on a laptop, minutes on one GPU, or the paper's own."""
Labels = Mapping[str, str | float]
"""What tells the runs of an experiment apart: {"arm": "frozen", "scale": 64.0, "seed": 0}."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, by its labels."""

    labels: Labels
    """Always with a `seed`."""
    config: TrainConfig
    scored: bool = False
    """Whether its model is scored on benchmarks, where there are requests."""

    @cached_property
    def key(self) -> str:
        """What runs with the same outcome share, whichever experiment asks for them."""
        return key_of(self.config)

    @property
    def in_words(self) -> str:
        """The labels as one line."""
        return in_words(self.labels)


def with_seeds(arms: Iterable[tuple[Labels, TrainConfig]], seeds: Iterable[int]) -> list[Run]:
    """Return a run of each arm with each seed, whole seeds together."""
    arms = list(arms)
    return [
        Run(labels={**labels, "seed": seed}, config=replace(config, seed=seed))
        for seed in seeds
        for labels, config in arms
    ]


def in_words(labels: Labels) -> str:
    """Return labels as one line: frozen scale=64 seed=0."""
    return " ".join(
        f"{name}={value:g}" if isinstance(value, int | float) else str(value)
        for name, value in labels.items()
    )


def key_of(config: TrainConfig) -> str:
    """Return a hash of all settings that a result depends on: no paths, names or devices."""
    neutral = replace(
        config,
        out=Path(),
        name="",
        resume=False,
        data=replace(config.data, path=None),
        checkpoint=CheckpointConfig(),
        runtime=RuntimeConfig(),
    )
    # Through the types of the fields: a rate written as 1 is the rate 1.0 that a record holds.
    typed = from_dict(TrainConfig, to_dict(neutral))
    text = json.dumps(to_dict(typed), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

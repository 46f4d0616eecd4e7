"""Other ways to train multipliers: each changes one thing of a run with row and column multipliers.

The headline tries them on tuned runs. Those that are better, together, are one more arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from learnable_multipliers.experiments.presets import with_optimizer
from learnable_multipliers.pretrain.config import OptimizerConfig, TrainConfig

HIDDEN = ("query", "key", "value", "attention-out", "gate", "up", "down")
"""Roles of the hidden matrices of a Llama."""
Fields = Mapping[str, object]


@dataclass(frozen=True)
class Variation:
    """A change of settings, or of what matrices carry, by role."""

    optimizer: Callable[[OptimizerConfig], Fields] = lambda tuned: {}
    """Settings of the optimizer, given the tuned ones."""
    schedule: Fields = field(default_factory=dict)
    rules: Mapping[str, Fields] = field(default_factory=dict)
    """Role -> fields of `lrm.Rule`."""


def _optimizer(**changes: object) -> Variation:
    return Variation(lambda tuned: changes)


def _schedule(**changes: object) -> Variation:
    return Variation(schedule=changes)


def _rest(factor: float) -> Variation:
    """Change the rate of what is not a hidden matrix, over that of those; AdamW has one rate."""
    return Variation(
        lambda tuned: (
            {"adamw_lr_scale": tuned.adamw_lr_scale * factor} if tuned.kind == "muon" else {}
        )
    )


def _rules(*roles: str, **fields: object) -> Variation:
    return Variation(rules=dict.fromkeys(roles, fields))


def _decay(factor: float) -> Variation:
    """Change the decay of raw weights, whose scale the multipliers can make up for."""
    return Variation(lambda tuned: {"weight_decay": tuned.weight_decay * factor})


VARIATIONS: Mapping[str, Variation] = {
    "log scale": _optimizer(multiplier_scale="log"),
    "no decay of multipliers": _optimizer(multiplier_weight_decay=0.0),
    "decay of multipliers x 10": _optimizer(multiplier_weight_decay=2e-2),
    "multipliers without warmup": _schedule(multipliers="no-warmup"),
    "multipliers without decay of their rate": _schedule(multipliers="no-decay"),
    "decay of raw weights / 4": _decay(0.25),
    "decay of raw weights x 4": _decay(4.0),
    "decay of raw weights x 16": _decay(16.0),
    "raw weights start at twice the size": _rules(*HIDDEN, init=0.5),
    "raw weights start at half the size": _rules(*HIDDEN, init=2.0),
    "embedding factor stays fixed": _optimizer(multiplier_init="one"),
    "one for each head of query, key, value": _rules("query", "key", "value", kind="per-head"),
    "rows alone": _rules(*HIDDEN, kind="row"),
    "columns alone": _rules(*HIDDEN, kind="col"),
    "not on the embedding": _rules("embedding", kind="none"),
    "rows on the head": _rules("head", kind="row"),
    "AdamW side at half the rate": _rest(0.5),
    "AdamW side at twice the rate": _rest(2.0),
}


def varied(config: TrainConfig, names: Iterable[str]) -> TrainConfig:
    """Return a run with variations; of two that set the same thing, the first takes precedence."""
    optimizer: Fields = {}
    schedule: Fields = {}
    by_role: dict[str, Fields] = {}
    for name in names:
        variation = VARIATIONS[name]
        optimizer = {**variation.optimizer(config.optimizer), **optimizer}
        schedule = {**variation.schedule, **schedule}
        for role, fields in variation.rules.items():
            by_role[role] = {**fields, **by_role.get(role, {})}
    rules = tuple(
        " ".join([f". only={role}", *(f"{key}={value}" for key, value in fields.items())])
        for role, fields in by_role.items()
    )
    config = replace(config, schedule=replace(config.schedule, **schedule))  # pyright: ignore[reportArgumentType]
    return with_optimizer(config, **optimizer, rules=(*config.optimizer.rules, *rules))

"""Other ways to train multipliers: each changes one thing of a run with row and column multipliers.

The headline tries them on tuned runs. Those that are better, together, are one more arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from learnable_multipliers.experiments.presets import with_optimizer
from learnable_multipliers.pretrain.config import TrainConfig

HIDDEN = ("query", "key", "value", "attention-out", "gate", "up", "down")
"""Roles of the hidden matrices of a Llama."""
_STD = 0.02
"""Of matrices at the start."""


@dataclass(frozen=True)
class Variation:
    """A change of settings, or of what matrices carry, by role."""

    settings: Callable[[TrainConfig], TrainConfig] = lambda config: config
    rules: Callable[[TrainConfig], Mapping[str, Mapping[str, object]]] = lambda config: {}
    """Role -> fields of `lrm.Rule`."""


def _optimizer(**changes: object) -> Variation:
    return Variation(lambda config: with_optimizer(config, **changes))


def _schedule(**changes: object) -> Variation:
    return Variation(
        lambda config: replace(config, schedule=replace(config.schedule, **changes))  # pyright: ignore[reportArgumentType]
    )


def _rest(factor: float) -> Variation:
    """Change the rate of what is not a hidden matrix, over that of those."""
    return Variation(
        lambda config: with_optimizer(
            config, adamw_lr_scale=config.optimizer.adamw_lr_scale * factor
        )
    )


def _rules(*roles: str, **fields: object) -> Variation:
    return Variation(rules=lambda config: dict.fromkeys(roles, fields))


def _settled(config: TrainConfig) -> Mapping[str, Mapping[str, object]]:
    """Start raw weights with the rms of eq. 1, multipliers with what keeps the effective weights.

    Then the size of a step relative to its weight does not change while the raw weights settle.
    """
    rms = math.sqrt(config.optimizer.lr / (2 * config.optimizer.weight_decay))
    return dict.fromkeys(HIDDEN, {"init": f"{_STD / rms:.3g}"})


VARIATIONS: Mapping[str, Variation] = {
    "log scale": _optimizer(multiplier_scale="log"),
    "no decay of multipliers": _optimizer(multiplier_weight_decay=0.0),
    "decay of multipliers x 10": _optimizer(multiplier_weight_decay=2e-2),
    "multipliers without warmup": _schedule(multipliers="no-warmup"),
    "multipliers without decay of their rate": _schedule(multipliers="no-decay"),
    "raw weights start settled": Variation(rules=_settled),
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
    """Return a run with some variations; of two that set the same thing, the first has its way."""
    by_role: dict[str, dict[str, object]] = {}
    for name in names:
        for role, fields in VARIATIONS[name].rules(config).items():
            by_role[role] = {**fields, **by_role.get(role, {})}
    for name in reversed(list(names)):
        config = VARIATIONS[name].settings(config)
    rules = tuple(
        " ".join([f". only={role}", *(f"{key}={value}" for key, value in fields.items())])
        for role, fields in by_role.items()
    )
    return with_optimizer(config, rules=(*config.optimizer.rules, *rules))

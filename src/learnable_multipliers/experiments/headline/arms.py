"""What the headline compares: models, arms, the settings that tuning moves, and how much of it.

The order in which they are tuned and run is in `program`, the protocol in docs/headline.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from learnable_multipliers.experiments.headline.search import Axis
from learnable_multipliers.experiments.presets import Family, base, with_optimizer
from learnable_multipliers.experiments.run import Preset
from learnable_multipliers.pretrain.config import CheckpointConfig, TrainConfig
from learnable_multipliers.pretrain.optimizer_config import OptimizerKind
from learnable_multipliers.pretrain.recipes import RECIPES

Settings = Mapping[str, float]
"""What tuning chooses: fields of the optimizer, `warmup` as a part of the run, `decay_factor` over
its last fifth, `one_minus_beta2`, and `adamw_lr`, the learning rate of what is not a hidden
matrix."""
KINDS: tuple[OptimizerKind, ...] = ("muon", "adamw")
"""In the order of the runs: seeds of Muon scatter less."""
FINE = 2**0.5
_STD = 0.02
"""Matrices start with it, and stay there on a sphere."""

_START: dict[tuple[Family, OptimizerKind], dict[str, float]] = {
    ("llama", "adamw"): {"lr": 8e-3, "weight_decay": 0.1},
    ("llama", "muon"): {"lr": 5.66e-3, "weight_decay": 0.1, "adamw_lr_scale": 2.0},
    ("hybrid", "adamw"): {"lr": 4e-3, "weight_decay": 0.1},
    ("hybrid", "muon"): {"lr": 8e-3, "weight_decay": 0.1, "adamw_lr_scale": 1.0},
}
"""Best of results/baseline-search.jsonl, 27 runs of 110M tokens."""
_RATIO: dict[OptimizerKind, float] = {"adamw": 2.0, "muon": 4.0}
"""Learning rate of multipliers over that of matrices that their tuning starts from."""
_ANGLE: dict[OptimizerKind, float] = {"adamw": 0.01, "muon": 0.005}
"""Norm of a step over that of the matrix, where rivals on a sphere start: about that of the tuned
baselines in equilibrium."""
_UPDATE: dict[OptimizerKind, float] = {"adamw": 0.25, "muon": 0.2}
"""RMS of an update."""


SHORTER = (0.8, 0.9)
"""Lengths at which the best multipliers are trained too."""
LONGER = 1.64
"""Length of the last stage, 360M tokens."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of the protocol a preset has."""

    tokens: int
    """1x."""
    baseline_trials: int
    trials: int
    rival_trials: int
    seeds: tuple[int, ...]
    """Of the reported runs; tuning has seed 0."""
    secondary_seeds: tuple[int, ...]
    """Of stages (d) and (e)."""


SCALES: dict[Preset, Scale] = {
    "cpu": Scale(
        tokens=51_200,
        baseline_trials=2,
        trials=2,
        rival_trials=1,
        seeds=(1, 2, 3),
        secondary_seeds=(1, 2, 3),
    ),
    "gpu": Scale(
        tokens=220_000_000,
        baseline_trials=28,
        trials=8,
        rival_trials=6,
        seeds=(1, 2, 3, 4, 5),
        secondary_seeds=(1, 2, 3),
    ),
}


@dataclass(frozen=True)
class Arm:
    """A way to train: settings that are fixed, and axes to tune from a baseline's best ones."""

    name: str
    fixed: Mapping[str, Any]
    axes: Callable[[OptimizerKind, Settings], tuple[Axis, ...]]
    variations: tuple[str, ...] = ()
    """Names of `VARIATIONS`."""


def _decay_axes(kind: OptimizerKind, plain: Settings) -> tuple[Axis, ...]:
    return Axis("lr", plain["lr"], FINE), Axis("weight_decay", plain["weight_decay"], 2.0)


def _multiplier_axes(kind: OptimizerKind, plain: Settings) -> tuple[Axis, ...]:
    ratio = plain.get("multiplier_lr_scale", _RATIO[kind])
    return (Axis("multiplier_lr_scale", ratio, 2.0), *_decay_axes(kind, plain))


def _hyperball_axes(kind: OptimizerKind, plain: Settings) -> tuple[Axis, ...]:
    return Axis("lr", _ANGLE[kind], 2.0), Axis("adamw_lr", _adamw_lr(plain), 2.0)


def _sphere_axes(kind: OptimizerKind, plain: Settings) -> tuple[Axis, ...]:
    lr, gains = _ANGLE[kind] * _STD / _UPDATE[kind], plain["lr"] * _RATIO[kind]
    adamw = Axis("adamw_lr", _adamw_lr(plain), 2.0)
    return Axis("lr", lr, 2.0), Axis("multiplier_lr", gains, 2.0), adamw


def _adamw_lr(plain: Settings) -> float:
    return plain["lr"] * plain.get("adamw_lr_scale", 1.0)


PLAIN = Arm("plain", {"placement": "none"}, _decay_axes)
SCALAR = Arm("scalar", {"placement": "scalar"}, _multiplier_axes)
VECTOR = Arm("vector", {"placement": "full"}, _multiplier_axes)
VARIED = Arm("vector, varied", {"placement": "full"}, _multiplier_axes)
SYMMETRY_AWARE = Arm("symmetry-aware", {"placement": "symmetry-aware"}, _multiplier_axes)

COMBINATION = Arm("vector + a rival", {}, _multiplier_axes)
"""Stands in tables for the combination, before it is known of which rival."""


def _rival(
    name: str, axes: Callable[[OptimizerKind, Settings], tuple[Axis, ...]] = _decay_axes
) -> Arm:
    return Arm(name, {"placement": "none", "variant": name}, axes)


_DECOUPLED = Arm(
    "magnitude-direction",
    {"placement": "full", "variant": "sphere", "multiplier_weight_decay": 0.0},
    _sphere_axes,
)
RIVALS: dict[OptimizerKind, tuple[Arm, ...]] = {
    "adamw": (
        _DECOUPLED,
        _rival("hyperball", _hyperball_axes),
        _rival("cautious"),
        _rival("adamc"),
    ),
    "muon": (
        _DECOUPLED,
        _rival("muown"),
        _rival("hyperball", _hyperball_axes),
        _rival("cautious"),
        _rival("normuon"),
    ),
}


def baseline_axes(family: Family, kind: OptimizerKind) -> tuple[Axis, ...]:
    """Return what is tuned of plain runs."""
    start = _START[family, kind]
    axes = [Axis("lr", start["lr"], FINE), Axis("weight_decay", start["weight_decay"], 2.0)]
    if kind == "muon":
        axes.append(Axis("adamw_lr_scale", start["adamw_lr_scale"], 2.0))
    if family == "llama":
        # What the last fifth leaves to the warmup; an average; a rate that does not rise.
        axes.append(Axis("warmup", 0.1, 2.0, maximum=0.8))
        axes.append(Axis("one_minus_beta2", 0.05, 2.0, maximum=1.0))
        axes.append(Axis("decay_factor", 8.0, 4.0, minimum=1.0))
    return tuple(axes)


def expected() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the settings that are tuned, for every arm of the protocol.

    Of the combinations one for each optimizer is run, here `COMBINATION`.
    """
    settings: dict[tuple[str, ...], tuple[str, ...]] = {}
    families: dict[Family, dict[OptimizerKind, tuple[Arm, ...]]] = {
        "llama": {
            kind: (SCALAR, VECTOR, VARIED, SYMMETRY_AWARE, *RIVALS[kind], COMBINATION)
            for kind in KINDS
        },
        "hybrid": {kind: (VECTOR,) for kind in KINDS},
    }
    for family, kinds in families.items():
        for kind, arms in kinds.items():
            plain = tuple(axis.name for axis in baseline_axes(family, kind))
            settings[family, kind, PLAIN.name] = plain
            for arm in arms:
                axes = arm.axes(kind, _START[family, kind])
                settings[family, kind, arm.name] = tuple(axis.name for axis in axes)
    return settings


def num_trials(scale: Scale, kind: OptimizerKind, arm: Arm) -> int:
    """Return the trials of an arm: fewer for rivals that start from the baseline's rate and decay.

    The others start from rates that no search has found.
    """
    is_near = arm in RIVALS[kind] and arm.axes is _decay_axes
    return scale.rival_trials if is_near else scale.trials


def combinable(kind: OptimizerKind) -> list[Arm]:
    """Return the rivals that leave scale to decay, so that multipliers can be put on top."""
    return [arm for arm in RIVALS[kind] if arm.axes is _decay_axes and arm.name != "muown"]


def combination(rival: Arm) -> Arm:
    """Return vector multipliers on top of a rival."""
    return Arm(f"vector + {rival.name}", {**rival.fixed, "placement": "full"}, _multiplier_axes)


def shape(preset: Preset, family: Family, part: float, size: int = 1) -> TrainConfig:
    """Return a plain run of a part of 1x, quiet; `size` 2 has twice the parameters."""
    if preset == "cpu":
        config = base(preset, family)
    else:
        config = RECIPES["20m-llama" if family == "llama" else "20m"][1]
        # The factor is a sound start for both: `lrm experiment initialization`.
        model = replace(config.model, vocab_size=0, mup_embedding=2**2.5)
        config = replace(config, model=model, checkpoint=CheckpointConfig(every=0))
    if size == 2:
        model = config.model
        # Twice the layers' parameters: 1.5 times the layers, and sqrt(4/3) the width in heads.
        heads = round(model.num_heads * math.sqrt(4 / 3))
        model = replace(
            model,
            num_layers=round(1.5 * model.num_layers),
            num_heads=heads,
            num_kv_heads=heads,
            hidden_size=heads * model.head_dim,
            intermediate_size=round(model.intermediate_size * heads / model.num_heads / 64) * 64,
        )
        config = replace(config, model=model)
    tokens = round(SCALES[preset].tokens * part)
    schedule = replace(
        config.schedule, tokens=tokens, warmup_tokens=tokens // 10, decay_tokens=tokens // 5
    )
    quiet = replace(
        config.log,
        every=20,
        weights_every=0,
        evaluate_every=0,
        evaluate_tokens=config.log.evaluate_tokens if preset == "cpu" else 0,
        sample_tokens=0,
        drift=False,
        tensorboard=False,
    )
    return replace(config, schedule=schedule, log=quiet)


def configured(config: TrainConfig, values: Settings) -> TrainConfig:
    """Return a run with settings that tuning chose."""
    changes: dict[str, Any] = dict(values)
    warmup = changes.pop("warmup", None)
    one_minus_beta2 = changes.pop("one_minus_beta2", None)
    adamw_lr = changes.pop("adamw_lr", None)
    if adamw_lr is not None:
        changes["adamw_lr_scale"] = adamw_lr / changes["lr"]
    if one_minus_beta2 is not None:
        changes["betas"] = (config.optimizer.betas[0], 1 - one_minus_beta2)
    schedule = config.schedule
    if warmup is not None:
        schedule = replace(schedule, warmup_tokens=round(warmup * schedule.tokens))
    if (factor := changes.pop("decay_factor", None)) is not None:
        schedule = replace(schedule, decay_factor=factor)
    return with_optimizer(replace(config, schedule=schedule), **changes)

"""Tuned factors against learned ones: NONE, LR, LRWD and FULL, with and without multipliers.

Falcon-H1's factors on learning rates and decays are not public, and those on the forward pass are.
So the first two are tuned here, by a sweep that is part of the experiment: every group of matrices
at half and at twice its rate or decay, one at a time. The arms LR, LRWD and FULL follow from its
records, with the factors that `winners` reads off them.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.presets import (
    NAMES,
    OPTIMIZERS,
    SEEDS,
    base,
    with_optimizer,
    with_signals,
)
from learnable_multipliers.experiments.record import Labelled, Record, labelled
from learnable_multipliers.experiments.run import Preset, Run, with_seeds
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.model.presets import with_falcon_h1_multipliers
from learnable_multipliers.pretrain.optimizer_config import OptimizerKind

TITLE = "Tuned factors against learned ones"
FIGURE = "Fig. 7, left"
GROUPS: dict[str, tuple[str, ...]] = {
    "embed": ("embedding",),
    "head": ("head",),
    "attn in": ("query", "key", "value"),
    "attn out": ("attention-out",),
    "ssm in": ("ssm-z", "ssm-x", "ssm-B", "ssm-C", "ssm-dt"),
    "ssm out": ("ssm-out",),
    "gate": ("gate",),
    "up": ("up",),
    "down": ("down",),
}
"""Matrices that share a factor: one stored matrix has one rate and one decay."""
Factors = Mapping[str, Mapping[str, float]]
"""{"lr": {group: factor}, "wd": {group: factor}}."""

Tuning = Literal["NONE", "LR", "LRWD", "FULL"]
TUNINGS: tuple[Tuning, ...] = ("NONE", "LR", "LRWD", "FULL")
_SWEPT = {"lr": "learning rate", "wd": "weight decay"}
_STEPS = (0.5, 2.0)
_NOTHING: Mapping[str, float] = {}
_NOISE = 0.003
"""What a factor must gain over 1 in the sweep, in nats: about the spread between seeds."""


def _tests(optimizer: OptimizerKind) -> tuple[Test, ...]:
    """Return the tests of one optimizer; all statistics are in nats.

    The paper's losses lie in three tiers on an axis of 0.025, about 0.006 apart, and its gap
    between the arms with and without multipliers is about 0.008. Half a tier is a difference; of
    the gap a quarter, as it is the smallest of four, which noise makes smaller. The same amount on
    the other side contradicts; for what should make no difference, a whole tier does.
    """
    name = NAMES[optimizer]
    return (
        Test(
            name=f"C13.{optimizer}.improves",
            what=f"loss without multipliers minus with, {name}, the smallest over the tunings",
            bound=0.002,
            opposite=-0.002,
            effect=0.008,
        ),
        Test(
            name=f"C13.{optimizer}.worst",
            what=f"loss of NONE without multipliers minus the mean of the second tier (NONE with, "
            f"LR, LRWD and FULL without), {name}",
            bound=0.003,
            opposite=-0.003,
            effect=0.006,
        ),
        Test(
            name=f"C13.{optimizer}.best",
            what=f"mean loss of the second tier minus that of LR, LRWD and FULL with multipliers, "
            f"{name}",
            bound=0.003,
            opposite=-0.003,
            effect=0.006,
        ),
        Test(
            name=f"C13.{optimizer}.enough",
            what=f"loss of LR minus the mean of LRWD and FULL, all with multipliers, {name}: what "
            "tuned decays and starts add",
            bound=0.003,
            side="at most",
            opposite=0.006,
            effect=0.006,
        ),
    )


CLAIMS = (
    Claim(
        id="C13",
        statement="Multipliers improve every tuning. Neither tuned nor learned is worst; tuned "
        "rates without multipliers and multipliers without tuning are alike; multipliers with "
        "tuned rates are best, and tuned decays and starts add nothing to them. With Adam and "
        "with Muon.",
        where="Sec. 5.1, Fig. 7 left",
        tests=tuple(test for optimizer in OPTIMIZERS for test in _tests(optimizer)),
        note="Factors are those of the sweep at this size. As in the paper, Muon borrows the ones "
        "tuned with Adam.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return the sweep, and runs without factors, with and without multipliers."""
    return [*_sweep(preset), *_untuned(preset)]


def follow_up(
    preset: Preset, records: Mapping[str, Record], failed: Container[str] | None = ()
) -> list[Run]:
    """Return the runs with factors, once the sweep has chosen them; it needs all of its runs."""
    known = labelled(runs(preset), records)
    # The first one without factors is what those of the sweep are compared with.
    if not all(run.key in records for run in (*_sweep(preset), _untuned(preset)[0])):
        return []
    return _arms(preset, TUNINGS[1:], winners(known))


def _arms(preset: Preset, tunings: Sequence[Tuning], factors: Factors) -> list[Run]:
    arms = [
        (
            {"tuning": tuning, "arm": arm, "optimizer": optimizer},
            # With signals, as where other experiments have the same runs.
            with_signals(_tuned(_base(preset, optimizer, arm), tuning, factors)),
        )
        for optimizer in OPTIMIZERS
        for tuning in tunings
        for arm in ("plain", "vector")
    ]
    return with_seeds(arms, SEEDS[preset])


def _untuned(preset: Preset) -> list[Run]:
    return _arms(preset, ("NONE",), {"lr": {}, "wd": {}})


def _sweep(preset: Preset) -> list[Run]:
    """Return a run for each group at half and twice its rate, then its decay; one on the CPU."""
    plain = _base(preset, "adamw", "plain")
    arms = [
        (
            {"arm": "sweep", "what": what, "group": group, "factor": step},
            _factored(plain, **{what: {group: step}}),
        )
        for what in _SWEPT
        for group in GROUPS
        for step in _STEPS
        if preset != "cpu" or (what, group, step) == ("lr", "head", 2.0)
    ]
    return with_seeds(arms, SEEDS[preset][:1])


def _base(preset: Preset, optimizer: OptimizerKind, arm: str) -> TrainConfig:
    """Return a hybrid without any factor, and for one arm with multipliers."""
    config = base(preset, "hybrid")
    model = replace(config.model, **dict.fromkeys(config.model.mup_factors, 1.0))
    placement = "full" if arm == "vector" else "none"
    return with_optimizer(replace(config, model=model), kind=optimizer, placement=placement)


def _tuned(config: TrainConfig, tuning: Tuning, factors: Factors) -> TrainConfig:
    """Return a run with the factors of a tuning; multipliers start at those of the forward pass."""
    lr = factors["lr"] if tuning != "NONE" else {}
    wd = factors["wd"] if tuning in ("LRWD", "FULL") else {}
    if tuning == "FULL":
        config = replace(config, model=with_falcon_h1_multipliers(config.model))
    return _factored(config, lr=lr, wd=wd)


def _factored(
    config: TrainConfig, lr: Mapping[str, float] = _NOTHING, wd: Mapping[str, float] = _NOTHING
) -> TrainConfig:
    """Return a run with factors on the rates and decays of groups of matrices."""
    return with_optimizer(
        config,
        lr_factors=_by_role(lr),
        weight_decay_factors=_by_role(wd),
        multiplier_init="fold",
    )


def _by_role(factors: Mapping[str, float]) -> dict[str, float]:
    return {role: factor for group, factor in factors.items() for role in GROUPS[group]}


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return the tiers of the tunings, by optimizer."""
    by_test: dict[str, BySeed] = {}
    for optimizer in OPTIMIZERS:
        arms = [
            readings.by_seed(records, tuning=tuning, arm=arm, optimizer=optimizer)
            for arm in ("plain", "vector")
            for tuning in TUNINGS
        ]
        for name in ("improves", "worst", "best", "enough"):
            by_test[f"C13.{optimizer}.{name}"] = readings.paired(partial(_statistic, name), *arms)
    return by_test


def _statistic(name: str, *records: Record) -> float:
    """Return a statistic of the eight arms: plain ones, then those with multipliers."""
    losses = [readings.loss(record) for record in records]
    plain, vector = losses[: len(TUNINGS)], losses[len(TUNINGS) :]
    second = statistics.fmean([vector[0], *plain[1:]])
    if name == "improves":
        return min(without - learned for without, learned in zip(plain, vector, strict=True))
    if name == "worst":
        return plain[0] - second
    if name == "best":
        return second - statistics.fmean(vector[1:])
    return vector[1] - statistics.fmean(vector[2:])


def winners(records: Sequence[Labelled]) -> dict[str, dict[str, float]]:
    """Return the factors that the sweep chooses.

    A factor is chosen if it beats 1 by more than the noise between seeds.
    """
    chosen: dict[str, dict[str, float]] = {}
    for what in _SWEPT:
        changes = _changes(records, what)
        best = {group: min(factors, key=lambda f: factors[f]) for group, factors in changes.items()}
        chosen[what] = {
            group: factor for group, factor in best.items() if changes[group][factor] < -_NOISE
        }
    return chosen


def _changes(records: Sequence[Labelled], what: str) -> dict[str, dict[float, float]]:
    """Return group -> factor -> loss minus that of the run without the factor."""
    changes: dict[str, dict[float, float]] = {}
    plain = readings.by_seed(records, tuning="NONE", arm="plain", optimizer="adamw")
    for one in readings.select(records, arm="sweep", what=what):
        if (without := plain.get(int(one.labels["seed"]))) is not None:
            change = readings.loss(one.record) - readings.loss(without)
            group, factor = str(one.labels["group"]), float(one.labels["factor"])
            changes.setdefault(group, {})[factor] = change
    return {group: changes[group] for group in GROUPS if group in changes}


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw the loss of every tuning, and what each factor of the sweep changed."""
    losses = {
        NAMES[optimizer] + " with multipliers" * (arm == "vector"): {
            tuning: [
                readings.loss(one.record)
                for one in readings.select(records, tuning=tuning, arm=arm, optimizer=optimizer)
            ]
            for tuning in TUNINGS
            if readings.select(records, tuning=tuning)
        }
        for optimizer in OPTIMIZERS
        for arm in ("plain", "vector")
    }
    plots: list[Plot] = []
    with drawing.canvas(
        plots,
        "Loss by tuning",
        "FULL has Falcon-H1's factors on the forward pass, where multipliers start. The paper "
        "sees three tiers: NONE without multipliers; NONE with them and the others without; "
        "the others with them.",
        x="what is tuned",
        y="held-out loss at the end (nats)",
    ) as axes:
        drawing.categories(axes, losses)
    chosen = winners(records)
    for what, words in _SWEPT.items():
        changes = _changes(records, what)
        if not changes:
            continue
        arms = {
            f"x {drawing.ratio(step)}": {
                group: [factors[step]] for group, factors in changes.items() if step in factors
            }
            for step in _STEPS
        }
        factors = ", ".join(f"{group} x {factor:g}" for group, factor in chosen[what].items())
        with drawing.canvas(
            plots,
            f"Sweep of the {words}",
            "One group of matrices at a time, without multipliers, one seed. Chosen: "
            f"{factors or 'none'}.",
            x=f"whose {words}",
            y="loss minus that at factor 1 (nats)",
        ) as axes:
            drawing.categories(axes, arms)
            drawing.level(axes, -_NOISE, "chosen if below")
    return plots

"""MLP: the norm scale S of gate, up and down, with and without three scalars (sec. 3, app. B).

The weights of the norms in the blocks are frozen, so that blocks cannot change their scale by them.
S multiplies the learning rate of the three matrices and divides their decay. The scalars have no
decay, and there are no other multipliers. Twice more without scalars the model is changed as app. B
proposes: multi-head attention instead of grouped queries, and the norm inside the state-space
mixer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from learnable_multipliers.experiments import drawing, mlp_followers, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.degradation import (
    Sweep,
    complete_sweeps,
    degradation,
    recovered,
)
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.mlp_followers import (
    GROUPED,
    INNER_NORM,
    MODELS,
    MULTI_HEAD,
    growth,
    matrices,
    output,
    parameter,
)
from learnable_multipliers.experiments.presets import (
    NAMES,
    OPTIMIZERS,
    SEEDS,
    base,
    with_optimizer,
    with_signals,
)
from learnable_multipliers.experiments.readings import Number
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds
from learnable_multipliers.pretrain.config import TrainConfig

TITLE = "MLP: matrices whose norm is set by rate and decay, with and without scalars"
FIGURE = "Fig. 1, bottom right; figures of app. B"

MLP = ("gate", "up", "down")
ARMS = ("plain", "scalars")
SMALL, LARGE = 2.0**-2, 2.0**2
SCALES: dict[Preset, tuple[float, ...]] = {
    "cpu": (LARGE, SMALL),
    "gpu": (LARGE, 1.0, SMALL, 2.0**-1, 2.0),
    "paper": (LARGE, 1.0, SMALL, 2.0**-1, 2.0),
}
"""Of AdamW; Muon has the first three, and the changed models the ends."""
MULTIPLIER_LR: dict[Preset, float] = {"cpu": 6e-2, "gpu": 6e-2, "paper": 1e-2}
"""The paper's is 1e-2, over 50 times as many steps. In 600 steps of a hybrid of width 64, on the
CPU, it brought the scalars to 0.40 to 0.51 at S = 4, and 6e-2 to 0.24 to 0.31."""
_EFFECT = 0.03
"""Nats: the paper's curve without scalars rises by about 0.03, on an axis from 0.74 to 0.78."""


def _tests_of(optimizer: str) -> tuple[Test, ...]:
    name = NAMES[optimizer]
    return (
        # Half of the paper's effect; four seed deviations of a difference.
        Test(
            name=f"C5.{optimizer}.plain",
            what=f"{name}, without scalars: loss at S = 4 over the best at a smaller S (nats)",
            bound=0.015,
            opposite=0.0,
            effect=_EFFECT,
        ),
        # The paper's curve is flat, a share of 1; 0 is as bad as without scalars.
        Test(
            name=f"C5.{optimizer}.scalars",
            what=f"{name}: share of this degradation that the scalars recover; degradations below "
            f"{_EFFECT} nats, the paper's, count as {_EFFECT}",
            bound=2 / 3,
            opposite=0.0,
            effect=1.0,
        ),
        # The equilibrium is an exponent of 1, norms that the loss decides one of 0.
        Test(
            name=f"C5.{optimizer}.matrices",
            what=f"{name}, with scalars: a in rms ~ S^a of the raw gate, up and down",
            bound=0.8,
            opposite=0.5,
            effect=0.5,
        ),
        # Matrices alone would give about 3, their number; the paper's outputs stay constant.
        Test(
            name=f"C5.{optimizer}.outputs",
            what=f"{name}, with scalars: size of a in rms ~ S^a of what MLPs add to the residual "
            "stream",
            bound=0.3,
            side="at most",
            opposite=1.0,
            effect=1.0,
        ),
    )


CLAIMS = (
    Claim(
        id="C5",
        statement="The loss degrades at large norm scales of the MLP's matrices, and scalars that "
        "undo the scale prevent it, with Adam and with Muon.",
        where="Sec. 3, Fig. 1 bottom right; app. B",
        tests=tuple(test for optimizer in OPTIMIZERS for test in _tests_of(optimizer)),
    ),
    mlp_followers.CLAIM,
)


def runs(preset: Preset) -> list[Run]:
    """Return a run for each seed, optimizer, scale and arm, and those of the changed models."""
    arms: list[dict[str, Any]] = [
        *(
            {"optimizer": optimizer, "arm": arm, "model": GROUPED, "scale": scale}
            for optimizer in OPTIMIZERS
            for scale in SCALES[preset][: 3 if optimizer == "muon" else None]
            for arm in ARMS
        ),
        *(
            {"optimizer": "adamw", "arm": "plain", "model": model, "scale": scale}
            for model in (MULTI_HEAD, INNER_NORM)
            for scale in (LARGE, SMALL)
        ),
    ]
    return with_seeds(((labels, _config(preset, **labels)) for labels in arms), SEEDS[preset])


def _config(preset: Preset, *, optimizer: str, arm: str, model: str, scale: float) -> TrainConfig:
    config = base(preset, "hybrid")
    rules = tuple(f". only={role} kind=scalar" for role in MLP) if arm == "scalars" else ()
    config = with_optimizer(
        config,
        kind=optimizer,
        rules=rules,
        norm_scale=dict.fromkeys(MLP, scale),
        multiplier_lr=MULTIPLIER_LR[preset],
        multiplier_weight_decay=0.0,
        multiplier_init="one",
    )
    shape = replace(config.model, freeze_norms=True, ssm_norm=model == INNER_NORM)
    if model == MULTI_HEAD:
        shape = replace(shape, num_kv_heads=shape.num_heads)
    return with_signals(replace(config, model=shape))


# -- statistics ----------------------------------------------------------------------------------


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return the statistics of C5 and C23 by seed."""
    sweeps = {
        (optimizer, arm, model): complete_sweeps(
            records, (SMALL, LARGE), optimizer=optimizer, arm=arm, model=model
        )
        for optimizer in OPTIMIZERS
        for arm in ARMS
        for model in MODELS
    }
    by_test: dict[str, BySeed] = {}
    for optimizer in OPTIMIZERS:
        plain, scalars = (sweeps[optimizer, arm, GROUPED] for arm in ARMS)
        by_test |= {
            f"C5.{optimizer}.plain": readings.paired(_degradation, plain),
            f"C5.{optimizer}.scalars": readings.paired(_share, plain, scalars),
            f"C5.{optimizer}.matrices": readings.paired(growth(matrices(*MLP)), scalars),
            f"C5.{optimizer}.outputs": readings.paired(_mlp_growth, scalars),
        }
    plain_sweeps = {model: sweeps["adamw", "plain", model] for model in MODELS}
    return by_test | mlp_followers.analyse(plain_sweeps)


def _degradation(sweep: Sweep) -> float:
    return degradation(sweep, LARGE, set(sweep) - {LARGE})


def _share(plain: Sweep, scalars: Sweep) -> float:
    return recovered(_degradation(plain), _degradation(scalars), _EFFECT)


def _mlp_growth(sweep: Sweep) -> Number:
    """Return the size of the exponent of the MLP's output."""
    slope = growth(output("mlp_out"))(sweep)
    return None if slope is None else abs(slope)


def _scalars(record: Record) -> Number:
    return readings.role_multiplier(record, *MLP)


# -- plots ---------------------------------------------------------------------------------------

_X = "norm scale S of the MLP"
_OUTPUTS = {
    "MLP": output("mlp_out"),
    "state space": output("ssm_out"),
    "attention": output("attention_out"),
    "embedding": output("embedding"),
}
_WITH = {"plain": "without scalars", "scalars": "with scalars"}


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw loss, outputs and norms over S."""
    grouped = readings.select(records, model=GROUPED)
    plots: list[Plot] = []
    if grouped:
        with drawing.canvas(
            plots,
            "Loss over the norm scale of the MLP",
            "Loss at the end. The paper's rises at large S without scalars, with both.",
            x=_X,
            y="held-out loss (nats)",
        ) as axes:
            losses = {
                f"{NAMES[optimizer]}, {_WITH[arm]}": readings.sweep(
                    grouped, "scale", readings.loss, optimizer=optimizer, arm=arm
                )
                for optimizer in OPTIMIZERS
                for arm in ARMS
            }
            drawing.scan(axes, _drawn(losses))
    for optimizer in OPTIMIZERS:
        of_one = readings.select(grouped, optimizer=optimizer)
        if of_one:
            _draw_norms(plots, of_one, NAMES[optimizer])
    _draw_layers(plots, readings.select(grouped, optimizer="adamw"))
    mlp_followers.draw(plots, readings.select(records, optimizer="adamw", arm="plain"), _X)
    return plots


def _draw_norms(plots: list[Plot], records: Sequence[Labelled], optimizer: str) -> None:
    """Draw the rows of the paper's figure: outputs, matrices, and what is no matrix."""
    for arm in ARMS:
        outputs = {
            name: readings.sweep(records, "scale", read, arm=arm) for name, read in _OUTPUTS.items()
        }
        caption = (
            "Geometric mean over layers of the rms. In the paper all outputs stay constant."
            if arm == "scalars"
            else "Geometric mean over layers of the rms. In the paper outputs of the other blocks "
            "grow to follow the MLP's, state space the most."
        )
        title = f"Outputs of blocks {_WITH[arm]}, {optimizer}"
        _draw_scan(plots, title, "rms of the output", caption, outputs)
    plain = {
        "attention": matrices("query", "key", "value", "attention-out"),
        "state space": matrices("ssm-x", "ssm-out"),
        "embedding": matrices("embedding"),
    }
    raw = {
        f"MLP, {_WITH[arm]}": readings.sweep(records, "scale", matrices(*MLP), arm=arm)
        for arm in ARMS
    } | {name: readings.sweep(records, "scale", read, arm="plain") for name, read in plain.items()}
    caption = (
        "Geometric mean over layers and matrices. The paper's MLP follows S with scalars, a line "
        "of slope 1, and a little less without; the others, here without scalars, stay."
    )
    _draw_scan(plots, f"Raw matrices, {optimizer}", "rms of the raw weight", caption, raw)
    others = {
        f"{name}, {_WITH[arm]}": readings.sweep(records, "scale", parameter(name), arm=arm)
        for name in ("conv1d", "D")
        for arm in ARMS
    } | {"scalars of the MLP": readings.sweep(records, "scale", _scalars, arm="scalars")}
    caption = (
        "What noise does not hold. The paper's conv1d and D grow without scalars; its scalars "
        "undo S."
    )
    _draw_scan(plots, f"Parameters that are no matrices, {optimizer}", "rms", caption, others)


def _draw_scan(
    plots: list[Plot],
    title: str,
    y: str,
    caption: str,
    lines: Mapping[str, Mapping[float, Sequence[float]]],
) -> None:
    """Draw the lines that have points, if any."""
    if drawn := _drawn(lines):
        with drawing.canvas(plots, title, caption, x=_X, y=y, height=300) as axes:
            drawing.scan(axes, drawn, log_y=True)


def _drawn(lines: Mapping[str, Mapping[float, Sequence[float]]]) -> dict[str, Any]:
    return {name: points for name, points in lines.items() if points}


def _draw_layers(plots: list[Plot], records: Sequence[Labelled]) -> None:
    """Draw the outputs of MLPs layer by layer, at every scale."""
    for arm in ARMS:
        lines = {
            f"S = {drawing.ratio(scale)}": [
                {float(layer): size for layer, size in enumerate(outputs, 1)}
                for one in readings.select(records, arm=arm, scale=scale)
                if (
                    outputs := readings.final_signals(one.record)
                    .get("activations", {})
                    .get("mlp_out")
                )
            ]
            for scale in readings.distinct(records, "scale")
        }
        if not any(lines.values()):
            continue
        with drawing.canvas(
            plots,
            f"MLP outputs by layer {_WITH[arm]}, AdamW",
            "What each MLP adds to the residual stream at the end of training. In the paper layers "
            "differ, and S moves them alike.",
            x="layer",
            y="rms of the MLP's output",
            height=300,
        ) as axes:
            drawing.curves(axes, lines)
            axes.set_xlim(left=0.9)
            drawing.log_limits(axes, "y")

"""Projector: the norm scale S of the head alone, with no, one or a vector of multipliers (sec. 3).

S multiplies the head's learning rate and divides its decay, so that its equilibrium norm is S times
as large at the same effective rate. Without multipliers the final norm's weight is frozen at 1 and
the size of the logits is up to the head; a scalar is a multiplier on the head over a frozen norm; a
vector is the norm's own weight. Neither of them decays. The z-loss is off: it acts on the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from learnable_multipliers.equilibrium import brownian_rms
from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.degradation import (
    Sweep,
    complete_sweeps,
    degradation,
    recovered,
)
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.presets import (
    SEEDS,
    base,
    rates,
    with_optimizer,
    with_signals,
)
from learnable_multipliers.experiments.readings import Curve
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds
from learnable_multipliers.pretrain.config import TrainConfig

TITLE = "Projector: a head whose norm is set by rate and decay, with and without multipliers"
FIGURE = "Fig. 1, top and bottom left"

ARMS = ("frozen", "scalar", "vector")
SMALL, LARGE = 8.0**-2, 8.0**2
SCALES: dict[Preset, tuple[float, ...]] = {
    "cpu": (SMALL, 1.0, LARGE),
    "gpu": (SMALL, LARGE, 1.0, 8.0**-1, 8.0),
    "paper": (SMALL, LARGE, 1.0, 8.0**-1, 8.0),
}
_MULTIPLIER_LR: dict[Preset, float] = {"cpu": 6.4e-2, "gpu": 6.4e-2, "paper": 1.28e-3}
"""Rates of the multipliers. Each step moves one by at most its rate, so their sum is the farthest
it can go: 33 in the paper's runs, whose axis ends at 40, and 32 on a GPU in 2% of the steps."""
_EFFECT = 0.03
"""Nats: the paper's frozen norm loses about 0.03 at either end, on an axis from 0.75 to 0.80."""

_OVER_BEST = "of the frozen norm, over its best loss at a moderate S (nats)"
_SHARE = (
    "share of the frozen norm's degradation that is recovered, at the worse of S = 1/64 and 64; "
    f"degradations below {_EFFECT} nats, the paper's, count as {_EFFECT}"
)
_SPREAD = "logarithm of the largest over the smallest rms of the logits, over all S"
_DEPARTURE = "|log(rms / rms on noise)| of the multipliers, at the nearer of S = 1/64 and 64"

CLAIMS = (
    Claim(
        id="C2",
        statement="With the final norm frozen, the loss degrades at extreme norm scales of the "
        "head; with a scalar or a vector in its place it stays flat.",
        where="Sec. 3, Fig. 1 top left",
        tests=(
            # Two thirds of the paper's effect; four seed deviations of a difference.
            Test(
                name="C2.small",
                what=f"loss at S = 1/64 {_OVER_BEST}",
                bound=0.02,
                opposite=0.0,
                effect=_EFFECT,
            ),
            Test(
                name="C2.large",
                what=f"loss at S = 64 {_OVER_BEST}",
                bound=0.02,
                opposite=0.0,
                effect=_EFFECT,
            ),
            # The paper's curves are flat, a share of 1; 0 is as bad as the frozen norm.
            *(
                Test(
                    name=f"C2.{arm}",
                    what=f"with a {arm}: {_SHARE}",
                    bound=2 / 3,
                    opposite=0.0,
                    effect=1.0,
                )
                for arm in ("scalar", "vector")
            ),
        ),
    ),
    Claim(
        id="C3",
        statement="Multipliers keep the rms of the logits constant over the norm scale of the "
        "head; with a frozen norm it varies.",
        where="Sec. 3, Fig. 1 top middle",
        tests=(
            # A factor of 3; the paper's axis goes from 0 to 20, so its range is wider still.
            Test(
                name="C3.frozen",
                what=f"{_SPREAD}, with a frozen norm",
                bound=math.log(3),
                opposite=math.log(1.5),
                effect=1.5,
            ),
            # A factor of 2, over a factor of 4096 in S; a factor of 3 is what "varies" is above.
            *(
                Test(
                    name=f"C3.{arm}",
                    what=f"{_SPREAD}, with a {arm}",
                    bound=math.log(2),
                    side="at most",
                    opposite=math.log(3),
                    effect=math.log(3),
                )
                for arm in ("scalar", "vector")
            ),
        ),
    ),
    Claim(
        id="C4",
        statement="The norm of the head is that of Brownian motion under the same rates and decay; "
        "the norms of the multipliers are not.",
        where="Sec. 3, Fig. 1 top right, bottom left and middle",
        tests=(
            # 0.2 is what single matrices scatter by on noise; a factor of 2 shows in any figure.
            Test(
                name="C4.matrix",
                what="mean over all S, with a scalar and a vector, of |log(rms / rms on noise)| of "
                "the head's raw weight",
                bound=0.2,
                side="at most",
                opposite=math.log(2),
                effect=math.log(2),
            ),
            # The paper's multipliers reach 30 to 40 times, or a tenth of, their Brownian rms of 1.
            *(
                Test(
                    name=f"C4.{arm}",
                    what=f"{_DEPARTURE}, of a {arm}",
                    bound=math.log(2),
                    opposite=0.2,
                    effect=2.0,
                )
                for arm in ("scalar", "vector")
            ),
        ),
        note="The paper excepts the frozen norm at small S, where the head leaves its equilibrium.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return a run for each seed, scale and arm, extreme scales first."""
    arms = [
        ({"arm": arm, "scale": scale}, _config(preset, arm, scale))
        for scale in SCALES[preset]
        for arm in ARMS
    ]
    return with_seeds(arms, SEEDS[preset])


def _config(preset: Preset, arm: str, scale: float) -> TrainConfig:
    # The paper's own runs are of the hybrid.
    config = base(preset, "hybrid" if preset == "paper" else "llama")
    rate = _MULTIPLIER_LR[preset]
    rules = {
        "frozen": (),
        "scalar": (". only=head kind=scalar",),
        "vector": (f"final_layernorm lr_scale={rate / config.optimizer.lr:g}",),
    }
    config = with_optimizer(
        config,
        rules=rules[arm],
        norm_scale={"head": scale},
        multiplier_lr=rate,
        multiplier_weight_decay=0.0,
        multiplier_init="one",
    )
    model = replace(config.model, freeze_final_norm=arm != "vector")
    return with_signals(replace(config, z_loss=0.0, model=model))


# -- numbers of a run ----------------------------------------------------------------------------


def _matrix(record: Record, key: str = "raw_rms", weights: Any = None) -> float | None:
    """Return the rms of the head's raw weight, or with `predicted_rms` that on noise."""
    return readings.role_rms(record, "head", key=key, weights=weights)


def _logits(record: Record, signals: Any = None) -> float | None:
    return readings.activation(record, "logits", signals=signals)


def _multiplier(record: Record) -> float | None:
    """Return the rms of what the head is multiplied by: a scalar, or the final norm's weight."""
    scalar = readings.role_multiplier(record, "head", kind="scalar")
    return readings.activation(record, "final_norm", "parameters") if scalar is None else scalar


def _departure(record: Record) -> float | None:
    """Return |log(rms / rms on noise)| of the scalar, or of the final norm, at the end."""
    norms = [r for r in readings.diagnoses(record, kind="vector") if "final_layernorm" in r["name"]]
    diagnoses = readings.diagnoses(record, part="scalar", role="head") or norms
    ratio = diagnoses[0]["log_ratio"] if diagnoses else None
    return None if ratio is None else abs(ratio)


# -- statistics ----------------------------------------------------------------------------------


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return the statistics of C2, C3 and C4 by seed."""
    frozen, scalar, vector = (
        complete_sweeps(records, (SMALL, 1.0, LARGE), arm=arm) for arm in ARMS
    )
    by_test: dict[str, BySeed] = {
        "C2.small": readings.paired(lambda sweep: _degradation(sweep, SMALL), frozen),
        "C2.large": readings.paired(lambda sweep: _degradation(sweep, LARGE), frozen),
        "C3.frozen": readings.paired(_log_spread, frozen),
        "C4.matrix": readings.paired(_matrix_departure, scalar, vector),
    }
    for arm, sweeps in (("scalar", scalar), ("vector", vector)):
        by_test |= {
            f"C2.{arm}": readings.paired(_share, frozen, sweeps),
            f"C3.{arm}": readings.paired(_log_spread, sweeps),
            f"C4.{arm}": readings.paired(_multiplier_departure, sweeps),
        }
    return by_test


def _degradation(sweep: Sweep, end: float) -> float:
    """Return the loss at an extreme scale over the best one at a moderate scale."""
    return degradation(sweep, end, set(sweep) - {SMALL, LARGE})


def _share(frozen: Sweep, sweep: Sweep) -> float:
    """Return the share of the frozen norm's degradation that multipliers recover, at worst."""
    return min(
        recovered(_degradation(frozen, end), _degradation(sweep, end), _EFFECT)
        for end in (SMALL, LARGE)
    )


def _log_spread(sweep: Sweep) -> float | None:
    logits = [_logits(record) for record in sweep.values()]
    known = [value for value in logits if value is not None]
    spread = readings.spread(known) if len(known) == len(logits) else None
    return None if spread is None else math.log(spread)


def _matrix_departure(*sweeps: Sweep) -> float | None:
    """Return the mean |log(rms / rms on noise)| of the head over all runs."""
    departures = []
    for record in (record for sweep in sweeps for record in sweep.values()):
        measured, predicted = _matrix(record), _matrix(record, "predicted_rms")
        if measured is None or predicted is None:
            return None
        departures.append(abs(math.log(measured / predicted)))
    return fmean(departures)


def _multiplier_departure(sweep: Sweep) -> float | None:
    small, large = (_departure(sweep[end]) for end in (SMALL, LARGE))
    return None if small is None or large is None else min(small, large)


# -- plots ---------------------------------------------------------------------------------------

_NAMES = {"frozen": "frozen norm", "scalar": "scalar", "vector": "vector"}
_X = "norm scale S of the head"
_NOISE = 5
"""Index of the colour of Brownian motion."""


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw loss, logits and norms over S, and the norms over the run beside Brownian motion."""
    plots: list[Plot] = []

    def over_scale(function: Callable[[Record], float | None]) -> dict[str, Any]:
        return {_NAMES[arm]: readings.sweep(records, "scale", function, arm=arm) for arm in ARMS}

    with drawing.canvas(
        plots,
        "Loss over the norm scale",
        "Loss at the end of training. The paper's frozen norm degrades at both ends, "
        "the other two stay flat.",
        x=_X,
        y="held-out loss (nats)",
    ) as axes:
        drawing.scan(axes, over_scale(readings.loss))

    with drawing.canvas(
        plots,
        "Logits over the norm scale",
        "The paper's logits keep their size with a scalar or a vector, not with a frozen norm.",
        x=_X,
        y="rms of the logits",
    ) as axes:
        drawing.scan(axes, over_scale(_logits), log_y=True)

    with drawing.canvas(
        plots,
        "Norms over the norm scale",
        "Norms at the end. The paper's head follows the equilibrium, a straight line, but for a "
        "frozen norm at small S; scalar and vector make up for it.",
        x=_X,
        y="rms",
        height=330,
    ) as axes:
        matrices = {f"head, {name}": points for name, points in over_scale(_matrix).items()}
        drawing.scan(axes, matrices, log_y=True)
        multipliers = {
            f"the {arm} itself": readings.sweep(records, "scale", _multiplier, arm=arm)
            for arm in ("scalar", "vector")
        }
        noise = readings.sweep(records, "scale", lambda record: _matrix(record, "predicted_rms"))
        drawing.scan(axes, multipliers, log_y=True, first=len(ARMS))
        drawing.scan(axes, {"head, on noise": noise}, log_y=True, first=_NOISE)
    for scale in (SMALL, LARGE):
        if at_scale := readings.select(records, scale=scale):
            _draw_over_time(plots, at_scale, drawing.ratio(scale))
    return plots


def _draw_over_time(plots: list[Plot], records: Sequence[Labelled], scale: str) -> None:
    """Draw logits, head and multipliers over the steps of runs at one scale."""
    by_arm = {arm: [one.record for one in readings.select(records, arm=arm)] for arm in ARMS}
    learned = by_arm["scalar"] + by_arm["vector"]
    with drawing.canvas(
        plots,
        f"Logits over training, S = {scale}",
        f"Logits at S = {scale} over training.",
        x="step",
        y="rms of the logits",
    ) as axes:
        drawing.curves(
            axes,
            {_NAMES[arm]: [_logits_over_steps(r) for r in runs] for arm, runs in by_arm.items()},
        )
        axes.set_ylim(bottom=0)

    with drawing.canvas(
        plots,
        f"Head and Brownian motion, S = {scale}",
        f"The head at S = {scale} over training, and Brownian motion under the same rates and "
        "decay. The paper's curves coincide for strong decay (small S) and are close for weak "
        "decay, with multipliers.",
        x="step",
        y="rms of the head's raw weight",
        height=300,
    ) as axes:
        drawing.curves(
            axes,
            {_NAMES[arm]: [_head_over_steps(r) for r in runs] for arm, runs in by_arm.items()},
        )
        noise = [_head_over_steps(one.record, "predicted_rms") for one in records]
        drawing.curves(axes, {"on noise": noise}, first=_NOISE)
        axes.set_ylim(bottom=0)
    if not learned:
        return

    with drawing.canvas(
        plots,
        f"Multipliers and Brownian motion, S = {scale}",
        f"Scalar and vector at S = {scale} over training, and Brownian motion at their rate. The "
        "paper's have no resemblance with it.",
        x="step",
        y="rms of the multipliers",
        height=300,
    ) as axes:
        drawing.curves(
            axes,
            {
                "scalar": [_scalar_over_steps(r) for r in by_arm["scalar"]],
                "vector": [_final_norm_over_steps(r) for r in by_arm["vector"]],
            },
            first=1,
        )
        drawing.curves(axes, {"on noise": [_brownian(r) for r in learned]}, first=_NOISE)
        axes.set_ylim(bottom=0)


def _logits_over_steps(record: Record) -> Curve:
    return readings.over_steps(record.signals, lambda signals: _logits(record, signals))


def _head_over_steps(record: Record, key: str = "raw_rms") -> Curve:
    return readings.over_steps(record.weights, lambda weights: _matrix(record, key, weights))


def _scalar_over_steps(record: Record) -> Curve:
    return readings.over_steps(
        record.weights, lambda w: readings.role_multiplier(record, "head", weights=w)
    )


def _final_norm_over_steps(record: Record) -> Curve:
    return readings.over_steps(
        record.signals, lambda s: readings.activation(record, "final_norm", "parameters", signals=s)
    )


def _brownian(record: Record) -> Curve:
    """Return the rms of a multiplier on noise at the steps where weights were recorded."""
    config = record.train_config
    ratio = config.optimizer.multiplier_ratio
    walk = brownian_rms([ratio * lr for lr in rates(config)], 0.0, start_rms=1.0)
    steps = [entry["step"] for entry in record.weights]
    return {step: walk[step - 1] if step else 1.0 for step in steps if step <= len(walk)}

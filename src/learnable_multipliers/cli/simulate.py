"""`lrm simulate`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from learnable_multipliers._formats import aligned
from learnable_multipliers.cli.arguments import command
from learnable_multipliers.equilibrium import (
    RandomWalk,
    Trajectory,
    brownian_rms,
    random_walk,
    relaxation_steps,
    simulate_brownian,
)
from learnable_multipliers.equilibrium._random_walk import BrownianOptimizer, OptimizerSettings
from learnable_multipliers.optim._batches import AdjustLr
from learnable_multipliers.optim._orthogonalization import Coefficients
from learnable_multipliers.pretrain.config import DecayShape, ScheduleConfig
from learnable_multipliers.pretrain.trainer.schedule import Schedule
from learnable_multipliers.report import figures

# Of a curve in a plot.
_POINTS = 400
_LARGEST_RMS = 1e15
_MOST_STEPS, _MOST_NUMBERS = 10_000_000, 1 << 24
_COLUMNS: tuple[str, ...] = ("step", "lr", "simulated", "expected", "equilibrium")


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """A run on noise."""

    optimizer: BrownianOptimizer = "adamw"
    """Optimizer whose update rule is simulated."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Weight decay, decoupled from the gradient as in AdamW."""
    steps: int = 20_000
    """Length of the run, in steps."""
    shape: tuple[int, int] = (64, 64)
    """Rows and columns of the weight; the rms has a sampling error of 1/sqrt(2 rows columns)."""
    start_rms: float = 0.0
    """RMS of the normal distribution that the weight starts from."""
    betas: tuple[float, float] | None = None
    """Betas of AdamW (default 0.9 0.95) or Lion (default 0.9 0.99)."""
    momentum: float | None = None
    """Momentum of Muon (default 0.95) or SGD (default 0.9)."""
    nesterov: Literal["on", "off"] | None = None
    """Nesterov momentum of Muon (default on) or SGD (default off)."""
    adjust_lr: AdjustLr | None = None
    """How Muon scales its updates (default match_rms_adamw)."""
    coefficients: Coefficients | None = None
    """Newton-Schulz coefficients of Muon (default quintic)."""
    warmup: float = 0.0
    """Share of the run in which the learning rate grows from zero."""
    decay: float = 0.0
    """Share of the run, at its end, in which the learning rate falls."""
    decay_factor: float = 8.0
    """Peak learning rate over final learning rate."""
    decay_shape: DecayShape = "exponential"
    """How the learning rate falls."""
    seed: int = 0
    """Seed of the noise."""
    rows: int = 10
    """Lines to print, evenly spaced over the run."""
    json: bool = False
    """Print JSON instead of a table."""
    plot: Path | None = None
    """File to plot the whole run to (.svg, .png, .pdf)."""


@command(SimulateConfig)
def simulate(config: SimulateConfig) -> None:
    """Predict the rms that gradient noise and weight decay alone give a matrix.

    Prints it simulated with the optimizer's own update rule, as expected at that step under the
    same rates, and at the equilibrium of that step's rate. If a matrix of a real run has the
    expected rms, its scale was set by noise and decay, not by the data.
    """
    lrs = rates(config)
    figures.check_format(config.plot)
    settings: OptimizerSettings = {
        "betas": config.betas,
        "momentum": config.momentum,
        "nesterov": None if config.nesterov is None else config.nesterov == "on",
        "adjust_lr": config.adjust_lr,
        "coefficients": config.coefficients,
    }
    with Console(stderr=True).status(f"{config.optimizer} on noise"):
        simulated = simulate_brownian(
            config.optimizer,
            lrs,
            config.weight_decay,
            config.shape,
            start_rms=config.start_rms,
            seed=config.seed,
            **settings,
        )
    if config.optimizer == "muon":
        # As simulated: without coefficients the closed form would leave orthogonalizing out.
        settings["coefficients"] = config.coefficients or "quintic"
    walk = random_walk(config.optimizer, shape=config.shape, **settings)
    shown = rows(config, simulated, walk, config.rows)
    theory = {
        "relaxation_steps": _finite(relaxation_steps(config.lr, config.weight_decay)),
        "equilibrium": _finite(walk.equilibrium(config.lr, config.weight_decay)),
    }
    if config.plot is not None:
        drawn = rows(config, simulated, walk, _POINTS)
        title = f"{config.optimizer} at lr {config.lr:g}, decay {config.weight_decay:g}"
        figures.save(figures.random_walk(title, drawn), config.plot)
    if config.json:
        asked = {"optimizer": config.optimizer, "lr": config.lr}
        asked |= {"weight_decay": config.weight_decay}
        print(json.dumps(asked | theory | {"steps": shown}, indent=1))
        return
    table = [_COLUMNS]
    for row in shown:
        step, *others = (row[column] for column in _COLUMNS)
        table.append((f"{step:,}", *("-" if x is None else f"{x:.4g}" for x in others)))
    print("\n".join(aligned(table)))
    at = f"at lr {config.lr:g} and weight decay {config.weight_decay:g}"
    if theory["equilibrium"] is None or theory["relaxation_steps"] is None:
        print(f"\nNo equilibrium {at}: nothing pulls the weight back")
        return
    print(
        f"\nEquilibrium: rms {theory['equilibrium']:.4g} {at}, approached by a factor e in rms^2 "
        f"every {theory['relaxation_steps']:,.0f} steps"
    )


def rates(config: SimulateConfig) -> list[float]:
    """Return the learning rate of every step, on the schedule of `lrm train`."""
    if min(config.steps, config.rows, *config.shape) < 1:
        raise ValueError("--steps, --rows and both sides of --shape must be at least 1")
    if config.steps > _MOST_STEPS:
        raise ValueError(
            f"--steps must be at most {_MOST_STEPS:,}, got {config.steps:,}: every step is kept"
        )
    if math.prod(config.shape) > _MOST_NUMBERS:
        raise ValueError(
            f"--shape must have at most {_MOST_NUMBERS:,} numbers, got {math.prod(config.shape):,}:"
            " the rms of a larger matrix is the same, and its sampling error is small already"
        )
    if not 0 <= config.start_rms <= _LARGEST_RMS:
        raise ValueError(
            f"--start-rms must lie between 0 and {_LARGEST_RMS:g}, got {config.start_rms:g}"
        )
    if not (min(config.warmup, config.decay) >= 0 and config.warmup + config.decay <= 1):
        raise ValueError(
            "--warmup and --decay are shares of the run: from 0 on, and at most 1 together; got "
            f"{config.warmup:g} and {config.decay:g}"
        )
    # A token is a step.
    schedule = ScheduleConfig(
        tokens=config.steps,
        warmup_tokens=int(config.warmup * config.steps),
        decay_tokens=int(config.decay * config.steps),
        decay_factor=config.decay_factor,
        decay_shape=config.decay_shape,
    )
    return [config.lr * step.lr_factor for step in Schedule(schedule, 1, 1)]


def rows(
    config: SimulateConfig, simulated: Trajectory, walk: RandomWalk, count: int
) -> list[dict[str, float | None]]:
    """Return some steps of a run, simulated and expected."""
    count = min(count, config.steps)
    expected = brownian_rms(simulated.lrs, config.weight_decay, config.start_rms, walk)
    shown = {1, *(-(-config.steps * part // count) for part in range(1, count + 1))}
    return [
        {
            "step": step,
            "lr": (lr := simulated.lrs[step - 1]),
            "simulated": simulated.rms[step - 1],
            "expected": expected[step - 1],
            "equilibrium": _finite(walk.equilibrium(lr, config.weight_decay)),
        }
        for step in sorted(shown)
    ]


def _finite(value: float) -> float | None:
    """Return a finite number, else None: JSON has no infinity."""
    return value if math.isfinite(value) else None

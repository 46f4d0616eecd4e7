"""Noise: how norms depend on rate and decay, and how noisy gradients are (eq. 1, sec. 2, app. B).

A Llama without multipliers at four combinations of learning rate and decay, two of each product,
and one with vector multipliers. Tokens are told apart by how often they occur in a step.

Norms are read where the learning rate begins to fall: while it does, even a matrix of pure noise
lags behind the law, with exponents of 0.39 and -0.60 at the end of these schedules against 0.48 and
-0.51 before (`brownian_rms`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import torch

from learnable_multipliers.equilibrium._readings import row_spread
from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.presets import (
    base,
    rates,
    with_optimizer,
    with_signals,
)
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds

TITLE = "Noise: norms set by rate and decay, and the signal in gradients"
FIGURE = "Eq. 1; sec. 2 and app. B"

SEEDS: dict[Preset, tuple[int, ...]] = {"cpu": (0,), "gpu": (0, 1, 2, 3, 4, 5), "paper": (0,)}
"""The first three were run when C1 was read at the end of a run, and do not judge it."""
GRID = ((0.5, 2.0), (2.0, 0.5), (2.0, 1.0), (0.5, 4.0))
"""Learning rate and decay over those of the base run: factors of 4 and 8, and two of each product.
The smaller product is the base run's, which is just enough to settle; a much larger one pulls
weights to zero before they have learned anything."""
ROLES = ("query", "key", "value", "attention-out", "gate", "up", "down", "head")
_FREQUENT = 0.003
"""Share of the text that a frequent token has at least, in the middle of its decade."""
_SEEN = 10
"""Times that a token must occur in a run to speak about noise. A rare one is in a step less than
once on average."""

CLAIMS = (
    Claim(
        id="C1",
        statement="The rms of a matrix in training is proportional to sqrt(lr / wd).",
        where="Eq. 1",
        tests=(
            # Noise alone shifts the exponents by 0.02 at these products of lr and wd. An exponent
            # of 1/4 would be another law.
            *(
                Test(
                    name=f"C1.{name}",
                    what=f"mean over roles of |a - {ideal}| in rms ~ {name}^a, of the raw weight "
                    "before the learning rate falls",
                    bound=0.1,
                    side="at most",
                    opposite=0.25,
                    effect=0.5,
                )
                for name, ideal in (("lr", "1/2"), ("wd", "(-1/2)"))
            ),
        ),
        note="Embeddings are left out: their rows have gradients only when their tokens occur.",
    ),
    Claim(
        id="C21",
        statement="Gradients of multipliers are sums over rows or columns, and so hold more signal "
        "and less noise than those of the matrices.",
        where="Sec. 2, eq. 4; sec. 6",
        tests=(
            # "More" begins at 1; a fifth more is beyond what seeds differ by. The paper gives no
            # number; twice the indicator would be a plain difference.
            *(
                Test(
                    name=f"C21.{part}",
                    what=f"noise indicator (1 for pure noise) of the {part} multipliers over that "
                    "of their raw weight, geometric mean over matrices",
                    bound=1.2,
                    opposite=1.0,
                    effect=1.0,
                )
                for part in ("row", "col")
            ),
        ),
    ),
    Claim(
        id="C22",
        statement="Embeddings of frequent tokens escape the equilibrium; those of rare tokens are "
        "trapped in it.",
        where="App. B",
        tests=(
            # 0.2 is what single tensors scatter by on noise; a factor of 2 is no scatter.
            Test(
                name="C22.rare",
                what="|log(rms / rms on noise)| of the rows of rare tokens: less than one in a "
                f"step, at least {_SEEN} in a run",
                bound=0.2,
                side="at most",
                opposite=math.log(2),
                effect=math.log(2),
            ),
            Test(
                name="C22.frequent",
                what="|log(rms / rms on noise)| of the rows of frequent tokens, each about 0.3% of "
                "the text or more, less that of rare ones",
                bound=0.2,
                opposite=0.0,
                effect=math.log(2),
            ),
        ),
        note="On noise, a row moves only in steps in which its token occurs. Read in each run "
        "without multipliers by itself, so labels play no part.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return four runs without multipliers and one with vectors, for each seed."""
    config = with_signals(base(preset, "llama"))
    lr, wd = config.optimizer.lr, config.optimizer.weight_decay
    arms = [
        (
            {"arm": arm, "lr": rate, "wd": decay},
            with_optimizer(config, placement=placement, lr=rate, weight_decay=decay),
        )
        for arm, placement, rate, decay in (
            *(("plain", "none", lr * by_lr, wd * by_wd) for by_lr, by_wd in GRID),
            ("vector", "full", lr, wd),
        )
    ]
    return with_seeds(arms, SEEDS[preset])


# -- statistics ----------------------------------------------------------------------------------


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return the statistics of C1, C21 and C22 by seed."""
    plain = _grids(records)
    vector = readings.by_seed(records, arm="vector")
    departures = {seed: _departures(grid.values()) for seed, grid in plain.items()}
    return {
        "C1.lr": readings.paired(lambda grid: _distance(grid, 0, 0.5), plain),
        "C1.wd": readings.paired(lambda grid: _distance(grid, 1, -0.5), plain),
        "C21.row": readings.paired(lambda record: _signal(record, "row"), vector),
        "C21.col": readings.paired(lambda record: _signal(record, "col"), vector),
        "C22.rare": readings.paired(lambda departure: departure and departure["rare"], departures),
        "C22.frequent": readings.paired(
            lambda departure: departure and departure["frequent"] - departure["rare"], departures
        ),
    }


Grid = Mapping[tuple[float, float], Record]
"""(lr, wd) -> run without multipliers, of one seed."""


def _grids(records: Sequence[Labelled]) -> dict[int, Grid]:
    """Return the runs without multipliers, for seeds that have all of the grid."""
    grids: dict[int, dict[tuple[float, float], Record]] = {}
    for one in readings.select(records, arm="plain"):
        at = float(one.labels["lr"]), float(one.labels["wd"])
        grids.setdefault(int(one.labels["seed"]), {})[at] = one.record
    return {seed: grid for seed, grid in sorted(grids.items()) if len(grid) == len(GRID)}


def _distance(grid: Grid, which: int, ideal: float) -> float | None:
    """Return the mean over roles of how far an exponent of (lr, wd) is from the ideal one."""
    distances = []
    for role in ROLES:
        rms = [_settled_rms(record, role) for record in grid.values()]
        known = [value for value in rms if value is not None]
        exponents = readings.exponents(list(grid), known)
        if exponents is None:
            return None
        distances.append(abs(exponents[which] - ideal))
    return fmean(distances)


def _settled_rms(record: Record, role: str) -> float | None:
    """Return the rms of the matrices of a role before the learning rate falls."""
    data, schedule = record.config["data"], record.config["schedule"]
    constant = schedule["tokens"] - schedule["decay_tokens"] - schedule["minimum_tokens"]
    last = constant / (data["sequence_length"] * data["batch_sequences"])
    before = [weights for weights in record.weights if weights["step"] <= last]
    return readings.role_rms(record, role, weights=before[-1]) if before else None


def _signal(record: Record, part: str) -> float | None:
    """Return the noise indicator of multipliers over that of their raw weights."""
    raw = _indicators(record, "weight")
    ratios = [
        value / raw[name] for name, value in _indicators(record, part).items() if raw.get(name)
    ]
    return readings.geometric_mean(ratios)


def _indicators(record: Record, part: str) -> dict[str, float]:
    """Return the noise indicators of a part by parameter, embeddings left out."""
    return {
        reading["name"]: reading["indicator"]
        for role in ROLES
        for reading in readings.diagnoses(record, part=part, role=role)
        if reading["indicator"]
    }


def _departures(records: Iterable[Record]) -> dict[str, float] | None:
    """Return the mean over runs of |log(rms / rms on noise)| of rare and of frequent rows."""
    groups: dict[str, list[float]] = {"rare": [], "frequent": []}
    for record in records:
        bands = _bands(record)
        for name, departures in groups.items():
            chosen = [band for band in bands if getattr(band, name)]
            if not chosen:
                return None
            measured = sum(band.rows * band.rms**2 for band in chosen)
            on_noise = sum(band.rows * band.on_noise**2 for band in chosen)
            departures.append(abs(math.log(measured / on_noise)) / 2)
    return {name: fmean(departures) for name, departures in groups.items()}


# -- rows of the embedding -----------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """Rows of the embedding whose tokens are about equally frequent."""

    occurrences: float
    """In a step, in the middle of a decade."""
    rows: int
    rms: float
    """Of the raw rows."""
    on_noise: float
    """RMS that noise would have given them."""
    seen: bool
    frequent: bool
    rare: bool


def _bands(record: Record) -> list[Band]:
    """Return the rows of the embedding at the end; none without signals."""
    rows = readings.final_signals(record).get("token_rows")
    if not rows:
        return []
    config = record.train_config
    lrs = rates(config)
    on_noise = _rows_on_noise(
        tuple(rows["share"]),
        tuple(lrs),
        config.optimizer.weight_decay,
        config.optimizer.betas,
        config.model.embedding_std or config.model.init_std,
    )
    tokens = config.data.batch_sequences * config.data.sequence_length
    columns = zip(rows["occurrences"], rows["count"], rows["raw"], on_noise, strict=True)
    return [
        Band(
            occurrences=times,
            rows=count,
            rms=rms,
            on_noise=noise,
            seen=times * len(lrs) >= _SEEN,
            frequent=times >= _FREQUENT * tokens,
            rare=times < 1 and times * len(lrs) >= _SEEN,
        )
        for times, count, rms, noise in columns
    ]


@lru_cache(maxsize=64)
def _rows_on_noise(
    shares: tuple[float, ...],
    lrs: tuple[float, ...],
    weight_decay: float,
    betas: tuple[float, float],
    start_rms: float,
) -> tuple[float, ...]:
    """Return the rms of rows after a run on noise, by the share of steps in which they have any."""
    spread = row_spread(lrs, weight_decay, betas, torch.tensor(shares, dtype=torch.float64))
    kept = math.prod(1 - lr * weight_decay for lr in lrs)
    return tuple(math.hypot(rms, kept * start_rms) for rms in spread.tolist())


# -- plots ---------------------------------------------------------------------------------------


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw rms over lr / wd, noise indicators, and embedding rows by the frequency of tokens."""
    plots: list[Plot] = []
    plain = readings.select(records, arm="plain")
    points = {
        role: [
            (float(one.labels["lr"]) / float(one.labels["wd"]), rms)
            for one in plain
            if (rms := _settled_rms(one.record, role)) is not None
        ]
        for role in ROLES
    }
    if any(points.values()):
        with drawing.canvas(
            plots,
            "Norms over rate and decay",
            "Matrices without multipliers where the learning rate begins to fall, by role, and the "
            "exponent of the line through them. The paper's law is an exponent of 1/2.",
            x="lr / wd",
            y="rms of the raw weight",
            height=330,
        ) as axes:
            drawing.power_laws(axes, points)
    parts = {"weight": "raw weight", "row": "row multipliers", "col": "column multipliers"}
    indicators: dict[str, dict[str, list[float]]] = {name: {} for name in parts.values()}
    for one in readings.select(records, arm="vector"):
        for part, name in parts.items():
            for role in ROLES:
                diagnoses = readings.diagnoses(one.record, part=part, role=role)
                known = [r["indicator"] for r in diagnoses if r["indicator"]]
                if known:
                    label = "output" if role == "attention-out" else role
                    indicators[name].setdefault(label, []).append(fmean(known))
    if any(indicators.values()):
        with drawing.canvas(
            plots,
            "Noise in gradients",
            "Signal in the gradients of matrices and of their multipliers at the end of training, "
            "mean over layers. The paper argues that sums over rows and columns are less noisy.",
            x="role",
            y="noise indicator, 1 for pure noise",
            height=300,
        ) as axes:
            drawing.categories(axes, indicators)
            drawing.level(axes, 1.0, "pure noise")
    if ratios := _by_occurrences(plain):
        with drawing.canvas(
            plots,
            "Embeddings of frequent and rare tokens",
            "Rows of the embedding at the end of training without multipliers, by how often their "
            "token occurs. In the paper frequent tokens leave the equilibrium, rare ones do not.",
            x="occurrences in a step",
            y="rms of rows over that on noise",
        ) as axes:
            drawing.scan(axes, ratios, log_y=True)
            drawing.level(axes, 1.0, "noise")
    return plots


def _by_occurrences(records: Sequence[Labelled]) -> dict[str, dict[float, list[float]]]:
    """Return the rms of rows over that on noise, by settings and the occurrences of the token."""
    ratios: dict[str, dict[float, list[float]]] = {}
    for one in records:
        name = f"lr {one.labels['lr']:g}, wd {one.labels['wd']:g}"
        for band in (band for band in _bands(one.record) if band.seen):
            # One digit is enough for the label of a decade.
            at = ratios.setdefault(name, {}).setdefault(float(f"{band.occurrences:.0e}"), [])
            at.append(band.rms / band.on_noise)
    return ratios

"""The plots of a page: losses of all runs, and for each run its weights, multipliers and health.

Pure functions from runs to figures. Every run keeps its colour through the plots that show all;
the first is the baseline. Roles share a colour by the part of the model they sit in, and differ by
marker inside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from learnable_multipliers.report.comparison import (
    both_evaluated,
    drifting,
    multiplier_quantiles,
    pool_quantiles,
    positive,
    rms_pairs,
    role_of,
)
from learnable_multipliers.report.records import Record, Run
from learnable_multipliers.report.style import (
    COLOURS,
    RUN_COLOURS,
    last_drawn,
    legend,
    log_axis,
    note,
    plot,
    run_look,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 200
"""A longer training curve is drawn as this many means of neighbouring records."""

EARLY = 0.2
"""Part of the tokens, at the start, that does not widen the axis of losses."""

# Colour of a part of the model -> its roles; the first role present stands for it over time.
_PARTS = {
    "ochre": ("embedding", "tied-embedding", "position-embedding"),
    "blue": ("query", "attention-out", "value", "key", "query-latent", "kv-latent"),
    "teal": ("ssm-in", "ssm-x", "ssm-z", "ssm-out", "ssm-B", "ssm-C", "ssm-dt"),
    "rust": ("down", "gate", "up", "ungated-up"),
    "plum": ("head", "router", "adapter"),
}
_LOOKS = {
    role: (COLOURS[colour], marker)
    for colour, roles in _PARTS.items()
    for role, marker in zip(roles, "os^Dv*P", strict=False)
}
_AXES = {
    "row": ("rows: one per output", COLOURS["blue"]),
    "col": ("columns: one per input", COLOURS["rust"]),
    "scalar": ("scalars: one per matrix or head", COLOURS["teal"]),
}
_KINDS = {"matrices": "ink", "multipliers": "blue", "vectors": "rust"}
_DRIFT_COLOURS = [*RUN_COLOURS[1:], RUN_COLOURS[0]]


def loss_curves(runs: Sequence[Run]) -> Figure:
    """Draw validation loss (bold) and training loss (thin) over tokens."""
    with plot("loss, nats per token", 290, x="tokens seen") as (figure, axes):
        # Many noisy curves would hide the ones that matter.
        alpha = 0.45 if len(runs) <= 3 else 0.2
        for index, run in enumerate(runs):
            colour, line = run_look(index)
            losses = run.series("train", "loss")
            axes.plot(*thin_out(*losses), color=colour, lw=0.9, alpha=alpha)
            if len(losses[0]) > MAX_POINTS:
                # What the means hide: a spike of one batch is seen here.
                tokens, low, high = extremes(*losses)
                axes.fill_between(tokens, low, high, color=colour, alpha=0.3 * alpha, lw=0)
            axes.plot(*few_points(*run.series("eval", "loss")), color=colour, ls=line)
            # Before any evaluation, the name goes to the training loss.
            axes.lines[-1 if run.of("eval") else -2].set_label(short(run.name))
        _fit(axes)
        return figure


def gap_curves(runs: Sequence[Run]) -> Figure:
    """Draw validation loss minus that of the first run, where both were evaluated."""
    with plot(f"loss minus loss of {short(runs[0].name)}", 290, x="tokens seen") as (figure, axes):
        axes.axhline(0.0, color=COLOURS["ink"], lw=1.2)
        for index, run in enumerate(runs[1:], start=1):
            colour, line = run_look(index)
            both = both_evaluated(run, runs[0])
            tokens, gaps = [t for t, *_ in both], [loss - base for _, loss, base in both]
            axes.plot(
                *few_points(tokens, gaps),
                color=colour,
                ls=line,
                marker="o",
                ms=3,
                label=short(run.name),
            )
        _fit(axes, margin=0.22, also=[0.0])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:+.4g}" if value else "0")
        note(axes, 0.98, 0.98, "higher loss", ha="right", va="top")
        note(axes, 0.98, 0.02, "lower loss", ha="right", va="bottom")
        return figure


def learning_rates(runs: Sequence[Run]) -> Figure:
    """Draw the learning rate over tokens; runs with the same schedule share a line."""
    schedules: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    for index, run in enumerate(runs):
        schedules.setdefault(tuple(map(tuple, run.series("train", "lr"))), []).append(index)
    with plot("learning rate", 210, x="tokens seen") as (figure, axes):
        for series, sharing in schedules.items():
            name = short(runs[sharing[0]].name)
            if len(sharing) > 1:
                name = "all runs" if len(sharing) == len(runs) else f"{name} +{len(sharing) - 1}"
            colour, line = run_look(sharing[0])
            axes.plot(*few_points(*series), color=colour, ls=line, label=name)
        axes.set_ylim(0.0, 1.08 * axes.get_ylim()[1])
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 4, 5, 10]))
        axes.yaxis.set_major_formatter("{x:.4g}")
        return figure


def thin_out(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most MAX_POINTS points: the means of as many groups of neighbours."""
    pieces = _pieces(len(x))
    return [fmean(x[piece]) for piece in pieces], [fmean(y[piece]) for piece in pieces]


def extremes(
    x: Sequence[float], y: Sequence[float]
) -> tuple[list[float], list[float], list[float]]:
    """Return the middle, the lowest and the highest finite value of the same groups."""
    groups = [
        (fmean(x[piece]), finite)
        for piece in _pieces(len(x))
        if (finite := [value for value in y[piece] if math.isfinite(value)])
    ]
    middles = [middle for middle, _ in groups]
    return middles, [min(finite) for _, finite in groups], [max(finite) for _, finite in groups]


def few_points(x: Sequence[float], y: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return a curve with about twice MAX_POINTS points at most: the extremes of each group."""
    if len(x) <= 2 * MAX_POINTS:
        return x, y
    kept = {0, len(x) - 1}
    for piece in _pieces(len(x)):
        group = range(len(x))[piece]
        # Of a group without any finite value one stays: a gap in the line.
        finite = [i for i in group if math.isfinite(y[i])] or group[:1]
        kept |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
    places = sorted(kept)
    return [x[i] for i in places], [y[i] for i in places]


def _pieces(count: int) -> list[slice]:
    """Return at most MAX_POINTS groups of neighbours."""
    size = math.ceil(count / MAX_POINTS) or 1
    return [slice(start, start + size) for start in range(0, count, size)]


def rms_limits(records: Sequence[Record]) -> tuple[float, float]:
    """Return one range for the rms of many records, so that their plots can be compared."""
    kinds = ("raw_rms", "predicted_rms")
    values = [v for record in records for key in kinds for v in positive(record, key).values()]
    if not values:
        return 0.1, 10.0
    # At least a factor of four: or rounding would look like a difference.
    middle, half = math.sqrt(min(values) * max(values)), math.sqrt(max(values) / min(values))
    half = max(2.0, 1.15 * half)
    return middle / half, middle * half


def rms_scatter(run: Run, limits: tuple[float, float] | None = None) -> Figure:
    """Draw the measured rms of every matrix against its prediction, at the last record."""
    record = run.last("weights")
    groups: dict[str, list[tuple[float, float]]] = {}
    for name, pair in rms_pairs(record).items():
        groups.setdefault(role_of(record, name), []).append(pair)
    with plot("measured rms of the raw weight", 370) as (figure, axes):
        low, high = limits or rms_limits([record])
        axes.plot([low, high], [low, high], color=COLOURS["muted"], lw=1.2, ls="dashed")
        for role in sorted(groups, key=_rank):
            colour, marker = _look(role)
            axes.plot(*zip(*groups[role], strict=True), ls="", color=colour, marker=marker, ms=6,
                      mew=0, alpha=0.8, label=short(role))  # fmt: skip
        note(axes, 0.98, 0.7, "as predicted", ha="right")
        axes.set_xlabel("rms if gradients were pure noise")
        log_axis(axes, "x", low, high)
        log_axis(axes, "y", low, high)
        return figure


def rms_over_steps(run: Run, limits: tuple[float, float] | None = None) -> Figure:
    """Draw the rms of one role of each part of the model over steps; dashed, its prediction."""
    records = run.of("weights")
    present = {role_of(record, name) for record in records for name in positive(record, "raw_rms")}
    roles: dict[str, str] = {}
    for role in sorted(present, key=_rank):
        roles.setdefault(_look(role)[0], role)
    steps = [int(record["step"]) for record in records]
    with plot("rms of the raw weight", 310, x="step") as (figure, axes):
        for colour, role in roles.items():
            measured = [_of_role(record, role, "raw_rms") for record in records]
            predicted = [_of_role(record, role, "predicted_rms") for record in records]
            axes.plot(steps, measured, color=colour, label=short(role))
            axes.plot(steps, predicted, color=colour, lw=1.3, ls="dashed")
        log_axis(axes, "y", *(limits or rms_limits(records)))
        return figure


def multiplier_limits(records: Sequence[Record]) -> tuple[float, float]:
    """Return one range for the positive multipliers of many records, with 1 inside."""
    rows = [quantiles for record in records for *_, quantiles in multiplier_quantiles(record)]
    values = [value for quantiles in rows for value in quantiles if value > 0]
    high = max([1.25, *values]) * 1.12
    # Five decades at most: a multiplier at 1e-9 is zero, and would squeeze the others.
    return max(min([0.8, *values]) / 1.12, high / 1e5), high


def multiplier_ranges(run: Run, limits: tuple[float, float] | None = None) -> Figure:
    """Draw how far the learned multipliers of each role spread, rows and columns apart."""
    groups: dict[tuple[str, str], list[list[float]]] = {}
    for role, axis, quantiles in multiplier_quantiles(run.last("weights")):
        groups.setdefault((role, axis), []).append(quantiles)
    keys = sorted(groups, key=lambda key: (_rank(key[0]), list(_AXES).index(key[1])))
    low, high = limits or multiplier_limits([run.last("weights")])
    centres: dict[str, list[float]] = {}
    y = 0.0
    with plot("", 110 + 13 * (len(keys) + len({role for role, _ in keys}))) as (figure, axes):
        axes.axvline(1.0, color=COLOURS["ink"], lw=1.2)
        for role, axis in keys:
            y += 1 if role in centres or not centres else 2
            centres.setdefault(role, []).append(y)
            colour = _AXES[axis][1]
            quantiles = pool_quantiles(groups[role, axis])
            ends = [max(q, low) for q in quantiles]
            for outer, width in zip((0, 1, 2), (1.2, 3.2, 7.0), strict=True):
                axes.plot([ends[outer], ends[6 - outer]], [y, y], color=colour, lw=width)
            axes.plot(ends[3], y, marker="o", ms=5, mew=1.8, color=colour, mfc=COLOURS["page"])
            if quantiles[0] <= 0:
                axes.plot(low, y, marker="<", ms=7, color=colour, clip_on=False)
        axes.set(xlabel="multiplier", ylim=(y + 1, 0))
        axes.set_yticks([fmean(c) for c in centres.values()], list(map(short, centres)))
        axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        log_axis(axes, "x", low, high)
        shown = {axis for _, axis in keys}
        looks = [look for axis, look in _AXES.items() if axis in shown]
        legend(figure, [Line2D([], [], color=colour, lw=5, label=text) for text, colour in looks])
        return figure


def shares_over_steps(run: Run) -> Figure:
    """Draw how many tensors of each kind are trapped (solid) and free (dashed)."""
    with plot("share of the tensors", x="step") as (figure, axes):
        for kind, name in _KINDS.items():
            axes.plot(*_series(run, f"trapped/{kind}"), color=COLOURS[name], label=kind)
            axes.plot(*_series(run, f"free/{kind}"), color=COLOURS[name], lw=1.3, ls="dashed")
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        return figure


def noise_over_steps(run: Run) -> Figure:
    """Draw the noise indicator of each kind of tensor, in the median; 1 is pure noise."""
    with plot("noise indicator", x="step") as (figure, axes):
        axes.axhline(1.0, color=COLOURS["muted"], lw=1.2, ls="dashed")
        shown = [0.5, 2.0]
        for kind, name in _KINDS.items():
            steps, values = _series(run, f"noise/{kind}")
            axes.plot(steps, values, color=COLOURS[name], label=kind)
            shown += [value for value in values if value > 0]
        note(axes, 0.02, 1.06, "pure noise", transform=axes.get_yaxis_transform(), va="bottom")
        log_axis(axes, "y", min(shown) / 1.2, max(shown) * 1.2)
        return figure


def multipliers_over_steps(run: Run) -> Figure:
    """Draw the range of all multipliers: the extremes, the middle 90%, the middle half."""
    pooled: dict[int, list[float]] = {}
    for record in run.of("weights"):
        matrices = [quantiles for *_, quantiles in multiplier_quantiles(record)]
        if matrices:
            pooled[int(record["step"])] = pool_quantiles(matrices)
    low, high = multiplier_limits(run.of("weights"))
    steps, bands = list(pooled), np.maximum(list(pooled.values()), low).T
    with plot("multipliers", 250, x="step") as (figure, axes):
        axes.axhline(1.0, color=COLOURS["ink"], lw=1.2)
        for outer, alpha in enumerate((0.15, 0.25, 0.4)):
            axes.fill_between(steps, bands[outer], bands[6 - outer], color=COLOURS["blue"],
                              alpha=alpha, lw=0)  # fmt: skip
        axes.plot(steps, bands[3], color=COLOURS["blue"])
        log_axis(axes, "y", low, high)
        return figure


def drift_over_steps(run: Run) -> Figure:
    """Draw how far scales have drifted along each kind of symmetry, as a factor."""
    symmetries = drifting(run)
    # Those that drift most have a colour, the others share a grey.
    named, others = symmetries[: len(_DRIFT_COLOURS)], symmetries[len(_DRIFT_COLOURS) :]
    height = 270 + 16 * (len(named) + bool(others))
    with plot("drift, as a factor", height, x="step") as (figure, axes):
        for words, colour in zip(named, _DRIFT_COLOURS, strict=False):
            # Without what kind it is.
            label = short(words.rpartition(" (")[0] or words, 60)
            axes.plot(*_drift(run, words), color=colour, label=label)
        for words in others:
            label = f"{len(others)} others" if words == others[0] else None
            axes.plot(*_drift(run, words), color=COLOURS["muted"], lw=0.9, label=label)
        axes.set_ylim(1.0, max(1.1, axes.get_ylim()[1]))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter("{x:.4g}")
        return figure


def _drift(run: Run, symmetry: str) -> tuple[Sequence[float], list[float]]:
    steps, logs = _series(run, f"drift/{symmetry}")
    return steps, [math.exp(value) for value in logs]


def _fit(axes: Axes, margin: float = 0.06, also: Sequence[float] = ()) -> None:
    """Show of the losses those after the first, steep part."""
    x, y = np.concatenate([np.asarray(line.get_xydata()) for line in axes.lines]).T
    shown = [*y[(x >= EARLY * last_drawn(axes)) & np.isfinite(y)].tolist(), *also]
    if shown:
        pad = margin * (max(shown) - min(shown)) or 0.01 * abs(shown[0]) or 0.01
        axes.set_ylim(min(shown) - pad, max(shown) + pad)


def _of_role(record: Record, role: str, key: str) -> float:
    """Return an rms of a role: the geometric mean over its matrices, nan where there is none."""
    sizes = [rms for name, rms in positive(record, key).items() if role_of(record, name) == role]
    return geometric_mean(sizes) if sizes else math.nan


def _rank(role: str) -> tuple[int, str]:
    """Return the place of a role in legends, of the first of a fused one."""
    first = role.partition("/")[0]
    return (list(_LOOKS).index(first) if first in _LOOKS else len(_LOOKS)), role


def _look(role: str) -> tuple[str, str]:
    """Return the colour and the marker of a role, of the first of a fused one; else grey."""
    return _LOOKS.get(role.partition("/")[0], (COLOURS["muted"], "X"))


def _series(run: Run, key: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return the steps at which a number was recorded, and the number."""
    points = zip(*run.series("health", key, by="step"), strict=True)
    pairs = [(step, value) for step, value in points if math.isfinite(value)]
    return few_points([step for step, _ in pairs], [value for _, value in pairs])

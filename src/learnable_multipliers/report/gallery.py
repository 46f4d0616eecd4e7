"""The figures of a page in reading order, each with a caption that teaches how to read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learnable_multipliers.report import health, matrices, plots
from learnable_multipliers.report.comparison import (
    loss_gap,
    multiplier_quantiles,
    rms_pairs,
)
from learnable_multipliers.report.svg import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from learnable_multipliers.report.records import Run
    from learnable_multipliers.report.summary import Reference


@dataclass(frozen=True)
class Plate:
    """One figure of the page: a title, a caption, and one panel or one for each run."""

    title: str
    caption: str
    panels: tuple[tuple[str, str], ...]
    """(name of the run, or "" where all are in it; SVG)"""


def loss_plates(runs: Sequence[Run], reference: Reference | None) -> list[Plate]:
    """Return the loss curves and, where runs can be compared, their gap to the first."""
    found = [
        _shared(
            "Loss",
            "How surprised the model is by the next token: lower is better. Bold lines are the "
            "validation loss, on text kept out of training; thin lines are the training loss, "
            "batch by batch (a long run is drawn as means of neighbouring batches). The steep "
            "start may leave the figure at the top."
            + (f" The dotted line is the reference, {reference[0]}." if reference else ""),
            "loss",
            plots.loss_curves(runs, reference),
        )
    ]
    if any(loss_gap(run, runs[0]).tokens for run in runs[1:]):
        caption = (
            f"Validation loss of each run minus that of {runs[0].name}, at the same number of "
            "tokens. The line at zero is the baseline itself; below it a run has the lower loss. "
            "Watch the scale of the axis: a gap that wanders by as much as its own size may be "
            "noise alone."
        )
        found.append(_shared("Gap to the baseline", caption, "gap", plots.gap_curves(runs)))
    return found


def rms_plates(runs: Sequence[Run]) -> list[Plate]:
    """Return measured against predicted rms for every run that recorded weights."""
    shown = [run for run in runs if rms_pairs(run.last("weights"))]
    at_end = matrices.rms_limits([run.of("weights")[-1] for run in shown])
    all_along = matrices.rms_limits([record for run in shown for record in run.of("weights")])
    return [
        _each(
            "Measured against predicted",
            "One mark for each weight matrix at the last record. Across: the rms (root mean "
            "square of the entries) the matrix would have if its gradients were pure noise, a "
            "random walk held back by weight decay, under the run's own learning rate and decay. "
            "Up: the rms it has. On the dashed line, learning rate and decay set the scale of the "
            "matrix, not the data; far from it, the data had a say, or the walk is not over. With "
            "multipliers this is the raw weight, before they are applied. Embeddings may be "
            "missing: a row gets a gradient only when its token occurs, and no single number "
            "predicts that.",
            "scatter",
            shown,
            lambda run: matrices.rms_scatter(run, at_end),
        ),
        _each(
            "Over the steps of training",
            "The same two numbers through time, for one role of each part of the model (geometric "
            "mean over its layers): solid is measured, dashed is predicted from noise alone, where "
            "there is a prediction.",
            "rms",
            shown,
            lambda run: matrices.rms_over_steps(run, all_along),
        ),
    ]


def multiplier_plates(runs: Sequence[Run]) -> list[Plate]:
    """Return the learned multipliers of every run that has some."""
    shown = [run for run in runs if multiplier_quantiles(run.last("weights"))]
    limits = matrices.multiplier_limits(shown)
    return [
        _each(
            "What the multipliers learned",
            "Each bar is the range of the multipliers of one role, over all its layers: hairline "
            "from the smallest to the largest, medium line for the middle 90%, thick for the "
            "middle half, a ring at the median (within each layer; the median over layers is "
            "drawn). At 1, the vertical line, a multiplier changes nothing; 2 doubles a row or "
            "column, 0.5 halves it. An arrow at the left edge: some are zero or negative.",
            "multipliers",
            shown,
            lambda run: matrices.multiplier_ranges(run, limits),
        )
    ]


def health_plates(runs: Sequence[Run]) -> list[Plate]:
    """Return noise, what is trapped, and drift for every run that recorded its health."""
    shown = [run for run in runs if run.of("health")]
    moving = [run for run in shown if multiplier_quantiles(run.last("weights"))]
    drifting = [run for run in shown if health.drifting(run)]
    return [
        _each(
            "Trapped and free",
            "Solid: the share of tensors that are trapped, with the rms that noise and decay alone "
            "would have given them and gradients that are mostly noise. Dashed: the share that is "
            "free, with another rms or gradients that are mostly signal. The rest is open: too "
            "early to tell, or without a prediction.",
            "shares",
            shown,
            health.shares_over_steps,
        ),
        _each(
            "How noisy gradients are",
            "The mean of the squared momentum over the mean of the squared gradient, in units of "
            "what pure noise gives, in the median over tensors. At 1, the dashed line, gradients "
            "do not know from one step to the next where to go; a gradient that never changes has "
            "19 at beta1 = 0.9; below 1, a step takes back the one before.",
            "noise",
            shown,
            health.noise_over_steps,
        ),
        _each(
            "Multipliers over the steps",
            "All multipliers of the run: from the smallest to the largest (pale), the middle 90% "
            "and the middle half of a matrix in the median (darker), and the median (line). What "
            "reaches the lower edge goes to zero or below.",
            "ranges",
            moving,
            health.multipliers_over_steps,
        ),
        _each(
            "Drift along symmetries",
            "Some scales can be traded for others without changing any output. Nothing in the loss "
            "holds them, so they wander: by this factor since the start, rms over channels and "
            "layers. Decay of the multipliers, or rebalancing, keeps it near 1.",
            "drift",
            drifting,
            health.drift_over_steps,
        ),
    ]


def schedule_plate(runs: Sequence[Run]) -> Plate:
    """Return the learning rate over tokens."""
    caption = "The learning rate over the run. Runs with the same schedule share one line."
    return _shared("Learning rate", caption, "lr", plots.learning_rates(runs))


def _shared(title: str, caption: str, slug: str, figure: Figure) -> Plate:
    return Plate(title, caption, (("", svg(figure, slug=slug, label=title)),))


def _each(
    title: str, caption: str, slug: str, runs: Sequence[Run], draw: Callable[[Run], Figure]
) -> Plate:
    panels = tuple(
        (run.name, svg(draw(run), slug=f"{slug}-{index}", label=f"{title}: {run.name}"))
        for index, run in enumerate(runs)
    )
    return Plate(title, caption, panels)

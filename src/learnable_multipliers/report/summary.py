"""What the numbers say, in plain words and no further than they go.

Every sentence is computed from records. "Below" and "above" are said of losses; "better" is not:
that would take more seeds than one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from learnable_multipliers._formats import count
from learnable_multipliers.report.comparison import (
    by_setting,
    differing_settings,
    loss_gap,
    multiplier_quantiles,
    rms_pairs,
    spread,
)
from learnable_multipliers.report.records import Record, Run


def summarize(runs: Sequence[Run]) -> list[str]:
    """Return the summary of a page as sentences of plain text; the first run is the baseline."""
    return [*_losses(runs), *_cautions(runs)]


def side(difference: float, base: float) -> str:
    """Return a signed difference in words: `0.0200 (0.86%) below`."""
    if round(abs(difference), 4) == 0:
        return "equal to four decimals to"
    percent = f" ({abs(difference / base):.2%})" if base else ""
    return f"{abs(difference):.4f}{percent} {'below' if difference < 0 else 'above'}"


def _losses(runs: Sequence[Run]) -> list[str]:
    baseline, loss = runs[0], runs[0].final("eval", "loss")
    if not math.isfinite(loss):
        what = "has no finite validation loss" if baseline.of("eval") else "was not evaluated yet"
        alone = "." if len(runs) == 1 else ": no run is compared with it."
        return [f"Run {baseline.name} {what}{alone}"]
    if len(runs) == 2 and baseline.placement == "none" != runs[1].placement:
        run = runs[1]
        subject = f"With multipliers ({run.name}: placement {run.placement}) the validation loss"
        other = f"the plain run ({baseline.name})"
        return [_one(run, baseline, subject, other, f", which ends at {loss:.4f}")]
    tokens = count(baseline.final("eval", "tokens"))
    return [
        f"Run {baseline.name}, the baseline, ends at a validation loss of {loss:.4f} nats per "
        f"token after {tokens} tokens.",
        *(_one(run, baseline, f"Run {run.name}", baseline.name) for run in runs[1:]),
    ]


def _one(run: Run, baseline: Run, subject: str, other: str, addition: str = "") -> str:
    """Return how a run ends beside the baseline, at the last number of tokens they share."""
    gap = loss_gap(run, baseline)
    both = [(t, d) for t, d in zip(*gap, strict=True) if math.isfinite(d)]
    if not both:
        return f"Run {run.name} has no finite validation loss at a token count of {other}."
    tokens, difference = both[-1]
    beside = side(difference, dict(zip(*baseline.series("eval", "loss"), strict=True))[tokens])
    ends = [r.final("eval", "tokens") for r in (run, baseline)]
    if ends == [tokens, tokens]:
        loss = run.final("eval", "loss")
        return (
            f"{subject} ends at {loss:.4f} nats per token after {count(tokens)} tokens, {beside} "
            f"{other}{addition}."
        )
    return (
        f"Run {run.name} was last evaluated after {count(ends[0])} tokens and {baseline.name} "
        f"after {count(ends[1])}. Where both were, after {count(tokens)} tokens, the loss of "
        f"{run.name} is {beside} {other}."
    )


def describe_rms(run: Run) -> str:
    """Return how near the raw weights of a run end to the noise prediction; "" without them."""
    pairs = rms_pairs(run.last("weights"))
    ratios = spread(measured / predicted for predicted, measured in pairs.values())
    if ratios is None:
        return ""
    return (
        f"The raw weights of run {run.name} ({len(pairs)} matrices) end at {ratios.middle:.2f} "
        f"times the rms that noise alone would give them, in the median; from {ratios.low:.2f} to "
        f"{ratios.high:.2f} times over all matrices."
    )


def describe_multipliers(run: Run) -> str:
    """Return how far the multipliers of a run spread; "" without them."""
    matrices = [m for group in multiplier_quantiles(run.last("weights")).values() for m in group]
    inner = spread(value for quantiles in matrices for value in (quantiles[1], quantiles[5]))
    if inner is None:
        return ""
    return (
        f"The multipliers of run {run.name} lie between {inner.low:.3g} and {inner.high:.3g}, "
        "leaving out the outermost 5% on either side of each matrix."
    )


def _cautions(runs: Sequence[Run]) -> list[str]:
    found = []
    groups = by_setting(runs)
    for group in (group for group in groups if len(group) > 1):
        ends = spread(run.final("eval", "loss") for run in group)
        if ends is not None:
            names = ", ".join(run.name for run in group)
            found.append(
                f"Runs {names} differ in name and seed alone: they end between {ends.low:.4f} and "
                f"{ends.high:.4f}."
            )
    single = [g for g in groups if len({str(run.setting("seed")) for run in g}) == 1]
    if single:
        names = ", ".join(run.name for group in single for run in group)
        which = f"Trained with one seed: {names}."
        if len(single) == len(groups):
            which = "Each setting was trained with one seed."
        found.append(
            f"{which} One seed proves nothing: another moves these losses "
            "too, by an amount this page cannot show. Read the differences as a description of "
            "these runs, not as a finding."
        )
    expected = ("name", "seed", "placement")
    others = [k for k in differing_settings(runs) if k.rpartition(".")[2] not in expected]
    if others:
        more = f" and {len(others) - 6} more" if len(others) > 6 else ""
        found.append(
            f"Besides placement and seed the runs differ in {', '.join(others[:6])}{more}: a gap "
            "between them need not be due to multipliers."
        )
    for run in runs:
        if not run.finished:
            found.append(
                f"Run {run.name} goes on, or did not finish: its records stop at step "
                f"{run.last_step}."
            )
        skipped = run.final("train", "skipped_steps")
        if skipped > 0:
            found.append(
                f"Run {run.name} skipped {skipped:g} steps whose gradients were not finite."
            )
        rollbacks = run.of("rollback")
        if rollbacks:
            found.append(f"Run {run.name} {_gone_back(rollbacks)}.")
        if run.unreadable:
            lines = ", ".join(map(str, run.unreadable))
            found.append(
                f"Of the metrics of run {run.name}, line {lines} could not be read, as a killed "
                "run leaves it, and is left out."
            )
    return found


def _gone_back(rollbacks: Sequence[Record]) -> str:
    """Return when a loss left its course and where the run went on from."""
    often = "once" if len(rollbacks) == 1 else f"{len(rollbacks)} times"
    ways = [
        f"from step {r['high'][-1][0]} to the checkpoint of step {r['checkpoint']}"
        if r["high"]
        else f"to the checkpoint of step {r['checkpoint']}"
        for r in rollbacks
    ]
    return f"left its course {often} and went back: {', '.join(ways)}"

"""What the tables of the headline are made of: gains by seed, intervals, verdicts, and lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from learnable_multipliers.experiments import readings
from learnable_multipliers.experiments.claim import MIN_SEEDS, mean_interval
from learnable_multipliers.experiments.headline.arms import PLAIN
from learnable_multipliers.experiments.presets import NAMES
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Labels

_ARM = ("family", "optimizer", "arm")


def finals(records: Sequence[Labelled]) -> list[Labelled]:
    """Return the full-length runs of the usual size, which the comparison has."""
    return readings.select(records, stage="final", length=1.0, size=1)


def texts(records: Iterable[Labelled]) -> list[str]:
    """Return the names of held-out text beside that of the tuning, in order."""
    return list(dict.fromkeys(name for one in records for name in one.record.tests))


def loss_on(text: str | None, unit: str = "loss") -> Callable[[Record], float]:
    """Return how a record's loss on a text is read; None is the text of the tuning."""
    if text is None:
        return readings.loss
    return lambda record: record.tests[text][unit] if record.tests else readings.loss(record)


def reported_loss(records: Iterable[Labelled]) -> Callable[[Record], float]:
    """Return how the loss that is reported is read: on text that tuning has not seen, if any."""
    return loss_on(next(iter(texts(records)), None))


def gains(
    records: Sequence[Labelled],
    read: Callable[[Record], float],
    labels: Labels,
    reference: str = PLAIN.name,
) -> dict[int, float]:
    """Return the loss of plain, or another reference, minus that of an arm, by seed of both."""
    arm = readings.by_seed(readings.select(records, **labels))
    other = readings.by_seed(readings.select(records, **{**labels, "arm": reference}))
    return readings.paired(lambda ours, theirs: read(theirs) - read(ours), arm, other)


def arms_of(
    records: Sequence[Labelled], expected: Iterable[Sequence[str]] = ()
) -> list[dict[str, str | float]]:
    """Return the labels of the arms there are, then of those expected, each once.

    Those of a model and an optimizer stand together, in the order of their first runs.
    """
    there = (tuple(one.labels[name] for name in _ARM) for one in records)
    arms = list(dict.fromkeys((*there, *map(tuple, expected))))
    groups = list(dict.fromkeys(values[:2] for values in arms))
    arms.sort(key=lambda values: groups.index(values[:2]))
    return [dict(zip(_ARM, values, strict=True)) for values in arms]


def key_of(labels: Mapping[str, str | float]) -> tuple[str, ...]:
    """Return model, optimizer and name of an arm."""
    return tuple(str(labels[name]) for name in _ARM)


def named(labels: Mapping[str, str | float]) -> tuple[str, str, str]:
    """Return model, optimizer and name of an arm as tables have them."""
    return NAMES[str(labels["family"])], NAMES[str(labels["optimizer"])], str(labels["arm"])


def format_interval(values: Iterable[float], digits: int = 4) -> str:
    """Return mean and 95% interval."""
    values = list(values)
    if not values:
        return ""
    mean, low, high = (f"{value:.{digits}f}" for value in mean_interval(values))
    return f"{mean} [{low}, {high}]" if len(values) > 1 else mean


def is_kept(gains: Sequence[float], num_seeds: int) -> bool:
    """Return whether a variation is better with every seed.

    Where nothing is gained one of eight passes with three seeds, so that kept ones are judged
    again; an interval of three seeds would miss half of the gains as large as two deviations.
    """
    return len(gains) >= num_seeds and all(gain > 0 for gain in gains)


def verdict(values: Sequence[float]) -> str:
    """Return what the gains of seeds say: better, worse, or no difference seen."""
    if not values:
        return "not run"
    if not all(map(math.isfinite, values)):
        # Plain's loss is infinite where the gain is: then no run of the arm may have diverged.
        return "plain diverged" if math.inf in values and -math.inf not in values else "diverged"
    if len(values) < MIN_SEEDS:
        return "too few seeds"
    _, low, high = mean_interval(values)
    return "better" if low > 0 else "worse" if high < 0 else "no difference seen"


# -- the length at which an arm has plain's final loss -----------------------------------------


@dataclass(frozen=True)
class Needed:
    """What each seed of an arm needs for plain's final loss, as parts of what plain has needed.

    A sign of "<" or ">" says that it lies beyond the lengths that were run; "" is a number.
    """

    losses: dict[float, float]
    """Length -> mean loss of the arm over the seeds."""
    tokens: list[tuple[str, float]]
    time: list[tuple[str, float]]


def needed(runs: Sequence[Labelled], labels: Labels) -> Needed | None:
    """Return where an arm that was run at several lengths has plain's final loss.

    Args:
        runs: Those of the usual size, of any length.
    """
    read = reported_loss(runs)
    plain = readings.by_seed(readings.select(runs, **{**labels, "arm": PLAIN.name}, length=1.0))
    ours = [one for one in readings.select(runs, **labels) if float(one.labels["length"]) <= 1]
    lengths = {x: readings.by_seed(ours, length=x) for x in readings.distinct(ours, "length")}
    # Without some, a mean moves by more than a length is worth.
    seeds = sorted(set(plain).intersection(*lengths.values()))
    if labels["arm"] == PLAIN.name or len(lengths) < 2 or not seeds:
        return None
    tokens, time = [], []
    for seed in seeds:
        by_length = {x: read(arm[seed]) for x, arm in lengths.items()}
        sign, part = tokens_to_reach(by_length, read(plain[seed]))
        speed = fmean(arm[seed].tokens_per_second for arm in lengths.values())
        tokens.append((sign, part))
        time.append((sign, part * plain[seed].tokens_per_second / speed))
    losses = {x: fmean(read(arm[seed]) for seed in seeds) for x, arm in lengths.items()}
    return Needed(losses, tokens, time)


def tokens_to_reach(by_length: Mapping[float, float], loss: float) -> tuple[str, float]:
    """Return the part of 1x at which an arm has a loss, on a line between two lengths.

    Lines are not drawn beyond their ends: it is "<" the shortest length or ">" the longest there. A
    length at which a run diverged is left out.
    """
    points = sorted((x, value) for x, value in by_length.items() if math.isfinite(value))
    if not points:
        return ">", max(by_length)
    for (short, above), (long, below) in itertools.pairwise(points):
        if above > loss >= below:
            return "", short + (above - loss) / (above - below) * (long - short)
    return ("<", points[0][0]) if points[0][1] <= loss else (">", points[-1][0])


def format_bounded(values: Sequence[tuple[str, float]]) -> str:
    """Return mean and 95% interval of the numbers, then each bound with how many seeds have it."""
    parts = [format_interval((value for sign, value in values if not sign), digits=3)]
    for bound in ("<", ">"):
        bounds = [value for sign, value in values if sign == bound]
        if bounds:
            # The weakest of them holds for all.
            loosest = max(bounds) if bound == "<" else min(bounds)
            parts.append(f"{bound}{loosest:.2f} ({len(bounds)} of {len(values)} seeds)")
    return ", ".join(filter(None, parts))

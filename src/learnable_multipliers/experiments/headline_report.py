"""Tables and plots of the headline, from its records alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from learnable_multipliers.experiments import plot as drawing
from learnable_multipliers.experiments import table
from learnable_multipliers.experiments.claim import mean_interval
from learnable_multipliers.experiments.plot import Plot, Table
from learnable_multipliers.experiments.record import Labelled, Record

PLAIN = "plain"
NAMES = {"adamw": "AdamW", "muon": "Muon", "llama": "Llama", "hybrid": "hybrid"}
_LABELS = {"stage", "family", "optimizer", "arm", "length", "size", "seed"}
"""What tells runs apart; the other labels are settings."""
_FEWEST = 6
"""Trials that every arm has: those of rivals."""


def tables(records: Sequence[Labelled]) -> list[Table]:
    """Return the comparison at full length, at other lengths and sizes, and the tuning."""
    found = [_comparison(records), _lengths(records), _tuning(records)]
    return [each for each in found if each.rows]


def texts(records: Iterable[Labelled]) -> list[str]:
    """Return the names of held-out text beside that of the tuning, in order."""
    return list(dict.fromkeys(name for one in records for name in one.record.tests))


def loss_on(text: str | None, unit: str = "loss") -> Callable[[Record], float]:
    """Return how a record's loss on a text is read; None is the text of the tuning."""
    if text is None:
        return table.loss
    return lambda record: record.tests[text][unit] if record.tests else table.loss(record)


def gains(
    records: Sequence[Labelled], read: Callable[[Record], float], **labels: str | float
) -> dict[int, float]:
    """Return the loss of plain minus that of an arm, for every seed that has both."""
    arm = table.by_seed(table.select(records, **labels))
    plain = table.by_seed(table.select(records, **{**labels, "arm": PLAIN}))
    return table.paired(lambda ours, theirs: read(theirs) - read(ours), arm, plain)


def _comparison(records: Sequence[Labelled]) -> Table:
    finals = table.select(records, stage="final", length=1.0, size=1)
    first, *others = texts(finals) or [None]
    # Other text may have tokens of another length: bits per byte compare.
    reads = [loss_on(first), *(loss_on(name, "bits_per_byte") for name in others)]
    rows = []
    for labels in _arms(finals):
        runs = table.by_seed(table.select(finals, **labels))
        row = [*_named(labels), str(len(runs))]
        for index, read in enumerate(reads):
            if index == 0:
                row.append(shown(read(record) for record in runs.values()))
            found = gains(finals, read, **labels)
            row.append("" if labels["arm"] == PLAIN else shown(found.values()))
            if index == 0:
                row.append("" if labels["arm"] == PLAIN else verdict(list(found.values())))
        row.append(f"{fmean(record.tokens_per_second for record in runs.values()):,.0f}")
        rows.append(tuple(row))
    loss = f"loss on {first or 'validation text'}"
    header = ("model", "optimizer", "arm", "seeds", loss, "gain over plain", "")
    header += tuple(f"gain on {name}, bits per byte" for name in others)
    caption = (
        "Nats per token at the end of full-length runs with tuned settings: mean [95% interval] "
        "over seeds. Gains are paired by seed: the same start and the same text in the same order."
    )
    return Table("Comparison", caption, (*header, "tokens/s"), rows)


def _lengths(records: Sequence[Labelled]) -> Table:
    """Return losses at other lengths and sizes, and where an arm reaches plain's final loss."""
    finals = table.select(records, stage="final")
    read = loss_on(next(iter(texts(finals)), None))
    rows = []
    for family, optimizer, size in sorted(
        {(o.labels["family"], o.labels["optimizer"], o.labels["size"]) for o in finals}, key=str
    ):
        chosen = table.select(finals, family=family, optimizer=optimizer, size=size)
        for arm in dict.fromkeys(one.labels["arm"] for one in chosen):
            by_length = {
                float(length): [
                    read(one.record) for one in table.select(chosen, arm=arm, length=length)
                ]
                for length in table.distinct(table.select(chosen, arm=arm), "length")
            }
            if set(by_length) <= {1.0} and size == 1:
                continue
            plain = [read(o.record) for o in table.select(chosen, arm=PLAIN, length=1.0)]
            part = reached(by_length, fmean(plain)) if plain and arm != PLAIN else None
            losses = ", ".join(f"{x:g}x {fmean(ys):.4f}" for x, ys in by_length.items())
            where = "" if part is None else part
            model = NAMES[str(family)] + (f" x {size:g}" if size != 1 else "")
            rows.append((model, NAMES[str(optimizer)], str(arm), losses, where))
    caption = (
        "Mean over seeds, each length with its own decay. Tokens are those an arm needs for "
        "plain's loss at 1x, as a part of 1x, between the lengths that were run."
    )
    header = ("model", "optimizer", "arm", "loss by length", "tokens to plain's loss")
    return Table("Other lengths and sizes", caption, header, rows)


def reached(by_length: Mapping[float, Sequence[float]], loss: float) -> str | None:
    """Return the part of 1x at which an arm has a loss, on a line between two lengths."""
    points = sorted((length, fmean(losses)) for length, losses in by_length.items())
    if len(points) < 2 or points[-1][1] > loss:
        return None
    if points[0][1] <= loss:
        return f"under {points[0][0]:g}"
    for (short, above), (long, below) in itertools.pairwise(points):
        if above > loss >= below:
            return f"{short + (above - loss) / (above - below) * (long - short):.2f}"
    return None


def _tuning(records: Sequence[Labelled]) -> Table:
    trials = table.select(records, stage="tuning")
    rows = []
    for labels in _arms(trials):
        tried = table.select(trials, **labels)
        winner = min(tried, key=lambda one: table.loss(one.record))
        settings = {k: v for k, v in winner.labels.items() if k not in _LABELS}
        inside = [name for name in settings if _bracketed(name, winner, tried)]
        varied = [name for name in settings if len({o.labels.get(name) for o in tried}) > 1]
        best = ", ".join(f"{name} {value:g}" for name, value in settings.items() if name in varied)
        missed = ", ".join(name for name in varied if name not in inside)
        losses = [table.loss(one.record) for one in tried]
        least = (f"{min(losses):.4f}", f"{min(losses[:_FEWEST]):.4f}")
        rows.append((*_named(labels), str(len(tried)), *least, best, missed))
    caption = (
        "At half the length, one seed, on validation text. A setting is bracketed if a higher and "
        "a lower value were tried, all else as in the best trial, and both were worse."
    )
    header = ("model", "optimizer", "arm", "trials", "best loss", f"of the first {_FEWEST}")
    return Table("Tuning", caption, (*header, "at", "not bracketed"), rows)


def _bracketed(name: str, winner: Labelled, tried: Sequence[Labelled]) -> bool:
    """Return whether a setting was tried on both sides of the best trial."""

    def rest(one: Labelled) -> dict[str, str | float]:
        return {key: value for key, value in one.labels.items() if key != name}

    values = [float(one.labels[name]) for one in tried if rest(one) == rest(winner)]
    return min(values) < float(winner.labels[name]) < max(values)


def _arms(records: Sequence[Labelled]) -> list[dict[str, str | float]]:
    """Return the labels of the arms there are, each once, in the order of the records."""
    keys = ("family", "optimizer", "arm")
    found = dict.fromkeys(tuple(one.labels[key] for key in keys) for one in records)
    return [dict(zip(keys, values, strict=True)) for values in found]


def _named(labels: Mapping[str, str | float]) -> tuple[str, str, str]:
    return NAMES[str(labels["family"])], NAMES[str(labels["optimizer"])], str(labels["arm"])


def shown(values: Iterable[float]) -> str:
    """Return mean and 95% interval."""
    values = list(values)
    mean, low, high = mean_interval(values)
    return f"{mean:.4f} [{low:.4f}, {high:.4f}]" if len(values) > 1 else f"{mean:.4f}"


def verdict(values: Sequence[float]) -> str:
    """Return what the gains of seeds say: better, worse, or no difference seen."""
    if len(values) < 3:
        return "not run"
    _, low, high = mean_interval(values)
    return "better" if low > 0 else "worse" if high < 0 else "no difference seen"


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw training loss over wall-clock, for plain and multipliers, and the gains of all arms."""
    finals = table.select(records, stage="final", length=1.0, size=1)
    drawn = []
    for family in dict.fromkeys(one.labels["family"] for one in finals):
        of_family = table.select(finals, family=family)
        arms = {
            f"{NAMES[str(optimizer)]}, {name}": _over_time(
                table.select(of_family, optimizer=optimizer, arm=arm)
            )
            for optimizer in table.distinct(of_family, "optimizer")
            for arm, name in ((PLAIN, "plain"), ("vector", "row and column multipliers"))
        }
        with drawing.canvas(x="seconds of training", y="training loss (nats)") as (figure, axes):
            drawing.curves(axes, {name: seeds for name, seeds in arms.items() if seeds}, early=0.3)
        caption = "Mean and range over seeds at tuned settings, by time on the device."
        drawn.append(Plot(f"Loss over time, {NAMES[str(family)]}", caption, figure))
        read = loss_on(next(iter(texts(of_family)), None))
        found = {
            NAMES[str(optimizer)]: {
                str(arm): list(gains(of_family, read, optimizer=optimizer, arm=arm).values())
                for arm in dict.fromkeys(one.labels["arm"] for one in of_family)
                if arm != PLAIN and table.select(of_family, optimizer=optimizer, arm=arm)
            }
            for optimizer in table.distinct(of_family, "optimizer")
        }
        if any(found.values()):
            with drawing.canvas(x="arm", y="gain over plain (nats)", height=320) as (figure, axes):
                drawing.categories(axes, found)
                drawing.level(axes, 0.0, "plain")
            caption = "Held-out loss of plain runs minus that of an arm, paired by seed."
            drawn.append(Plot(f"Gain over plain, {NAMES[str(family)]}", caption, figure))
    return drawn


def _over_time(records: Sequence[Labelled]) -> list[dict[float, float]]:
    """Return seconds -> training loss of each seed, at the mean speed of them all."""
    if not records:
        return []
    data = records[0].record.config["data"]
    speed = fmean(one.record.tokens_per_second for one in records)
    seconds = data["sequence_length"] * data["batch_sequences"] / speed
    curves = [one.record.train for one in records]
    return [
        {
            step * seconds: loss
            for step, loss in zip(curve.get("step", ()), curve.get("loss", ()), strict=True)
        }
        for curve in curves
    ]

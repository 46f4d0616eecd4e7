"""Tables and plots of the headline, from its records alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean

from learnable_multipliers.experiments import plot as drawing
from learnable_multipliers.experiments import table
from learnable_multipliers.experiments.claim import MIN_SEEDS, mean_interval
from learnable_multipliers.experiments.plot import Plot, Table
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Labels
from learnable_multipliers.experiments.search import MIN_GAIN, best

PLAIN, VECTOR = "plain", "vector"
NAMES = {"adamw": "AdamW", "muon": "Muon", "llama": "Llama", "hybrid": "hybrid"}
Expected = Mapping[tuple[str, ...], tuple[str, ...]]
_ARM = ("family", "optimizer", "arm")
_FEWEST = 6
"""Trials that every arm has: those of rivals."""


def tables(records: Sequence[Labelled], expected: Expected) -> list[Table]:
    """Return the comparison, benchmarks, other lengths and sizes, variations, and the tuning.

    Args:
        expected: The arms of the protocol, by model, optimizer and name, with what is tuned.
    """
    if not records:
        return []
    found = [
        _comparison(records, expected),
        _benchmarks(
            records,
            "accuracy",
            100.0,
            "Accuracy in percent at the end of the same runs: plain's own, and how much higher "
            "that of the other arms is.",
        ),
        _benchmarks(
            records,
            "bits per byte",
            -1.0,
            "Bits per byte of the right answers, on the same questions: plain's own, and how much "
            "lower those of the other arms are.",
        ),
        _longer(records),
        _shorter(records),
        _variations(records),
        _tuning(records, expected),
    ]
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
    records: Sequence[Labelled],
    read: Callable[[Record], float],
    labels: Labels,
    reference: str = PLAIN,
) -> dict[int, float]:
    """Return the loss of plain, or another reference, minus that of an arm, by seed of both."""
    arm = table.by_seed(table.select(records, **labels))
    other = table.by_seed(table.select(records, **{**labels, "arm": reference}))
    return table.paired(lambda ours, theirs: read(theirs) - read(ours), arm, other)


def _comparison(records: Sequence[Labelled], expected: Expected) -> Table:
    finals = table.select(records, stage="final", length=1.0, size=1)
    if not finals:
        return _nothing_compared(expected)
    first, *others = texts(finals) or [None]
    # Other text may have tokens of another length: bits per byte compare.
    reads = [loss_on(first), *(loss_on(name, "bits_per_byte") for name in others)]
    rows = []
    for labels in _arms(finals, expected):
        runs = table.by_seed(table.select(finals, **labels))
        row = [*_named(labels), str(len(runs))]
        row.append(shown(reads[0](record) for record in runs.values()))
        for index, read in enumerate(reads):
            found = list(gains(finals, read, labels).values())
            plain = labels["arm"] == PLAIN
            row.append("" if plain else shown(found))
            if index == 0:
                row.append("" if plain and runs else verdict(found))
                ours = labels["arm"] in (PLAIN, VECTOR)
                row.append("" if ours else shown(gains(finals, read, labels, VECTOR).values()))
        speeds = [record.tokens_per_second for record in runs.values()]
        rows.append((*row, f"{fmean(speeds):,.0f}" if speeds else ""))
    loss = f"loss on {first or 'validation text'}"
    header = ("model", "optimizer", "arm", "seeds", loss, "gain over plain", "", "over vector")
    header += tuple(f"gain on {name}, bits per byte" for name in others)
    caption = (
        "Nats per token at the end of full-length runs with tuned settings: mean [95% interval] "
        "over seeds. Gains are paired by seed: the same start and the same text in the same order."
    )
    return Table("Comparison", caption, (*header, "tokens/s"), rows)


def _nothing_compared(expected: Expected) -> Table:
    """Return a line for each model and optimizer with the arms of the protocol."""
    arms: dict[tuple[str, str], list[str]] = {}
    for labels in _arms((), expected):
        model, optimizer, arm = _named(labels)
        arms.setdefault((model, optimizer), []).append(arm)
    rows = [(*names, ", ".join(found)) for names, found in arms.items()]
    caption = "No full-length run with tuned settings has been made; these arms are to be compared."
    return Table("Comparison", caption, ("model", "optimizer", "not run"), rows)


def _benchmarks(records: Sequence[Labelled], metric: str, unit: float, caption: str) -> Table:
    """Return a metric of each task for plain runs, and the gains of the other arms over them.

    Args:
        unit: Factor on what is shown; negative where less is better.
    """
    finals = table.select(records, stage="final", length=1.0, size=1)
    finals = [one for one in finals if one.record.benchmarks]
    scores = (one.record.benchmarks.items() for one in finals)
    tasks = [task for each in scores for task, metrics in each if metric in metrics]
    tasks = list(dict.fromkeys(tasks))
    rows = []
    for labels in _arms(finals):
        runs = table.by_seed(table.select(finals, **labels))
        plain = table.by_seed(table.select(finals, **{**labels, "arm": PLAIN}))
        if labels["arm"] == PLAIN:
            read = [partial(_score, task=task, metric=metric, unit=abs(unit)) for task in tasks]
            cells = [table.paired(each, plain) for each in read]
        else:
            read = [partial(_higher, task=task, metric=metric, unit=unit) for task in tasks]
            cells = [table.paired(each, runs, plain) for each in read]
        complete = set(runs).intersection(*cells)
        mean = {seed: fmean(cell[seed] for cell in cells) for seed in sorted(complete)}
        row = [shown(cell.values()) for cell in (mean, *cells)]
        rows.append((*_named(labels), str(len(runs)), *row))
    header = ("model", "optimizer", "arm", "seeds", "mean", *tasks)
    caption = f"{caption} Mean [95% interval] over seeds, gains paired by seed."
    return Table(f"Benchmarks: {metric}", caption, header, rows)


def _score(record: Record, task: str, metric: str, unit: float) -> float | None:
    value = record.benchmarks.get(task, {}).get(metric)
    return None if value is None else unit * value


def _higher(ours: Record, theirs: Record, task: str, metric: str, unit: float) -> float | None:
    """Return how much higher our score is; None unless both models had the same questions."""
    questions = [record.benchmarks.get(task, {}).get("items") for record in (ours, theirs)]
    pair = [_score(record, task, metric, unit) for record in (ours, theirs)]
    if questions[0] != questions[1] or pair[0] is None or pair[1] is None:
        return None
    return pair[0] - pair[1]


def _longer(records: Sequence[Labelled]) -> Table:
    """Return the gains at other lengths and sizes at which there are plain runs too."""
    finals = table.select(records, stage="final")
    read = loss_on(next(iter(texts(finals)), None))
    rows = []
    for length, size in sorted({(o.labels["length"], o.labels["size"]) for o in finals}):
        chosen = table.select(finals, length=length, size=size)
        if (length, size) == (1.0, 1) or not table.select(chosen, arm=PLAIN):
            continue
        for labels in _arms(chosen):
            losses = [read(one.record) for one in table.select(chosen, **labels)]
            found = list(gains(chosen, read, labels).values())
            gain = ("", "") if labels["arm"] == PLAIN else (shown(found), verdict(found))
            where = (f"{float(length):g}x", f"{float(size):g}x", str(len(losses)))
            rows.append((*_named(labels), *where, shown(losses), *gain))
    caption = "Settings are those tuned at half of 1x and the usual size; read as the comparison."
    header = ("model", "optimizer", "arm", "tokens", "size", "seeds", "loss", "gain over plain", "")
    return Table("Other lengths and sizes", caption, header, rows)


def _shorter(records: Sequence[Labelled]) -> Table:
    """Return where arms that were run at several lengths reach plain's final loss."""
    finals = table.select(records, stage="final", size=1)
    read = loss_on(next(iter(texts(finals)), None))
    rows = []
    for labels in _arms(finals):
        plain = table.by_seed(table.select(finals, **{**labels, "arm": PLAIN}, length=1.0))
        runs = [one for one in table.select(finals, **labels) if float(one.labels["length"]) <= 1]
        lengths = {x: table.by_seed(runs, length=x) for x in table.distinct(runs, "length")}
        # Without some, a mean moves by more than a length is worth.
        seeds = sorted(set(plain).intersection(*lengths.values()))
        if labels["arm"] == PLAIN or len(lengths) < 2 or not seeds:
            continue
        by_length = {x: [read(found[seed]) for seed in seeds] for x, found in lengths.items()}
        sign, part = reached(by_length, fmean(read(plain[seed]) for seed in seeds))
        losses = ", ".join(f"{x:g}x {fmean(ys):.4f}" for x, ys in by_length.items())
        ours = fmean(one.record.tokens_per_second for one in runs)
        time = part * fmean(one.tokens_per_second for one in plain.values()) / ours
        needs = f"{sign}{part:.2f}", f"{sign}{time:.2f}"
        rows.append((*_named(labels), str(len(seeds)), losses, *needs))
    caption = (
        "Mean loss over the seeds that plain and all lengths have, each length with its own decay; "
        "what an arm needs for plain's loss at 1x, on a line between two lengths, as a part of "
        "plain's; < and > where it lies outside of the lengths that were run."
    )
    header = ("model", "optimizer", "arm", "seeds", "loss by length", "tokens", "time")
    return Table("To reach plain's final loss", caption, header, rows)


def reached(by_length: Mapping[float, Sequence[float]], loss: float) -> tuple[str, float]:
    """Return the part of 1x at which an arm has a loss, on a line between two lengths.

    Lines are not drawn beyond their ends: it is "<" the shortest length or ">" the longest there. A
    length at which a run diverged is left out.
    """
    means = sorted((length, fmean(losses)) for length, losses in by_length.items())
    points = [point for point in means if math.isfinite(point[1])]
    if not points:
        return ">", max(by_length)
    for (short, above), (long, below) in itertools.pairwise(points):
        if above > loss >= below:
            return "", short + (above - loss) / (above - below) * (long - short)
    return ("<", points[0][0]) if points[0][1] <= loss else (">", points[-1][0])


def _variations(records: Sequence[Labelled]) -> Table:
    """Return what each change of the multipliers' training gains over vector as it was tuned."""
    tried = table.select(records, stage="variation")
    rows = []
    for labels in _arms(tried):
        if labels["arm"] != VECTOR:
            found = list(gains(tried, table.loss, labels, VECTOR).values())
            is_dropped = bool(found) and not found[-1] > 0
            says = (
                "kept" if is_kept(found, MIN_SEEDS) else "worse with a seed" if is_dropped else ""
            )
            rows.append((*_named(labels)[1:], str(len(found)), shown(found), says))
    caption = (
        "Vector multipliers with one change, at half the length, on validation text, other seeds. "
        'A change that is worse with one seed is not tried with the next; "vector, varied" has all '
        "that are better with each, and is judged by seeds of its own."
    )
    header = ("optimizer", "variation", "seeds", "gain over vector", "")
    return Table("Variations", caption, header, rows)


def _tuning(records: Sequence[Labelled], expected: Expected) -> Table:
    trials = table.select(records, stage="tuning")
    rows = []
    for labels in _arms(trials):
        tried = table.select(trials, **labels)
        winner = tried[best({(i,): table.loss(one.record) for i, one in enumerate(tried)})[0]]
        # A combination is none of those that are known beforehand.
        axes = expected.get(_key(labels), ("multiplier_lr_scale", "lr", "weight_decay"))
        at = ", ".join(f"{name} {float(winner.labels[name]):g}" for name in axes)
        missed = ", ".join(name for name in axes if not _bracketed(name, winner, tried))
        losses = [table.loss(one.record) for one in tried]
        least = (f"{table.loss(winner.record):.4f}", f"{min(losses[:_FEWEST]):.4f}")
        rows.append((*_named(labels), str(len(tried)), *least, at, missed))
    caption = (
        "At half the length, one seed, on validation text. A setting is bracketed if a higher and "
        "a lower value were tried, all else as in the best trial, and neither was better by "
        f"{MIN_GAIN:g} nats."
    )
    header = ("model", "optimizer", "arm", "trials", "best loss", f"of the first {_FEWEST}")
    return Table("Tuning", caption, (*header, "at", "not bracketed"), rows)


def _bracketed(name: str, winner: Labelled, tried: Sequence[Labelled]) -> bool:
    """Return whether a setting was tried on both sides of the best trial."""

    def rest(one: Labelled) -> dict[str, str | float]:
        return {key: value for key, value in one.labels.items() if key != name}

    values = [float(one.labels[name]) for one in tried if rest(one) == rest(winner)]
    return min(values) < float(winner.labels[name]) < max(values)


def _arms(
    records: Sequence[Labelled], expected: Iterable[Sequence[str]] = ()
) -> list[dict[str, str | float]]:
    """Return the labels of the arms there are, then of those expected, each once.

    Those of a model and an optimizer stand together, in the order of their first runs.
    """
    there = (tuple(one.labels[name] for name in _ARM) for one in records)
    found = list(dict.fromkeys((*there, *map(tuple, expected))))
    groups = list(dict.fromkeys(values[:2] for values in found))
    found.sort(key=lambda values: groups.index(values[:2]))
    return [dict(zip(_ARM, values, strict=True)) for values in found]


def _key(labels: Mapping[str, str | float]) -> tuple[str, ...]:
    return tuple(str(labels[name]) for name in _ARM)


def _named(labels: Mapping[str, str | float]) -> tuple[str, str, str]:
    return NAMES[str(labels["family"])], NAMES[str(labels["optimizer"])], str(labels["arm"])


def shown(values: Iterable[float]) -> str:
    """Return mean and 95% interval."""
    values = list(values)
    if not values:
        return ""
    mean, low, high = mean_interval(values)
    return f"{mean:.4f} [{low:.4f}, {high:.4f}]" if len(values) > 1 else f"{mean:.4f}"


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
            for arm, name in ((PLAIN, "plain"), (VECTOR, "row and column multipliers"))
        }
        with drawing.canvas(x="seconds of training", y="training loss (nats)") as (figure, axes):
            drawing.curves(axes, {name: seeds for name, seeds in arms.items() if seeds}, early=0.3)
        caption = "Mean and range over seeds at tuned settings, by time on the device."
        drawn.append(Plot(f"Loss over time, {NAMES[str(family)]}", caption, figure))
        read = loss_on(next(iter(texts(of_family)), None))
        found = {
            NAMES[str(optimizer)]: {
                str(arm): list(
                    gains(of_family, read, {"optimizer": optimizer, "arm": arm}).values()
                )
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

"""Tables of the headline, from its records alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from learnable_multipliers.experiments import readings
from learnable_multipliers.experiments.claim import MIN_SEEDS
from learnable_multipliers.experiments.command import command_of
from learnable_multipliers.experiments.drawing import Table
from learnable_multipliers.experiments.headline.arms import (
    COMBINATION,
    KINDS,
    LONGER,
    PLAIN,
    SCALES,
    VARIED,
    VECTOR,
    expected,
)
from learnable_multipliers.experiments.headline.gains import (
    arms_of,
    finals,
    format_bounded,
    format_interval,
    gains,
    is_kept,
    key_of,
    loss_on,
    named,
    needed,
    reported_loss,
    texts,
    verdict,
)
from learnable_multipliers.experiments.headline.search import MIN_GAIN, best
from learnable_multipliers.experiments.headline.verdicts import sentences
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import in_words
from learnable_multipliers.pretrain.config import RuntimeConfig

_FEWEST = SCALES["gpu"].rival_trials
"""Trials that every arm has."""
_EITHER = "scalar or vector"
"""Stands for the better of the two, before tuning has found it."""


def tables(records: Sequence[Labelled]) -> list[Table]:
    """Return the comparison, benchmarks, other lengths and sizes, variations, tuning, commands."""
    if not records:
        return []
    candidates = [
        _comparison(records),
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
        _tuning(records),
        _repeats(records),
        _commands(records),
    ]
    return [each for each in candidates if each.rows]


def _comparison(records: Sequence[Labelled]) -> Table:
    runs = finals(records)
    first, *others = texts(runs) or [None]
    # Other text may have tokens of another length: bits per byte compare.
    reads = [loss_on(first), *(loss_on(name, "bits_per_byte") for name in others)]
    rows = []
    for labels in arms_of(runs, _expected_arms(runs)):
        arm = readings.by_seed(readings.select(runs, **labels))
        row = [*named(labels), str(len(arm))]
        row.append(format_interval(reads[0](record) for record in arm.values()))
        for index, read in enumerate(reads):
            values = list(gains(runs, read, labels).values())
            plain = labels["arm"] == PLAIN.name
            row.append("" if plain else format_interval(values))
            if index == 0:
                row.append("" if plain and arm else verdict(values))
                over = gains(runs, read, labels, VECTOR.name).values()
                ours = labels["arm"] in (PLAIN.name, VECTOR.name)
                row.append("" if ours else format_interval(over))
        speeds = [record.tokens_per_second for record in arm.values()]
        rows.append((*row, f"{fmean(speeds):,.0f}" if speeds else ""))
    loss = f"loss on {first or 'validation text'}"
    header = ("model", "optimizer", "arm", "seeds", loss, "gain over plain", "", "over vector")
    header += tuple(f"gain on {name}, bits per byte" for name in others)
    caption = (
        "Nats per token at the end of full-length runs with tuned settings: mean [95% interval] "
        "over seeds. Gains are paired by seed: the same start and the same text in the same order. "
        "Rivals are eager PyTorch and our optimizers fused kernels, so that tokens/s say nothing "
        "about a rival's method."
    )
    return Table("Comparison", caption, (*header, "tokens/s"), rows, sentences(records))


def _expected_arms(runs: Sequence[Labelled]) -> list[tuple[str, ...]]:
    """Return the arms of the protocol; a combination that was run stands for the one planned."""
    combined = {
        key_of(one.labels)[:2]
        for one in runs
        if str(one.labels["arm"]).startswith(f"{VECTOR.name} + ")
    }
    return [name for name in expected() if name[2] != COMBINATION.name or name[:2] not in combined]


def _benchmarks(records: Sequence[Labelled], metric: str, unit: float, caption: str) -> Table:
    """Return a metric of each task for plain runs, and the gains of the other arms over them.

    Args:
        unit: Factor on what is shown; negative where less is better.
    """
    runs = [one for one in finals(records) if one.record.benchmarks]
    scores = (one.record.benchmarks.items() for one in runs)
    tasks = [task for each in scores for task, metrics in each if metric in metrics]
    tasks = list(dict.fromkeys(tasks))
    rows = []
    for labels in arms_of(runs):
        arm = readings.by_seed(readings.select(runs, **labels))
        plain = readings.by_seed(readings.select(runs, **{**labels, "arm": PLAIN.name}))
        if labels["arm"] == PLAIN.name:
            read = [partial(_score, task=task, metric=metric, unit=abs(unit)) for task in tasks]
            cells = [readings.paired(each, plain) for each in read]
        else:
            read = [partial(_higher, task=task, metric=metric, unit=unit) for task in tasks]
            cells = [readings.paired(each, arm, plain) for each in read]
        complete = set(arm).intersection(*cells)
        mean = {seed: fmean(cell[seed] for cell in cells) for seed in sorted(complete)}
        row = [format_interval(cell.values()) for cell in (mean, *cells)]
        rows.append((*named(labels), str(len(arm)), *row))
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
    runs = readings.select(records, stage="final")
    read = reported_loss(runs)
    rows = []
    reported = ((LONGER, size) for size in (1, 2))
    for length, size in sorted(
        {*((o.labels["length"], o.labels["size"]) for o in runs), *reported}
    ):
        chosen = readings.select(runs, length=length, size=size)
        is_planned = length == LONGER
        if (length, size) == (1.0, 1) or not (
            is_planned or readings.select(chosen, arm=PLAIN.name)
        ):
            continue
        where = (f"{float(length):g}x", f"{float(size):g}x")
        for labels in arms_of(chosen, _expected_pairs(chosen) if is_planned else ()):
            losses = [read(one.record) for one in readings.select(chosen, **labels)]
            values = list(gains(chosen, read, labels).values())
            plain = labels["arm"] == PLAIN.name
            gain = (
                "" if plain else format_interval(values),
                "" if plain and losses else verdict(values),
            )
            row = (*where, str(len(losses)), format_interval(losses), *gain)
            rows.append((*named(labels), *row))
    caption = "Settings are those tuned at half of 1x and the usual size; read as the comparison."
    header = ("model", "optimizer", "arm", "tokens", "size", "seeds", "loss", "gain over plain", "")
    return Table("Other lengths and sizes", caption, header, rows)


def _expected_pairs(runs: Sequence[Labelled]) -> list[tuple[str, str, str]]:
    """Return plain and the better multipliers with each optimizer, unless the latter were run."""
    there = {one.labels["optimizer"] for one in runs if one.labels["arm"] != PLAIN.name}
    return [
        ("llama", kind, arm)
        for kind in KINDS
        for arm in (PLAIN.name, *([] if kind in there else [_EITHER]))
    ]


def _shorter(records: Sequence[Labelled]) -> Table:
    """Return where arms that were run at several lengths reach plain's final loss."""
    runs = readings.select(records, stage="final", size=1)
    rows, there = [], set()
    for labels in arms_of(runs):
        reach = needed(runs, labels)
        if reach is None:
            continue
        there.add(labels["optimizer"])
        losses = ", ".join(f"{x:g}x {loss:.4f}" for x, loss in reach.losses.items())
        needs = format_bounded(reach.tokens), format_bounded(reach.time)
        rows.append((*named(labels), str(len(reach.tokens)), losses, *needs))
    for kind in KINDS:
        if kind not in there:
            arm = {"family": "llama", "optimizer": kind, "arm": _EITHER}
            rows.append((*named(arm), "0", "", "not run", ""))
    caption = (
        "Mean loss over the seeds that plain and all lengths have, each length with its own decay. "
        "Tokens and time that an arm needs for plain's loss at 1x, as a part of plain's: found for "
        "each seed on a line between two lengths, mean [95% interval] over seeds. A seed that "
        "reaches it outside of the lengths that were run is a bound, < or >, and not in the mean."
    )
    header = ("model", "optimizer", "arm", "seeds", "loss by length", "tokens", "time")
    return Table("To reach plain's final loss", caption, header, rows)


def _variations(records: Sequence[Labelled]) -> Table:
    """Return what each change of the multipliers' training gains over vector as it was tuned."""
    tried = readings.select(records, stage="variation")
    rows = []
    for labels in arms_of(tried):
        if labels["arm"] != VECTOR.name:
            values = list(gains(tried, readings.loss, labels, VECTOR.name).values())
            seeds = 1 if labels["arm"] == VARIED.name else MIN_SEEDS
            says = _outcome(values, seeds)
            rows.append((*named(labels)[1:], str(len(values)), format_interval(values), says))
    caption = (
        "Vector multipliers with one change, at half the length, on validation text, other seeds. "
        'A change that is worse with one seed is not tried with the next; "vector, varied" has all '
        "that are better with each, and is judged by seeds of its own. AdamW takes it over if it "
        "is better with one seed at half the length."
    )
    header = ("optimizer", "variation", "seeds", "gain over vector", "")
    return Table("Variations", caption, header, rows)


def _outcome(values: Sequence[float], num_seeds: int) -> str:
    """Return what becomes of a variation with these gains; nothing before its last seed."""
    if is_kept(values, num_seeds):
        return "kept"
    return "worse with a seed" if values and not values[-1] > 0 else ""


def _tuning(records: Sequence[Labelled]) -> Table:
    trials = readings.select(records, stage="tuning")
    planned = expected()
    rows = []
    for labels in arms_of(trials):
        tried = readings.select(trials, **labels)
        winner = tried[best({(i,): readings.loss(one.record) for i, one in enumerate(tried)})[0]]
        key = key_of(labels)
        axes = planned[key if key in planned else (*key[:2], COMBINATION.name)]
        missed = ", ".join(name for name in axes if not _bracketed(name, winner, tried))
        losses = [readings.loss(one.record) for one in tried]
        least = (f"{readings.loss(winner.record):.4f}", f"{min(losses[:_FEWEST]):.4f}")
        rows.append((*named(labels), str(len(tried)), *least, _settings(winner, axes), missed))
    caption = (
        "At half the length, one seed, on validation text. A setting is bracketed if a higher and "
        "a lower value were tried, all else as in the best trial, and neither was better by "
        f"{MIN_GAIN:g} nats."
    )
    header = ("model", "optimizer", "arm", "trials", "best loss", f"of the first {_FEWEST}")
    return Table("Tuning", caption, (*header, "at", "not bracketed"), rows)


def _settings(one: Labelled, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {float(one.labels[name]):g}" for name in names)


def _repeats(records: Sequence[Labelled]) -> Table:
    """Return the trials of a baseline that were run with more seeds."""
    repeats = readings.select(records, stage="repeat")
    by_settings: dict[str, list[Labelled]] = {}
    for one in (*readings.select(records, stage="tuning", arm=PLAIN.name), *repeats):
        others = {k: v for k, v in one.labels.items() if k not in ("stage", "seed")}
        by_settings.setdefault(in_words(others), []).append(one)
    rows = []
    for runs in by_settings.values():
        if runs[-1].labels["stage"] == "repeat":
            losses = [readings.loss(one.record) for one in runs]
            seeds = ", ".join(
                f"{one.labels['seed']:g}: {loss:.4f}"
                for one, loss in zip(runs, losses, strict=True)
            )
            at = _settings(runs[0], expected()[key_of(runs[0].labels)])
            rows.append((*named(runs[0].labels), at, seeds, f"{fmean(losses):.4f}"))
    caption = (
        "The two best trials of the baseline's search, with more seeds; all arms start from the "
        "one with the lower mean."
    )
    header = ("model", "optimizer", "arm", "at", "loss by seed", "mean")
    return Table("Repeated trials", caption, header, rows)


def _commands(records: Sequence[Labelled]) -> Table:
    """Return the command of each arm that was trained at full length."""
    runs = finals(records)
    rows = []
    for labels in arms_of(runs):
        arm = readings.by_seed(readings.select(runs, **labels))
        first, last = min(arm), max(arm)
        out = Path("runs", re.sub(r"\W+", "-", "-".join(key_of(labels))))
        config = replace(arm[first].train_config, out=out, runtime=RuntimeConfig())
        rows.append((*named(labels), f"{first} to {last}", command_of(config)))
    caption = "What trains the first seed of each arm at 1x; DATA is what lrm data prepare wrote."
    header = ("model", "optimizer", "arm", "seeds", "command of the first")
    return Table("Commands", caption, header, rows)


def _bracketed(name: str, winner: Labelled, tried: Sequence[Labelled]) -> bool:
    """Return whether a setting was tried on both sides of the best trial."""

    def rest(one: Labelled) -> dict[str, str | float]:
        return {key: value for key, value in one.labels.items() if key != name}

    values = [float(one.labels[name]) for one in tried if rest(one) == rest(winner)]
    return min(values) < float(winner.labels[name]) < max(values)

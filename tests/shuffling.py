"""Made-up worlds in which the claims of an experiment must come out right, and shuffled ones.

A world is a function of the labels of a run and a source of noise, which returns fields of the
run's record; what it leaves out is empty. Write at least three: the paper is right, its opposite,
and no effect. Then

    def right(labels, noise):
        return {"loss": 3.5 + 0.2 * (labels["arm"] == "frozen") + noise.gauss(0, 0.003)}

    assert verdicts(projector, made_up(projector, right)) == {"C2": "reproduced", ...}

Call the first one `RIGHT`: `test_experiments.py` shuffles its outcomes, and takes parts of them.

Shuffling moves outcomes among labels inside a seed. `by` names the labels that are shuffled; runs
that differ in another label are never exchanged. Choose it such that any exchange is a wrong
assignment for the claim: two arms of which the claim expects the same outcome may be exchanged
without harm, and so may the same arms with another optimizer, of which it is true as well.

No label keeps its own outcome in a seed that is shuffled (a derangement), so that no chance is left
for a permutation close to the identity. With two runs to exchange there is one such permutation,
and it is the opposite of the truth if done in every seed: there, a random set of seeds, at least
one, is shuffled. A difference d with three seeds of which one is exchanged is (d, d, -d), with the
interval d (1/3 -+ 2.87): it never clears a bound on the side of d. With more runs all seeds are
shuffled, each in its own way.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from learnable_multipliers._serialization import to_dict
from learnable_multipliers.experiments.claim import Verdict
from learnable_multipliers.experiments.ledger import judge_claims
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Labels, Preset, Run

World = Callable[[Labels, random.Random], Mapping[str, Any]]
# The module of an experiment, or anything with its names.
Experiment = Any
SHUFFLED: Mapping[str, str | tuple[str, ...]] = defaultdict(
    lambda: "arm",
    {
        "C1": ("lr", "wd"),
        "C10": "width",
        "C13": ("tuning", "arm"),
        "C21": ("arm", "lr", "wd"),
        # Read in each run by itself.
        "C22": (),
        "C23": "model",
        "C24": "width",
    },
)
"""Claim -> the labels that are shuffled for it."""


def made_up(experiment: Experiment, world: World, preset: Preset = "gpu") -> list[Labelled]:
    """Return a record for every run of an experiment, made under its present claims.

    Runs with the same config have the same noise. Runs that follow from records follow from these.
    """
    ledger = {claim.id: claim.hash for claim in experiment.CLAIMS}
    # By the order of configs, not their hashes: those change with every new setting.
    numbers: dict[str, int] = {}

    def noise(run: Run) -> random.Random:
        return random.Random(numbers.setdefault(run.key, len(numbers)))

    def recorded(runs: Iterable[Run]) -> list[Labelled]:
        return [
            Labelled(
                labels=run.labels,
                record=made_up_record(run, ledger, **world(run.labels, noise(run))),
            )
            for run in runs
        ]

    found = recorded(experiment.runs(preset))
    follow_up = getattr(experiment, "follow_up", None)
    if follow_up is not None:
        found += recorded(follow_up(preset, {each.record.key: each.record for each in found}))
    return found


def made_up_record(run: Run, ledger: Mapping[str, str], **fields: Any) -> Record:
    """Return a record of a run with these fields; `loss=None` is a run that diverged."""
    loss = fields.get("loss", 3.5)
    described = {
        "key": run.key,
        "config": to_dict(run.config),
        "ledger": dict(ledger),
        "outcome": "diverged" if loss is None else "finished",
        "loss": loss,
        "bits_per_byte": None if loss is None else loss / 3,
        "train": {},
        "held_out": {} if loss is None else {"step": [1.0], "loss": [loss]},
        **dict.fromkeys(("weights", "readings", "signals", "drift"), []),
        "tokens": 1_000_000,
        "seconds": 1.0,
        "tokens_per_second": 1e6,
        "device": "made up",
        "torch": "2.9",
    }
    return Record(**(described | fields))


def verdicts(experiment: Experiment, records: Sequence[Labelled]) -> dict[str, Verdict]:
    """Return the verdict of each claim of an experiment, as the ledger has it."""
    return {entry.claim.id: entry.verdict for entry in judge_claims("", experiment, records)}


def shuffled(
    records: Sequence[Labelled], by: str | Iterable[str], rng: random.Random
) -> list[Labelled]:
    """Return the records with outcomes exchanged among labels that differ in `by` alone."""
    names = {by} if isinstance(by, str) else set(by)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, each in enumerate(records):
        others = {name: value for name, value in each.labels.items() if name not in names}
        groups.setdefault(tuple(sorted(others.items())), []).append(index)
    movable = [group for group in groups.values() if len(group) > 1]
    if not movable:
        raise ValueError(f"no two runs differ in {', '.join(sorted(names))} alone: nothing moves")
    seeds = sorted({records[group[0]].labels["seed"] for group in movable})
    if max(map(len, movable)) == 2:
        seeds = rng.sample(seeds, rng.randint(1, len(seeds)))
    result = list(records)
    for group in movable:
        if records[group[0]].labels["seed"] in seeds:
            for index, other in zip(group, _deranged(group, rng), strict=True):
                result[index] = replace(records[index], record=records[other].record)
    return result


def _deranged(group: Sequence[int], rng: random.Random) -> list[int]:
    """Return a random order in which nothing is at its own place."""
    while True:
        order = rng.sample(group, len(group))
        if all(index != other for index, other in zip(group, order, strict=True)):
            return order


def check_shuffled(
    experiment: Experiment,
    records: Sequence[Labelled],
    by_claim: Mapping[str, str | Sequence[str]],
    times: int = 50,
) -> None:
    """Assert that claims are reproduced as labelled, and never when outcomes are shuffled.

    Args:
        by_claim: Claim -> the label, or labels, to shuffle for it.
    """
    found = verdicts(experiment, records)
    for claim, by in by_claim.items():
        assert found[claim] == "reproduced", f"{claim} is {found[claim]} before any shuffling"
        for trial in range(times):
            moved = shuffled(records, by, random.Random(trial))
            verdict = verdicts(experiment, moved)[claim]
            assert verdict != "reproduced", f"{claim} stays so when shuffled by {by} ({trial})"


def check_subsets(
    experiment: Experiment, records: Sequence[Labelled], times: int = 20, plots: int = 2
) -> None:
    """Assert what holds for any part of the records, with runs that diverged among them.

    Statistics are of known tests, and of seeds that have records; without records, or with those of
    claims that have changed since, every verdict is "not run". Plots have a title and a caption.
    """
    named = [test.name for claim in experiment.CLAIMS for test in claim.tests]
    assert len(set(named)) == len(named), "two tests have one name"
    analyse = experiment.analyse if named else lambda records: {}
    assert set(analyse(records)) == set(named), "analyse does not know the tests"
    stale = [
        replace(each, record=replace(each.record, ledger=dict.fromkeys(each.record.ledger, "old")))
        for each in records
    ]
    for nothing in ([], stale):
        assert set(verdicts(experiment, nothing).values()) <= {"not run"}
    rng = random.Random(0)
    for trial in range(times):
        # From a single record to all of them.
        part = rng.sample(list(records), max(1, len(records) * trial // (times - 1)))
        part = [_diverged(each) if rng.random() < 0.2 else each for each in part]
        seeds = {int(each.labels["seed"]) for each in part}
        for name, values in analyse(part).items():
            assert name in named
            assert set(values) <= seeds
            assert all(isinstance(value, int | float) for value in values.values())
        if trial < plots or trial == times - 1:
            assert all(plot.title and plot.caption for plot in experiment.plot(part))


def _diverged(each: Labelled) -> Labelled:
    """Return a record as it is of a run that diverged at half its length."""
    record = each.record
    curves = {name: values[: (len(values) + 1) // 2] for name, values in record.train.items()}
    if curves.get("loss"):
        curves["loss"] = [*curves["loss"][:-1], math.nan]
    lost = {"loss": None, "bits_per_byte": None, "held_out": {}, "readings": []}
    halves = {
        name: getattr(record, name)[: (len(getattr(record, name)) + 1) // 2]
        for name in ("weights", "signals", "drift")
    }
    return replace(each, record=replace(record, outcome="diverged", train=curves, **lost, **halves))

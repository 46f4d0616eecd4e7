"""A made-up world in which the headline's program runs: the loss of any run is known."""

import math
import random

from learnable_multipliers.experiments import headline
from learnable_multipliers.experiments.headline.variations import VARIATIONS
from learnable_multipliers.experiments.record import Labelled
from learnable_multipliers.pretrain.trainer.schedule import Schedule
from shuffling import made_up_record

GAINS = {"scalar": 0.01, "vector": 0.02, "symmetry-aware": 0.015, "cautious": -0.01}
GAINS |= {name: 0.0 for name in VARIATIONS} | {"rows alone": 0.03, "log scale": 0.04}
GAINS |= {"vector, varied": 0.05}
GAINS |= {"vector + cautious": 0.01, "vector + adamc": 0.03, "vector + normuon": 0.03}


def loss_of(run, noise=0.001):
    """Return a loss with a bowl around every arm's best settings, gains, and noise by seed."""
    labels = run.labels
    bottom = {"lr": 1.13e-2 if labels["optimizer"] == "adamw" else 5.66e-3, "weight_decay": 0.2}
    if str(labels["arm"]) in ("hyperball", "magnitude-direction"):
        bottom["lr"] = 1e-3
    off = [math.log2(labels[name] / best) for name, best in bottom.items()]
    gain = GAINS.get(str(labels["arm"]), 0.0)
    common = random.Random(labels["seed"]).gauss(0, 0.01)
    own = random.Random(run.in_words).gauss(0, noise)
    length = 0.2 * (1 - labels["length"]) - 0.05 * (labels["size"] - 1)
    return 3.5 + 0.01 * sum(x**2 for x in off) - gain + common + own + length


def record_of(run, loss_of=loss_of):
    loss = loss_of(run)
    tests = {"wiki": {"loss": loss + 0.1, "bits_per_byte": 1.1}}
    tests["lambada"] = {"loss": loss + 1, "bits_per_byte": 1.3 + loss / 10}
    steps = [float(step) for step in range(1, 100, 7)]
    curves = {"step": steps, "loss": [loss + 1 / step for step in steps]}
    # A nat is worth ten points of accuracy, and a fifth of a bit per byte.
    scores = {"items": "some", "accuracy": 0.9 - loss / 10, "bits per byte": loss / 5}
    scored = dict.fromkeys(headline.BENCHMARKS, scores) if run.scored else {}
    every = run.config.log.evaluate_every
    last = len(Schedule.of_run(run.config))
    at = [*range(every, last, every), last] if every else [last]
    held_out = {"step": list(map(float, at)), "loss": [loss + 1 - step / last for step in at]}
    return made_up_record(
        run,
        {},
        **{"loss": loss, "tests": tests, "train": curves, "held_out": held_out},
        **{"benchmarks": scored, "tokens": run.config.schedule.tokens},
    )


def play(fails=lambda run: False, loss_of=loss_of, records=None):
    """Return the rounds of the whole program, its runs by key, and their records.

    Runs that fail have no record.

    Args:
        records: Those to begin with.
    """
    records, failed, rounds = dict(records or {}), set(), []
    while True:
        runs = headline.follow_up("gpu", records, failed)
        new = {run.key: run for run in runs if run.key not in records and run.key not in failed}
        if not new:
            return rounds, {run.key: run for run in runs}, records
        rounds.append([run.labels for run in new.values()])
        failed |= {key for key, run in new.items() if fails(run)}
        records |= {key: record_of(run, loss_of) for key, run in new.items() if key not in failed}


def with_labels(runs, records):
    """Return the records of runs by key, with their labels."""
    return [
        Labelled(labels=run.labels, record=records[key])
        for key, run in runs.items()
        if key in records
    ]

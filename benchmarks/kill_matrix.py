"""Kill `lrm train` again and again, resume it, and compare with a run that nobody touched.

Half of the kills are at file operations of a save or of a resume, before, after and within them,
evenly spread; half at random times. After each kill, every checkpoint that is there must load and
be the one an untouched run saved at that step, and none may have been lost. In the end weights,
optimizer, counters and metrics must be the same bit for bit.

Of two ranks one is killed, and the other must end by itself; or both are, or torchrun is.

python benchmarks/kill_matrix.py --kills 160 --rank-kills 100 --torchrun-kills 40 \\
    --out results/kill-matrix.json
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import kill_ranks
import torch
from forked import ProcessResult
from kill_moments import Moment, Operation, moments, torn_files
from kill_ranks import RANKS, TIMEOUT, VICTIMS, Kill, Launcher, Victim

# These and what torch loads when it is first used: imported before the fork, not after each.
import torch._dynamo  # isort: skip
import torch.distributed.fsdp  # isort: skip
import torch.distributed.tensor.debug  # isort: skip
import learnable_multipliers.cli.train  # noqa: F401
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.store import CheckpointError
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.preflight.resume_check import (
    compare_checkpoints,
    compare_metrics,
)

STEPS, EVERY, KEEP = 14, 3, 2
RUN = f"""train tiny --name run --log.no-tensorboard --log.no-drift
    --model.hidden-size 32 --model.num-layers 1 --model.num-heads 2 --model.num-kv-heads 1
    --model.head-dim 16 --model.intermediate-size 48 --model.ssm-size 32 --model.ssm-head-dim 16
    --model.ssm-state-size 16 --model.ssm-chunk-size 16 --model.vocab-size 257
    --data.sequence-length 32 --data.batch-sequences 4 --schedule.tokens {STEPS * 128}
    --schedule.warmup-tokens 256 --schedule.decay-tokens 512
    --log.every 2 --log.weights-every 4 --log.evaluate-every 5 --log.evaluate-tokens 320
    --log.sample-tokens 4 --checkpoint.every {EVERY}
    --runtime.device cpu --runtime.num-threads 1""".split()
PLACES = {
    "save": "at a file operation of a save",
    "torn": "within a file of a checkpoint",
    "set-up": "at a file operation of a resume",
    "time": "at a random time",
}
KINDS = {
    **PLACES,
    **{f"rank {place}": f"one of two ranks, {words}" for place, words in PLACES.items()},
    "group time": "both ranks, at a random time",
    **{
        f"torchrun rank {place}": f"one of two ranks of torchrun, {words}"
        for place, words in PLACES.items()
    },
    "torchrun group time": "torchrun and both ranks, at a random time",
    "torchrun launcher time": "torchrun alone, at a random time",
}
Plan = list[Kill | None]
"""Kills of one run, one after the other; None is anyone at any time."""


def main() -> None:
    """Print a table, and write what it is made of."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="of runs in one process")
    parser.add_argument("--rank-kills", type=int, default=0, help="of runs on two forked ranks")
    parser.add_argument("--torchrun-kills", type=int, default=0, help="of two ranks of torchrun")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts: dict[Launcher, int] = {
        "alone": options.kills,
        "ranks": options.rank_kills,
        "torchrun": options.torchrun_kills,
    }
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tally = matrix(Path(folder), counts, options.workers, options.seed)
    seconds = round(time.perf_counter() - start)
    content = {"torch": torch.__version__, "seconds": seconds, **vars(tally)}
    print(table(content))
    if options.out:
        options.out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    sys.exit(bool(tally.failures))


@dataclass
class Tally:
    """What has happened so far."""

    kills: Counter[str] = field(default_factory=Counter)
    """By kind."""
    places: Counter[str] = field(default_factory=Counter)
    """By operation."""
    seconds_of: Counter[str] = field(default_factory=Counter)
    """Of runs, by the way they were started."""
    runs: int = 0
    exact: int = 0
    """Runs that ended as the untouched one."""
    checked: int = 0
    """Checkpoints that were looked at after a kill."""
    restarts: int = 0
    """Kills before the first checkpoint: there is nothing to resume then."""
    longest_wait: float = 0.0
    """Seconds from the kill of a rank to the end of all other processes."""
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add what has happened elsewhere."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            setattr(self, name, max(own, value) if name == "longest_wait" else own + value)


def table(content: dict[str, Any]) -> str:
    """Return counts by kind, and what came out."""
    kills = content["kills"]
    return "\n".join(
        [
            f"{sum(kills.values()):6} kills in {content['seconds']} s",
            *(f"{kills[kind]:6}   {words}" for kind, words in KINDS.items() if kind in kills),
            f"{content['restarts']:6} of them before there was a checkpoint",
            f"{content['longest_wait']:6.1f} s at most until the other processes had ended",
            f"{content['runs']:6} runs; {content['exact']} ended bit for bit as the untouched one",
            f"{content['checked']:6} checkpoints looked at after kills",
            f"{len(content['failures']):6} failures",
            *content["failures"],
        ]
    )


def matrix(folder: Path, counts: dict[Launcher, int], workers: int, seed: int) -> Tally:
    """Kill runs that often, some at a time; return what came out."""
    kill_ranks.adopt_orphans()
    data, draw, tally = corpus(folder), random.Random(seed), Tally()
    shares: list[list[Share]] = [[] for _ in range(workers)]
    for launcher, count in counts.items():
        if not count:
            continue
        untouched = Untouched(launcher, folder / launcher, data)
        plans = spread(untouched.operations(), count // 2, draw) if count > 1 else []
        for worker, share in enumerate(shares):
            kills = len(range(worker, count, workers))
            share.append(Share(untouched, plans[worker::workers], kills))
    # Each of them forks the processes it kills.
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        seeds = [draw.random() for _ in shares]
        folders = [folder / f"worker-{worker}" for worker in range(workers)]
        for part in pool.map(_killed, shares, folders, seeds):
            tally.add(part)
    return tally


def _killed(shares: list[Share], folder: Path, seed: float) -> Tally:
    """Do one worker's share."""
    kill_ranks.adopt_orphans()
    folder.mkdir()
    tally, draw = Tally(), random.Random(seed)
    for share in shares:
        trials = Trials(share.untouched, folder, draw)
        start = time.perf_counter()
        for plan in share.plans:
            trials.run(plan)
        while (left := share.kills - trials.tally.kills.total()) > 0 and not trials.tally.failures:
            trials.run([None] * min(left, 2))
        trials.tally.seconds_of[share.untouched.launcher] = round(time.perf_counter() - start)
        tally.add(trials.tally)
    return tally


def spread(operations: list[Operations], count: int, draw: random.Random) -> list[Plan]:
    """Return kills of runs, and of their resumed parts, over the operations of all ranks in turn.

    They lie at equal distances over all operations, and files are cut off anywhere.
    """
    of_ranks = [
        [
            [moment and Kill(Victim((rank,)), moment) for moment in planned]
            for planned in _spread(found, len(range(rank, count, len(operations))), draw)
        ]
        for rank, found in enumerate(operations)
    ]
    return [plan for plans in zip_longest(*of_ranks) for plan in plans if plan is not None]


def _spread(
    found: Operations, count: int, draw: random.Random
) -> list[tuple[Moment, Moment | None]]:
    fifth = count // 5
    torn = [
        Moment("save", first.occurrence, first.number, "torn", draw.randrange(1, size), name)
        for (_, name), (first, size) in torn_files(found.saves).items()
        for _ in range(fifth)
    ]
    first = [*_thinned(moments(found.saves), count - 2 * fifth), *draw.sample(torn, fifth)]
    # Killed at its first save a run has nothing to resume from: those are killed at any time.
    first.sort(key=lambda moment: moment.occurrence == 1)
    second = [*_thinned(moments(found.set_up), fifth), *[None] * (len(first) - fifth)]
    return list(zip(first, second, strict=True))


def _thinned(found: list[Moment], count: int) -> list[Moment]:
    return [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]


@dataclass(frozen=True)
class Operations:
    """What a rank asks of files."""

    saves: list[Operation]
    """In all saves of a run."""
    set_up: list[Operation]
    """In the set-up of a resume."""


class Untouched:
    """A run that is not killed."""

    def __init__(self, launcher: Launcher, folder: Path, data: Path):
        folder.mkdir()
        self.launcher: Launcher = launcher
        self.data, self.run, self._part = data, folder / "whole", folder / "part"
        self._output = folder / "output"
        # All checkpoints of it are kept: what others save is held against them.
        self.seconds = self._process(launcher, self.run, "--checkpoint.keep", "99").seconds

    def operations(self) -> list[Operations]:
        """Return the operations of each rank."""
        launcher: Launcher = "ranks" if self.launcher == "torchrun" else self.launcher
        recorded = self._part / "checkpoints"
        straight = self._process(launcher, self._part, recorded=recorded)
        shutil.rmtree(self._part)
        at_third_save = Kill(Victim(), Moment("save", 3, 1, "before"))
        self._process(launcher, self._part, kill=at_third_save)
        resumed = self._process(launcher, self._part, "--resume", recorded=recorded)
        found = [
            [[Operation(**one) for one in json.loads(line)] for line in done.message.splitlines()]
            for done in (straight, resumed)
        ]
        return [
            Operations(
                [one for one in saving if one.phase == "save"],
                [one for one in resuming if one.phase == "set-up"],
            )
            for saving, resuming in zip(*found, strict=True)
        ]

    def _process(
        self, launcher: Launcher, out: Path, *more: str, kill: Kill | None = None, **options: Any
    ) -> ProcessResult:
        line = arguments(launcher, self.data, out, *more)
        done = kill_ranks.run(launcher, line, self._output, kill, **options)
        assert (done.code < 0) if kill else (done.code == 0), self._output.read_text()
        return done


@dataclass(frozen=True)
class Share:
    """What one worker does of what is asked."""

    untouched: Untouched
    plans: list[Plan]
    kills: int


def arguments(launcher: Launcher, data: Path, out: Path, *more: str) -> list[str]:
    """Return the command line of a run."""
    ranks = ["--parallel.shard", f"{RANKS}", "--parallel.timeout", f"{TIMEOUT}"]
    more = (*more, *(ranks if launcher != "alone" else []))
    return [*RUN, "--data.path", str(data), "--out", str(out), *more]


class Trials:
    """Runs that are killed, each held against one that is not."""

    def __init__(self, untouched: Untouched, folder: Path, draw: random.Random):
        self.tally = Tally()
        self._draw = draw
        self._launcher: Launcher = untouched.launcher
        self._data = untouched.data
        self._whole, self._seconds = untouched.run, untouched.seconds
        self._output, self._part = folder / "output", folder / "part"
        self._published: list[int] = []

    def run(self, plan: Plan) -> None:
        """Kill one run, resume it each time, and compare."""
        shutil.rmtree(self._part, ignore_errors=True)
        self._published = []
        self.tally.runs += 1
        for planned in plan:
            kill = planned or self._any()
            done = self._process(kill)
            if done.hung:
                self._fail(f"processes did not end, {kill}, {self._said()}")
                return
            if done.code == 0:
                break
            if done.code > 0:
                self._fail(f"exit code {done.code}, {kill}, {self._said()}")
                return
            self._count(kill, done)
            if not self._look():
                return
        else:
            done = self._process()
            if done.code != 0 or done.hung:
                self._fail(f"exit code {done.code} at the end, {self._said()}")
                return
            # Other programs slow this one down; kills are to lie all over a run all the same.
            if self._left() >= 0.5:
                self._seconds = done.seconds / self._left()
        self._compare()

    def _any(self) -> Kill:
        """Return a kill of anyone at any time."""
        victim = self._draw.choice(VICTIMS[self._launcher])
        return Kill(victim, after=self._draw.uniform(0, self._left() * self._seconds))

    def _count(self, kill: Kill, done: ProcessResult) -> None:
        moment = kill.moment
        place = "time" if moment is None else "torn" if moment.limit else moment.phase
        who = {
            "alone": "",
            "ranks": f"{kill.victim.name} ",
            "torchrun": f"torchrun {kill.victim.name} ",
        }[self._launcher]
        self.tally.kills[f"{who}{place}"] += 1
        if moment is not None:
            self.tally.places[f"{who}{moment.phase}: {done.message}"] += 1
        if kill.after is not None and kill.victim.ranks:
            waited = round(done.seconds - kill.after, 1)
            self.tally.longest_wait = max(self.tally.longest_wait, waited)

    def _left(self) -> float:
        """Return the part of a run that is still to be done."""
        return 1 - (self._published[-1] / STEPS if self._published else 0)

    def _process(self, kill: Kill | None = None) -> ProcessResult:
        more = ["--resume"] if self._published else []
        line = arguments(self._launcher, self._data, self._part, *more)
        return kill_ranks.run(self._launcher, line, self._output, kill)

    def _look(self) -> bool:
        """Check what a killed process left."""
        folder, before = self._part / "checkpoints", self._published
        now = self._published = checkpoints.steps(folder)
        for step in now:
            self.tally.checked += 1
            name = f"step-{step:08d}"
            try:
                kept = checkpoints.load(folder / name)
            except CheckpointError as error:
                return self._fail(str(error))
            untouched = checkpoints.load(self._whole / "checkpoints" / name)
            for part in compare_checkpoints(untouched, kept):
                if part.differences:
                    return self._fail(f"{name}, {part.what}: {part.differences[0]}")
        # A checkpoint is there before the next step is written down.
        records = self._part / "metrics.jsonl"
        reached = read_metrics(records)[-1:] if records.exists() else []
        due = {step for last in reached for step in range(EVERY, last["step"], EVERY)}
        expected = sorted(due.union(before))[-KEEP:]
        if lost := [
            step for step in expected if step not in now and sum(s > step for s in now) < KEEP
        ]:
            return self._fail(f"lost: {lost}; left: {now}")
        if not now:
            self.tally.restarts += 1
            shutil.rmtree(self._part, ignore_errors=True)
        return True

    def _compare(self) -> None:
        """Hold a run that came to its end against the untouched one."""
        folder = self._part / "checkpoints"
        names = sorted(path.name for path in folder.iterdir())
        left = [*self._part.glob("*.tmp"), *folder.glob("*.tmp")]
        if names != [f"step-{STEPS - STEPS % EVERY:08d}", f"step-{STEPS:08d}"] or left:
            self._fail(f"left behind: {names}, {left}")
            return
        kept = [
            checkpoints.load(run / "checkpoints" / names[-1]) for run in (self._whole, self._part)
        ]
        parts = [*compare_checkpoints(*kept), compare_metrics(self._whole, self._part)]
        wrong = [f"{part.what}: {difference}" for part in parts for difference in part.differences]
        if wrong:
            self._fail(wrong[0])
        else:
            self.tally.exact += 1

    def _fail(self, why: str) -> bool:
        self.tally.failures.append(f"{self._launcher}, run {self.tally.runs}: {why}")
        return False

    def _said(self) -> str:
        return self._output.read_text()[-2000:]


def corpus(folder: Path) -> Path:
    """Prepare some lines of text, byte by byte."""
    source = folder / "text"
    source.mkdir()
    for index in range(40):
        lines = [f"{index} plus {n} is {index + n}, and not {index * n}." for n in range(20)]
        (source / f"{index:02d}.txt").write_text("\n".join(lines))
    config = PrepareConfig(
        sources=(str(source),), out=folder / "data", vocab_size=257, valid_fraction=0.2
    )
    prepare(config)
    return folder / "data"


if __name__ == "__main__":
    main()

"""Kill `lrm train` again and again, resume it, and compare with a run that nobody touched.

Half of the kills are at file operations of a save or of a resume, before, after and within them,
evenly spread; half at random times. After each kill, every checkpoint that is there must load and
be the one an untouched run saved at that step, and none may have been lost. In the end weights,
optimizer, counters and metrics must be the same bit for bit.

python benchmarks/kill_matrix.py --kills 200 --out results/kill-matrix.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo
from kill_moments import Moment, Operation, kill_at, moments, record, torn_files

# This and what torch loads when it is first used: imported before the fork, not after each.
import learnable_multipliers.cli.train  # noqa: F401
from learnable_multipliers.cli import main as lrm
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
KINDS = {
    "save": "at a file operation of a save",
    "torn": "within a file of a checkpoint",
    "set-up": "at a file operation of a resume",
    "time": "at a random time",
}
Tell = Callable[[str], None]
"""A word from a process to its parent."""


def main() -> None:
    """Print a table, and write what it is made of."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tally = matrix(Path(folder), options.kills, random.Random(options.seed))
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
    runs: int = 0
    exact: int = 0
    """Runs that ended as the untouched one."""
    checked: int = 0
    """Checkpoints that were looked at after a kill."""
    restarts: int = 0
    """Kills before the first checkpoint: there is nothing to resume then."""
    failures: list[str] = field(default_factory=list)


def table(content: dict[str, Any]) -> str:
    """Return counts by kind, and what came out."""
    kills = content["kills"]
    return "\n".join(
        [
            f"{sum(kills.values()):6} kills in {content['seconds']} s",
            *(f"{kills.get(kind, 0):6}   {words}" for kind, words in KINDS.items()),
            f"{content['restarts']:6} of them before there was a checkpoint",
            f"{content['runs']:6} runs; {content['exact']} ended bit for bit as the untouched one",
            f"{content['checked']:6} checkpoints looked at after kills",
            f"{len(content['failures']):6} failures",
            *content["failures"],
        ]
    )


def matrix(folder: Path, kills: int, draw: random.Random) -> Tally:
    """Kill that often; return what came out."""
    trials = Trials(folder, draw)
    for planned in spread(*trials.operations(), kills // 2, draw):
        trials.run(*planned)
    while (left := kills - trials.tally.kills.total()) > 0 and not trials.tally.failures:
        trials.run(*[None] * min(left, 2))
    return trials.tally


def spread(
    saves: list[Operation], set_up: list[Operation], count: int, draw: random.Random
) -> list[tuple[Moment, Moment | None]]:
    """Return moments for runs to be killed at, and again when they are resumed; None is any time.

    They lie at equal distances over all operations, and files are cut off anywhere.
    """
    fifth = count // 5
    torn = [
        Moment("save", first.occurrence, first.number, "torn", draw.randrange(1, size), name)
        for (_, name), (first, size) in torn_files(saves).items()
        for _ in range(fifth)
    ]
    first = [*_thinned(moments(saves), count - 2 * fifth), *draw.sample(torn, fifth)]
    # Killed at its first save a run has nothing to resume from: those are killed at any time.
    first.sort(key=lambda moment: moment.occurrence == 1)
    second = [*_thinned(moments(set_up), fifth), *[None] * (len(first) - fifth)]
    return list(zip(first, second, strict=True))


def _thinned(found: list[Moment], count: int) -> list[Moment]:
    return [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]


class Trials:
    """Runs that are killed, each held against one that is not."""

    def __init__(self, folder: Path, draw: random.Random):
        self.tally = Tally()
        self._draw = draw
        self._output, self._data = folder / "output", corpus(folder)
        self._whole, self._part = folder / "whole", folder / "part"
        self._published: list[int] = []
        # All checkpoints of it are kept: what others save is held against them.
        done = self._process(self._whole, "--checkpoint.keep", "99")
        assert done.code == 0, self._said()
        self._seconds = done.seconds
        """What a run takes."""

    def operations(self) -> tuple[list[Operation], list[Operation]]:
        """Return the operations of all saves of a run, and those of the set-up of a resume."""
        folder = self._part / "checkpoints"
        at_third_save = Moment("save", 3, 1, "before")
        found: list[list[Operation]] = []
        for stop in (None, at_third_save):
            shutil.rmtree(self._part, ignore_errors=True)
            if stop is not None:
                self._process(self._part, at=stop)
            more = [] if stop is None else ["--resume"]
            done = self._process(self._part, *more, recorded=folder)
            assert done.code == 0, self._said()
            found.append([Operation(**one) for one in json.loads(done.told)])
        straight, resumed = found
        saves = [one for one in straight if one.phase == "save"]
        return saves, [one for one in resumed if one.phase == "set-up"]

    def run(self, *planned: Moment | None) -> None:
        """Kill one run at these moments, one after the other, None being any; resume; compare."""
        shutil.rmtree(self._part, ignore_errors=True)
        self._published = []
        self.tally.runs += 1
        for moment in planned:
            longest = self._left() * self._seconds
            after = self._draw.uniform(0, longest) if moment is None else None
            done = self._process(self._part, *self._resume(), at=moment, after=after)
            if done.code == 0:
                break
            if done.code > 0:
                self._fail(f"exit code {done.code}, {self._said()}")
                return
            kind = "time" if moment is None else "torn" if moment.limit else moment.phase
            self.tally.kills[kind] += 1
            if moment is not None:
                self.tally.places[f"{moment.phase}: {done.told}"] += 1
            if not self._look():
                return
        else:
            done = self._process(self._part, *self._resume())
            if done.code != 0:
                self._fail(f"exit code {done.code} at the end, {self._said()}")
                return
            # Other programs slow this one down; kills are to lie all over a run all the same.
            if self._left() >= 0.5:
                self._seconds = done.seconds / self._left()
        self._compare()

    def _left(self) -> float:
        """Return the part of a run that is still to be done."""
        return 1 - (self._published[-1] / STEPS if self._published else 0)

    def _resume(self) -> list[str]:
        return ["--resume"] if self._published else []

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
        wrong = [f"{part.what}: {told}" for part in parts for told in part.differences]
        if wrong:
            self._fail(wrong[0])
        else:
            self.tally.exact += 1

    def _fail(self, why: str) -> bool:
        self.tally.failures.append(f"run {self.tally.runs}: {why}")
        return False

    def _said(self) -> str:
        return self._output.read_text()[-2000:]

    def _process(
        self,
        out: Path,
        *more: str,
        at: Moment | None = None,
        after: float | None = None,
        recorded: Path | None = None,
    ) -> Ended:
        line = [*RUN, "--data.path", str(self._data), "--out", str(out), *more]

        def prepared(tell: Tell) -> Callable[[], None]:
            if at is not None:
                kill_at(at, tell)
            found: list[Operation] = []
            if recorded is not None:
                record(found, recorded)
            return lambda: tell(json.dumps([asdict(one) for one in found]))

        self._output.write_text("")
        return process(line, self._output, prepared, after)


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Less than 0: by that signal."""
    told: str
    seconds: float


def process(
    arguments: list[str],
    output: Path,
    prepared: Callable[[Tell], Callable[[], None]],
    kill_after: float | None,
) -> Ended:
    """Run `lrm` in a process of its own, killed after some seconds unless it ended before."""
    reader, writer = os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _become(arguments, output, prepared, lambda text: _write(writer, text))
    os.close(writer)
    # The end of the process is the end of the pipe.
    if kill_after is not None and not select.select([reader], [], [], kill_after)[0]:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as file:
        told = file.read()
    status = os.waitpid(child, 0)[1]
    return Ended(os.waitstatus_to_exitcode(status), told, time.perf_counter() - start)


def _write(descriptor: int, text: str) -> None:
    left = text.encode()
    while left:
        left = left[os.write(descriptor, left) :]


def _become(
    arguments: list[str],
    output: Path,
    prepared: Callable[[Tell], Callable[[], None]],
    tell: Tell,
) -> NoReturn:
    """Be the command, from here to the end of the process."""
    code: object = 70
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        sys.argv = ["lrm", *arguments]
        finish = prepared(tell)
        lrm(arguments)
        finish()
        code = 0
    except SystemExit as stop:
        code = stop.code
        print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


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

"""Fuzz `lrm`: change valid command lines and valid files, and judge how each command ends.

A command must succeed, or refuse in one line with an exit code of its own. Tracebacks, crashes,
hangs, half-written files and changed content that is accepted silently are failures. A case is a
function of the seed and its number, so `--case` repeats one.

python benchmarks/fuzz.py --cases 5000 --seed 1 --out results/fuzz.json
python benchmarks/fuzz.py --seed 1 --case 17
"""

from __future__ import annotations

import os

# Set before the imports: processes are forked below, and threads do not survive that.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "MPLBACKEND": "agg",
}

import argparse
import gc
import json
import random
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

# What commands import when they need it.
import torch.utils.tensorboard
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401
from fuzz_inputs import INPUTS, SMALL, VALID, Input, make_inputs, write_library
from fuzz_mutations import (
    BYTES,
    JSON,
    PLACES,
    Change,
    change_words,
    json_line,
    options,
    tensor_header,
)
from fuzz_sandbox import Ended, copy_inputs, may_drop_privileges, prepare_process, remove
from fuzz_sandbox import run as run_confined
from fuzz_verdicts import Files, Verdict, judge, judge_content, mentions, outcome, snapshot

from learnable_multipliers.cli import COMMANDS, _load
from learnable_multipliers.cli import main as lrm

WORKERS = 2
FILE_SHARE = 0.6
"""Of cases: those that change a file; the others change the command line."""


@dataclass(frozen=True)
class Case:
    """A valid command with one change."""

    valid: str
    """Name of the command in VALID."""
    words: list[str]
    mutation: str
    file: str | None = None
    """Name of the changed file in INPUTS; without one the words are changed."""
    resealed: bool = False
    """Checksums fit the changed content."""


@dataclass(frozen=True)
class Result:
    """A case and how it ended."""

    number: int
    case: Case
    verdict: Verdict
    ended: Ended


def make_case(seed: int, number: int) -> tuple[Case, Callable[[Path], None]]:
    """Return a case, and what changes the files before it."""
    draw = random.Random(f"{seed}-{number}")
    if draw.random() < FILE_SHARE:
        name = draw.choice([*INPUTS])
        file = INPUTS[name]
        valid = draw.choice(file.read_by)
        mutation, change = draw.choice(_changes(file))
        resealed = file.reseal is not None and mutation not in PLACES and draw.random() < 0.3
        case = Case(valid, [*VALID[valid].words], mutation, name, resealed)
        return case, partial(_change_file, file, change, resealed, draw)
    valid = draw.choices([*VALID], [one.weight for one in VALID.values()])[0]
    template = VALID[valid]
    first = len(template.command.split())
    mutation, words = change_words([*template.words], first, options(template.config), draw)
    return Case(valid, words, mutation), lambda here: None


def _changes(file: Input) -> list[tuple[str, Change | Callable[[Path], None]]]:
    """Return the changes that a file of a format can have; half of them know the format."""
    known = {
        "bytes": {},
        "json": JSON,
        "json lines": {name: json_line(change) for name, change in JSON.items()},
        "tensors": {name: tensor_header(change) for name, change in JSON.items()},
    }[file.format]
    others = {} if file.rule == "other input" else {"swapped with another file": _swap_files}
    return [*known.items(), *known.items(), *BYTES.items(), *PLACES.items(), *others.items()]


def _swap_files(path: Path) -> None:
    """Exchange a file with the one that lies nearest to it."""
    others = sorted(other for other in path.parent.iterdir() if other.is_file() and other != path)
    other = others[0]
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _change_file(file: Input, change: Any, resealed: bool, draw: random.Random, here: Path) -> None:
    path = here / file.path
    if change in PLACES.values() or change is _swap_files:
        change(path)
        return
    content = path.read_bytes()
    # A change may leave everything as it was, zeros in place of zeros.
    for _ in range(20):
        changed = change(content, draw)
        if changed != content:
            break
    path.write_bytes(changed)
    if resealed and file.reseal is not None:
        file.reseal(here, path)


class Untouched(NamedTuple):
    """What a command comes to on unchanged inputs."""

    outcome: Any
    mentions: dict[str, int]
    """How often it names each file."""


class Fuzzer:
    """Valid inputs, what commands make of them, and cases that run on copies."""

    def __init__(self, folder: Path):
        self._folder, self._inputs = folder, folder / "inputs"
        torch.set_num_threads(1)
        for command in COMMANDS:
            _load(command)
        self._as_nobody = may_drop_privileges()
        folder.chmod(0o755)
        write_library(folder / "library")
        prepare_process(SMALL, folder / "library")
        make_inputs(self._inputs, self._make)
        self._fixture = snapshot(self._inputs / "here")
        with self._sandbox("first") as here:
            _warm_up(here)
        self._untouched: Mapping[str, Untouched] = {}

    def _make(self, words: Sequence[str], here: Path) -> None:
        ended = run_confined(words, here, as_nobody=False)
        assert ended.code == 0, f"{shlex.join(words)}: {ended.stderr or ended.stdout}"

    def learn(self, known: Mapping[str, Untouched]) -> None:
        """Take what valid commands come to on unchanged inputs."""
        self._untouched = known

    def run_untouched(self, name: str) -> Untouched:
        """Run a valid command on unchanged inputs."""
        with self._sandbox(f"untouched-{name}") as here:
            before = snapshot(here)
            ended = run_confined(VALID[name].words, here, as_nobody=self._as_nobody)
            after = snapshot(here)
        assert ended.code == 0, f"{shlex.join(VALID[name].words)}: {ended.stderr or ended.stdout}"
        verdict = judge(VALID[name].words, VALID[name], ended, before, after)
        assert not verdict.failed, f"{name}: {verdict}"
        named = {file: mentions(ended, before, after, one.path) for file, one in INPUTS.items()}
        return Untouched(outcome(VALID[name], ended, self._fixture, before, after), named)

    def run(self, number: int, case: Case, change: Callable[[Path], None]) -> Result:
        """Run one case, after a change of the files in its folder."""
        valid = VALID[case.valid]
        if os.geteuid() == 0 and not self._as_nobody:
            # Root could replace devices, and write anywhere.
            words = [f"nowhere{word}" if word.startswith("/") else word for word in case.words]
            case = replace(case, words=words)
        with self._sandbox(f"case-{number}") as here:
            change(here)
            before = snapshot(here)
            long = partial(_makes_progress, case, here, before)
            ended = run_confined(case.words, here, as_nobody=self._as_nobody, may_be_long=long)
            after = snapshot(here)
        verdict = judge(case.words, valid, ended, before, after)
        if not verdict.failed and case.file is not None and not case.resealed:
            file = INPUTS[case.file]
            known = self._untouched[case.valid]
            seen = known.outcome, known.mentions[case.file]
            found = judge_content(file, valid, ended, self._fixture, before, after, seen)
            verdict = found or verdict
        return Result(number, case, verdict, ended)

    @contextmanager
    def _sandbox(self, name: str) -> Iterator[Path]:
        target = self._folder / name.replace(" ", "-")
        try:
            yield copy_inputs(self._inputs, target, as_nobody=self._as_nobody)
        finally:
            remove(target)


def _makes_progress(case: Case, here: Path, before: Files) -> bool:
    """Return whether a command may go on for long: a run that logs steps, a long simulation."""
    if VALID[case.valid].command == "simulate":
        return "--steps" in case.words
    logs = (
        path for path in here.rglob("metrics.jsonl") if path.is_file() and not path.is_symlink()
    )
    known = {log: before.get(str(log.relative_to(here)), b"") for log in logs}
    return any(log.stat().st_size not in (0, len(content)) for log, content in known.items())


_fuzzer: Fuzzer | None = None
"""Inherited by the workers."""


def _run_untouched(name: str) -> Untouched:
    assert _fuzzer is not None
    return _fuzzer.run_untouched(name)


def _run_case(seed: int, number: int) -> Result:
    assert _fuzzer is not None
    return _fuzzer.run(number, *make_case(seed, number))


def series(seed: int, numbers: Iterable[int], folder: Path) -> list[Result]:
    """Run cases, two at a time."""
    global _fuzzer
    _fuzzer = Fuzzer(folder)
    numbers = [*numbers]
    needed = sorted({make_case(seed, number)[0].valid for number in numbers})
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        _fuzzer.learn(dict(zip(needed, pool.map(_run_untouched, needed), strict=True)))
    results = []
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        for result in pool.map(partial(_run_case, seed), numbers):
            results.append(result)
            if result.verdict.failed:
                print(described(result), file=sys.stderr, flush=True)
    gc.unfreeze()
    return results


def _warm_up(here: Path) -> None:
    """Run some commands in this process, for what libraries set up when they are first used."""
    before = Path.cwd()
    os.chdir(here)
    with redirect_stdout(StringIO()):
        for name in ("train", "report", "symmetries"):
            lrm([*VALID[name].words])
    os.chdir(before)
    # A collection would write to every object, and so copy the memory that processes share.
    gc.collect()
    gc.freeze()


# -- results -----------------------------------------------------------------------------------


def summary(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Count cases by what was changed and how they ended."""
    return {
        "torch": torch.__version__,
        "cases": len(results),
        "seconds": round(seconds),
        "files_changed": sum(result.case.file is not None for result in results),
        "verdicts": Counter(result.verdict.kind for result in results),
        "commands": Counter(VALID[result.case.valid].command for result in results),
        "files": Counter(result.case.file for result in results if result.case.file),
        "mutations": Counter(result.case.mutation for result in results),
        "slowest": round(max((result.ended.seconds for result in results), default=0), 1),
        "failures": [described(result) for result in results if result.verdict.failed],
    }


def described(result: Result) -> str:
    """Return a case and its verdict in one line."""
    case = result.case
    changed = f"{case.file or 'words'}, {case.mutation}{', resealed' * case.resealed}"
    kind, why = result.verdict
    return f"case {result.number}: {kind}: {why[:200]} ({changed}: lrm {shown(case.words)})"


def table(content: dict[str, Any]) -> str:
    """Return the counts as text."""
    lines = [f"{content['cases']:6} cases in {content['seconds']} s"]
    for title in ("verdicts", "commands", "files", "mutations"):
        lines.append(f"{title}:")
        lines += [f"{count:6}   {name}" for name, count in sorted(content[title].items())]
    return "\n".join([*lines, f"{len(content['failures']):6} failures", *content["failures"]])


def shown(words: Sequence[str]) -> str:
    """Return a command line to read: without the settings of the small run, long words cut."""
    text = shlex.join(word if len(word) < 60 else f"{word[:20]}..." for word in words)
    for setting in re.findall(r"--\S+(?: [^-]\S*)?", " ".join(SMALL)):
        text = re.sub(rf" {re.escape(setting)}(?= |$)", "", text, count=1)
    return ascii(text)[1:-1]


def main() -> None:
    """Print a table, and write what it is made of."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, nargs="*", help="run these cases, and show them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    numbers = range(options.cases) if options.case is None else options.case
    with tempfile.TemporaryDirectory() as folder:
        results = series(options.seed, numbers, Path(folder))
    for result in results if options.case is not None else ():
        print(f"case {result.number}: {result.case.file}, {result.case.mutation}")
        print(f"lrm {ascii(shlex.join(result.case.words))[1:-1]}")
        print(f"exit code {result.ended.code} after {result.ended.seconds:.2f} s")
        print(f"{result.ended.stdout}\n{result.ended.stderr}\n{result.verdict}\n")
    content = summary(results, time.perf_counter() - start)
    print(table(content))
    if options.out:
        options.out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    sys.exit(bool(content["failures"]))


if __name__ == "__main__":
    main()

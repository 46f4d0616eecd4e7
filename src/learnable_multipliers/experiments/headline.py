"""The headline: multipliers against a tuned baseline and the optimizers of other papers.

The protocol is written down in docs/headline.md. Here it is as a program: every stage follows from
the records of the stages before it, so the same command goes on until the comparison is complete.
All tuning is at half the length, with one seed and by one rule (`search`); what is reported are
runs of other seeds at full length, on text that tuning did not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

from learnable_multipliers.experiments import headline_report, table
from learnable_multipliers.experiments.claim import BySeed, Claim
from learnable_multipliers.experiments.headline_arms import (
    AWARE,
    KINDS,
    PLAIN,
    RIVALS,
    SCALAR,
    SCALES,
    VARIED,
    VECTOR,
    Arm,
    Family,
    Kind,
    Settings,
    baseline_axes,
    combinable,
    combination,
    configured,
    expected,
    shape,
)
from learnable_multipliers.experiments.plot import Plot, Table
from learnable_multipliers.experiments.presets import with_optimizer
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run
from learnable_multipliers.experiments.search import Point, Search, best
from learnable_multipliers.experiments.variations import VARIATIONS, varied

TITLE = "Against a tuned baseline and other papers"
FIGURE = "not in the paper"
CLAIMS: tuple[Claim, ...] = ()
BENCHMARKS = ("lambada", "blimp", "arc_easy", "sciq", "piqa", "openbookqa", "winogrande")
"""Those that small models can answer; reported runs are scored on them."""
GPU_JOBS = 1
"""Runs at a time: more gain nothing at this size, and times are compared."""
VARIATION_SEEDS = (6, 7, 8)
"""Neither that of the tuning nor those of the report."""


def runs(preset: Preset) -> list[Run]:
    """Return nothing: even the first runs depend on records, of those that came before."""
    return []


def follow_up(preset: Preset, records: Mapping[str, Record]) -> list[Run]:
    """Return all runs up to where the records end, and those that come next."""
    return [] if preset == "paper" else list(_Program(preset, records).stages())


class _Program:
    """The stages of the protocol, each complete before the next."""

    def __init__(self, preset: Preset, records: Mapping[str, Record]):
        self._preset: Preset = preset
        self._records = records
        self._scale = SCALES[preset]
        self._baselines: dict[tuple[Family, Kind], Settings] = {}
        """Settings that all arms of a model and an optimizer start from."""
        self._tuned: dict[tuple[Family, Kind, str], Settings] = {}
        """Best settings of the arms whose tuning has ended."""
        self._losses: dict[tuple[Family, Kind, str], float] = {}
        """Loss of their best trial."""
        self._missing = False
        self._yielded: set[str] = set()

    def stages(self) -> Iterator[Run]:
        """Yield the runs, stage after stage."""
        for stage in self._in_order():
            for run in stage:
                self._missing |= run.key not in self._records
                if run.key not in self._yielded:
                    self._yielded.add(run.key)
                    yield run
            if self._missing:
                return

    def _in_order(self) -> Iterator[Iterator[Run]]:
        """Yield the stages: each reads what those before it have found."""
        yield chain.from_iterable(self._baseline("llama", kind) for kind in KINDS)
        for kind in KINDS:
            yield self._compared("llama", kind, (SCALAR, VECTOR), self._scale.seeds)
        yield self._shorter("muon")
        yield self._baseline("hybrid", "muon")
        yield self._compared("hybrid", "muon", (VECTOR,), self._scale.seeds)
        yield self._varied()
        yield self._others("muon")
        yield self._combined("muon")
        yield self._baseline("hybrid", "adamw")
        yield self._compared("hybrid", "adamw", (VECTOR,), self._scale.seeds)
        yield self._shorter("adamw")
        yield self._others("adamw")
        yield self._combined("adamw")
        yield self._longer()

    # -- stages --------------------------------------------------------------------------------

    def _baseline(self, family: Family, kind: Kind) -> Iterator[Run]:
        """(a) Tune plain runs, with settings that the arms take over.

        What is tuned with the Llama alone the hybrid has from there.
        """
        axes, given = baseline_axes(family, kind), {}
        if family == "hybrid":
            own = {axis.name for axis in axes}
            tuned = self._baselines["llama", kind]
            given = {name: value for name, value in tuned.items() if name not in own}
        trials = self._scale.baseline_trials if family == "llama" else self._scale.trials
        yield from self._search(family, kind, PLAIN, Search(axes, trials), given)
        if (family, kind, PLAIN.name) in self._tuned:
            self._baselines[family, kind] = self._tuned[family, kind, PLAIN.name]

    def _compared(
        self, family: Family, kind: Kind, arms: Sequence[Arm], seeds: Sequence[int]
    ) -> Iterator[Run]:
        """(b, c) Tune arms, then train them and the baseline with the seeds of the report.

        Plain is tuned once more as they are, from the same start.
        """
        yield from self._tune(family, kind, (PLAIN, *arms))
        if not self._missing:
            yield from self._finals(family, kind, (PLAIN, *arms), seeds)

    def _varied(self) -> Iterator[Run]:
        """Vary vector multipliers at half the length; train what is better, together, at 1x.

        Tried with Muon, whose seeds scatter less (`loss_difference`), reported with both. A
        variation that is worse with one seed is not tried with the next.
        """
        reference = {seed: self._variation(VECTOR, seed) for seed in VARIATION_SEEDS}
        yield from reference.values()
        gains: dict[str, list[float]] = {name: [] for name in VARIATIONS}
        for name, found in gains.items():
            for seed, vector in reference.items():
                run = self._variation(replace(VECTOR, name=name, variations=(name,)), seed)
                yield run
                pair = [self._records[r.key] for r in (vector, run) if r.key in self._records]
                if len(pair) == 2:
                    found.append(table.loss(pair[0]) - table.loss(pair[1]))
                if len(pair) < 2 or not found[-1] > 0:
                    break
        seeds = len(VARIATION_SEEDS)
        better = [name for name in gains if headline_report.is_kept(gains[name], seeds)]
        better.sort(key=lambda name: -fmean(gains[name]))
        if not better or self._missing:
            return
        for kind in KINDS:
            self._tuned["llama", kind, VARIED.name] = self._tuned["llama", kind, VECTOR.name]
            arm = replace(VARIED, variations=tuple(better))
            yield from self._finals("llama", kind, (arm,), self._scale.seeds)

    def _variation(self, arm: Arm, seed: int) -> Run:
        values = self._tuned["llama", "muon", VECTOR.name]
        return self._run("variation", "llama", "muon", arm, values, seed, 0.5)

    def _others(self, kind: Kind) -> Iterator[Run]:
        """(d) The symmetry-aware placement and the rivals."""
        yield from self._tune("llama", kind, (AWARE, *RIVALS[kind]))
        if not self._missing:
            arms = (AWARE, *RIVALS[kind])
            yield from self._finals("llama", kind, arms, self._scale.few_seeds)

    def _combined(self, kind: Kind) -> Iterator[Run]:
        """(d) Vector multipliers on top of the best rival that has none of its own."""
        rival = self._best("llama", kind, combinable(kind))
        arm = combination(rival)
        settings = self._tuned["llama", kind, rival.name]
        search = Search(arm.axes(kind, settings), self._scale.trials)
        yield from self._search("llama", kind, arm, search, settings)
        if not self._missing:
            yield from self._finals("llama", kind, (arm,), self._scale.few_seeds)

    def _shorter(self, kind: Kind) -> Iterator[Run]:
        """The best multiplier arm at 0.8x and 0.9x: where does it reach plain's final loss?"""
        arm = self._best("llama", kind, (SCALAR, VECTOR))
        for part in (0.8, 0.9):
            yield from self._finals("llama", kind, (arm,), self._scale.seeds, part)

    def _longer(self) -> Iterator[Run]:
        """(e) Plain and the best multiplier arm at 1.64x (360M tokens), also twice as large."""
        for size in (1, 2):
            for kind in KINDS:
                arms = PLAIN, self._best("llama", kind, (SCALAR, VECTOR))
                yield from self._finals("llama", kind, arms, self._scale.few_seeds, 1.64, size)

    # -- parts of stages -----------------------------------------------------------------------

    def _tune(self, family: Family, kind: Kind, arms: Sequence[Arm]) -> Iterator[Run]:
        """Tune arms from the baseline, each for itself."""
        start = self._baselines[family, kind]
        for arm in arms:
            axes = arm.axes(kind, start)
            is_rival = arm in RIVALS[kind] and len(axes) < 3
            trials = self._scale.rival_trials if is_rival else self._scale.trials
            yield from self._search(family, kind, arm, Search(axes, trials), start)

    def _search(
        self, family: Family, kind: Kind, arm: Arm, search: Search, given: Settings
    ) -> Iterator[Run]:
        """Yield the trials of an arm; its best settings are known once there is no next one."""
        losses: dict[Point, float] = {}
        while (point := search.next(losses)) is not None:
            values = {**given, **search.values(point)}
            run = self._run("tuning", family, kind, arm, values, 0, 0.5)
            yield run
            if run.key not in self._records:
                return
            losses[point] = table.loss(self._records[run.key])
        point = best(losses)
        self._tuned[family, kind, arm.name] = {**given, **search.values(point)}
        self._losses[family, kind, arm.name] = losses[point]

    def _finals(
        self,
        family: Family,
        kind: Kind,
        arms: Sequence[Arm],
        seeds: Sequence[int],
        part: float = 1.0,
        size: int = 1,
    ) -> Iterator[Run]:
        """Yield runs of the report, whole seeds together."""
        for seed in seeds:
            for arm in arms:
                values = self._tuned[family, kind, arm.name]
                yield self._run("final", family, kind, arm, values, seed, part, size)

    def _run(
        self,
        stage: str,
        family: Family,
        kind: Kind,
        arm: Arm,
        values: Settings,
        seed: int,
        part: float,
        size: int = 1,
    ) -> Run:
        labels = {"stage": stage, "family": family, "optimizer": kind, "arm": arm.name}
        labels |= {"length": part, "size": size, "seed": seed}
        if "rest_lr" in values:
            # Which stands for it.
            values = {name: value for name, value in values.items() if name != "adamw_lr_scale"}
        config = shape(self._preset, family, part, size)
        tuned = configured(with_optimizer(config, kind=kind, **arm.fixed), values)
        tuned = varied(tuned, arm.variations)
        return Run(
            labels=labels | dict(values),
            config=replace(tuned, seed=seed),
            # The table of benchmarks has these alone.
            scored=stage == "final" and (part, size) == (1.0, 1),
        )

    def _best(self, family: Family, kind: Kind, arms: Sequence[Arm]) -> Arm:
        """Return the arm that tuning left with the lowest loss: no run of the report decides."""
        return min(arms, key=lambda arm: self._losses[family, kind, arm.name])


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return nothing: no claim of the paper rests on it."""
    return {}


def tables(records: Sequence[Labelled]) -> list[Table]:
    """Return the comparison, lengths and sizes, and the tuning record."""
    return headline_report.tables(records, expected())


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw loss over time, and the gains of all arms."""
    return headline_report.plot(records)

"""The stages of the headline, each from the records of those before it."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

from learnable_multipliers.experiments import readings
from learnable_multipliers.experiments.headline.arms import (
    KINDS,
    LONGER,
    PLAIN,
    RIVALS,
    SCALAR,
    SCALES,
    SHORTER,
    SYMMETRY_AWARE,
    VARIED,
    VECTOR,
    Arm,
    Settings,
    baseline_axes,
    combinable,
    combination,
    configured,
    num_trials,
    shape,
)
from learnable_multipliers.experiments.headline.gains import is_kept
from learnable_multipliers.experiments.headline.search import Point, Search, best
from learnable_multipliers.experiments.headline.variations import VARIATIONS, varied
from learnable_multipliers.experiments.presets import Family, with_optimizer
from learnable_multipliers.experiments.record import Record
from learnable_multipliers.experiments.run import Preset, Run
from learnable_multipliers.pretrain.optimizer_config import OptimizerKind
from learnable_multipliers.pretrain.trainer.schedule import Schedule

VARIATION_SEEDS = (6, 7, 8)
"""Neither that of the tuning nor those of the report."""
REPEATED: tuple[Family, OptimizerKind] = ("llama", "adamw")
"""The baseline whose two best trials are repeated: others start from it, and its seeds scatter."""
REPEAT_SEEDS = (9, 10)
_FOLLOWED = (PLAIN.name, VECTOR.name, VARIED.name)
"""Arms whose full-length runs are evaluated on the way and scored on benchmarks."""
_EVALUATIONS = 12
_Name = tuple[Family, OptimizerKind, str]
"""Of an arm."""


def follow_up(
    preset: Preset, records: Mapping[str, Record], failed: Container[str] | None = ()
) -> list[Run]:
    """Return all runs up to where the records end, and those that come next.

    Args:
        failed: Keys of runs that will have no record, None for all that have none: their loss
            counts as infinite.
    """
    return [] if preset == "paper" else list(_Program(preset, records, failed).stages())


class _Program:
    """The stages of the protocol, each complete before the next."""

    def __init__(
        self, preset: Preset, records: Mapping[str, Record], failed: Container[str] | None
    ):
        self._preset: Preset = preset
        self._records, self._failed = records, failed
        self._scale = SCALES[preset]
        self._baselines: dict[tuple[Family, OptimizerKind], Settings] = {}
        """Settings that all arms of a model and an optimizer start from."""
        self._tuned: dict[_Name, Settings] = {}
        """Best settings of the arms whose tuning has ended."""
        self._losses: dict[_Name, float] = {}
        """Loss of their best trial; infinite where none has ended well."""
        self._trials: dict[_Name, list[tuple[Settings, float]]] = {}
        self._missing = False
        self._yielded: set[str] = set()

    def stages(self) -> Iterator[Run]:
        """Yield the runs, stage after stage."""
        for stage in self._in_order():
            for run in stage:
                self._missing |= not self._is_over(run)
                if run.key not in self._yielded:
                    self._yielded.add(run.key)
                    yield run
            if self._missing:
                return

    def _in_order(self) -> Iterator[Iterator[Run]]:
        """Yield the stages: each reads the results of those before it."""
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

    def _is_over(self, run: Run) -> bool:
        """Return whether a run has a record, or will have none."""
        return self._failed is None or run.key in self._records or run.key in self._failed

    def _loss(self, run: Run) -> float:
        """Return the loss of a run; infinite if it failed."""
        return readings.loss(self._records[run.key]) if run.key in self._records else math.inf

    # -- stages --------------------------------------------------------------------------------

    def _baseline(self, family: Family, kind: OptimizerKind) -> Iterator[Run]:
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
        name: _Name = family, kind, PLAIN.name
        if name in self._tuned:
            if (family, kind) == REPEATED:
                yield from self._repeated(family, kind)
            self._baselines[family, kind] = self._tuned[name]

    def _repeated(self, family: Family, kind: OptimizerKind) -> Iterator[Run]:
        """(a) Run a search's two best trials with more seeds, and take the better mean."""
        name: _Name = family, kind, PLAIN.name
        first = self._tuned[name], self._losses[name]
        others = [trial for trial in self._trials[name] if trial != first]
        pair = [first, *sorted(others, key=lambda trial: trial[1])[:1]]
        means: list[float] = []
        for values, loss in pair:
            runs = [
                self._run("repeat", family, kind, PLAIN, values, seed, 0.5) for seed in REPEAT_SEEDS
            ]
            yield from runs
            means.append(fmean((loss, *map(self._loss, runs))))
        self._tuned[name], self._losses[name] = pair[means.index(min(means))]

    def _compared(
        self, family: Family, kind: OptimizerKind, arms: Sequence[Arm], seeds: Sequence[int]
    ) -> Iterator[Run]:
        """(b, c) Tune arms, then train them and the baseline with the seeds of the report.

        Plain is tuned once more as they are, from the same start. Where three seeds have chosen its
        settings it stays: one seed would go back to what they have turned down.
        """
        yield from self._tune(family, kind, arms if (family, kind) == REPEATED else (PLAIN, *arms))
        if not self._missing:
            yield from self._finals(family, kind, (PLAIN, *arms), seeds)

    def _varied(self) -> Iterator[Run]:
        """Vary vector multipliers at half the length; train what is better, together, at 1x.

        Tried with Muon, whose seeds scatter less (`loss_difference`). A variation that is worse
        with one seed is not tried with the next. AdamW takes over those that are better, if they
        are better with one seed of its own.
        """
        if not self._is_trainable("llama", "muon", VECTOR):
            return
        reference = {seed: self._variation(VECTOR, seed) for seed in VARIATION_SEEDS}
        yield from reference.values()
        gains: dict[str, list[float]] = {name: [] for name in VARIATIONS}
        for name, differences in gains.items():
            for seed, vector in reference.items():
                run = self._variation(replace(VECTOR, name=name, variations=(name,)), seed)
                yield run
                differences.append(self._gain(vector, run))
                if not differences[-1] > 0:
                    break
        seeds = len(VARIATION_SEEDS)
        better = [name for name in gains if is_kept(gains[name], seeds)]
        better.sort(key=lambda name: -fmean(gains[name]))
        if not better or self._missing:
            return
        arm = replace(VARIED, variations=tuple(better))
        for kind in KINDS:
            if not self._is_trainable("llama", kind, VECTOR):
                continue
            if kind == "adamw":
                # Factors that were chosen with Muon, such as of a decay, may not suit it.
                pair = [self._variation(each, VARIATION_SEEDS[0], kind) for each in (VECTOR, arm)]
                yield from pair
                if not self._gain(*pair) > 0:
                    continue
            self._tuned["llama", kind, VARIED.name] = self._tuned["llama", kind, VECTOR.name]
            self._losses["llama", kind, VARIED.name] = self._losses["llama", kind, VECTOR.name]
            yield from self._finals("llama", kind, (arm,), self._scale.seeds)

    def _variation(self, arm: Arm, seed: int, kind: OptimizerKind = "muon") -> Run:
        values = self._tuned["llama", kind, VECTOR.name]
        return self._run("variation", "llama", kind, arm, values, seed, 0.5)

    def _gain(self, vector: Run, run: Run) -> float:
        """Return what a run gains over one of vector; NaN unless both have a record."""
        if vector.key not in self._records or run.key not in self._records:
            return math.nan
        return self._loss(vector) - self._loss(run)

    def _others(self, kind: OptimizerKind) -> Iterator[Run]:
        """(d) The symmetry-aware placement and the rivals."""
        yield from self._tune("llama", kind, (SYMMETRY_AWARE, *RIVALS[kind]))
        if not self._missing:
            arms = (SYMMETRY_AWARE, *RIVALS[kind])
            yield from self._finals("llama", kind, arms, self._scale.secondary_seeds)

    def _combined(self, kind: OptimizerKind) -> Iterator[Run]:
        """(d) Vector multipliers on top of the best rival that has none of its own.

        Both start from the settings of their own tuning.
        """
        rival = self._best("llama", kind, combinable(kind))
        if not self._is_trainable("llama", kind, rival):
            return
        arm = combination(rival)
        ratio = self._tuned["llama", kind, VECTOR.name]["multiplier_lr_scale"]
        settings = {**self._tuned["llama", kind, rival.name], "multiplier_lr_scale": ratio}
        search = Search(arm.axes(kind, settings), self._scale.trials)
        yield from self._search("llama", kind, arm, search, settings)
        if not self._missing:
            yield from self._finals("llama", kind, (arm,), self._scale.secondary_seeds)

    def _shorter(self, kind: OptimizerKind) -> Iterator[Run]:
        """The best multiplier arm at 0.8x and 0.9x: where does it reach plain's final loss?"""
        arm = self._best("llama", kind, (SCALAR, VECTOR))
        for part in SHORTER:
            yield from self._finals("llama", kind, (arm,), self._scale.seeds, part)

    def _longer(self) -> Iterator[Run]:
        """(e) Plain and the best multiplier arm at 1.64x (360M tokens), also twice as large."""
        for size in (1, 2):
            for kind in KINDS:
                arms = PLAIN, self._best("llama", kind, (SCALAR, VECTOR))
                yield from self._finals(
                    "llama", kind, arms, self._scale.secondary_seeds, LONGER, size
                )

    # -- parts of stages -----------------------------------------------------------------------

    def _tune(self, family: Family, kind: OptimizerKind, arms: Sequence[Arm]) -> Iterator[Run]:
        """Tune arms from the baseline, each for itself."""
        start = self._baselines[family, kind]
        for arm in arms:
            search = Search(arm.axes(kind, start), num_trials(self._scale, kind, arm))
            yield from self._search(family, kind, arm, search, start)

    def _search(
        self, family: Family, kind: OptimizerKind, arm: Arm, search: Search, given: Settings
    ) -> Iterator[Run]:
        """Yield the trials of an arm; its best settings are known once there is no next one.

        A trial that failed is as bad as one that diverged, and the search continues.
        """
        losses: dict[Point, float] = {}
        while (point := search.next(losses)) is not None:
            values = {**given, **search.values(point)}
            run = self._run("tuning", family, kind, arm, values, 0, 0.5)
            yield run
            if not self._is_over(run):
                return
            losses[point] = self._loss(run)
        name: _Name = family, kind, arm.name
        point = best(losses)
        self._trials[name] = [
            ({**given, **search.values(tried)}, loss) for tried, loss in losses.items()
        ]
        self._tuned[name] = {**given, **search.values(point)}
        self._losses[name] = losses[point]

    def _finals(
        self,
        family: Family,
        kind: OptimizerKind,
        arms: Sequence[Arm],
        seeds: Sequence[int],
        part: float = 1.0,
        size: int = 1,
    ) -> Iterator[Run]:
        """Yield runs of the report, whole seeds together, but for arms that cannot be trained."""
        arms = [arm for arm in arms if self._is_trainable(family, kind, arm)]
        for seed in seeds:
            for arm in arms:
                values = self._tuned[family, kind, arm.name]
                yield self._run("final", family, kind, arm, values, seed, part, size)

    def _run(
        self,
        stage: str,
        family: Family,
        kind: OptimizerKind,
        arm: Arm,
        values: Settings,
        seed: int,
        part: float,
        size: int = 1,
    ) -> Run:
        labels = {"stage": stage, "family": family, "optimizer": kind, "arm": arm.name}
        labels |= {"length": part, "size": size, "seed": seed}
        if "adamw_lr" in values:
            # Which stands for it.
            values = {name: value for name, value in values.items() if name != "adamw_lr_scale"}
        config = shape(self._preset, family, part, size)
        followed = stage == "final" and (part, size) == (1.0, 1) and arm.name in _FOLLOWED
        if followed:
            every = max(1, len(Schedule.of_run(config)) // _EVALUATIONS)
            config = replace(config, log=replace(config.log, evaluate_every=every))
        tuned = configured(with_optimizer(config, kind=kind, **arm.fixed), values)
        tuned = varied(tuned, arm.variations)
        return Run(
            labels=labels | dict(values),
            config=replace(tuned, seed=seed),
            scored=followed,
        )

    def _is_trainable(self, family: Family, kind: OptimizerKind, arm: Arm) -> bool:
        """Return whether a trial of an arm has ended with a finite loss."""
        return math.isfinite(self._losses[family, kind, arm.name])

    def _best(self, family: Family, kind: OptimizerKind, arms: Sequence[Arm]) -> Arm:
        """Return the arm that tuning left with the lowest loss: no run of the report decides."""
        return min(arms, key=lambda arm: self._losses[family, kind, arm.name])

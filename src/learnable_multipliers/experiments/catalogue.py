"""All experiments by name, in the order of the paper; modules are imported when they are needed."""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from learnable_multipliers.experiments.claim import BySeed, Claim
from learnable_multipliers.experiments.record import Labelled, Record, labelled
from learnable_multipliers.experiments.run import Preset, Run

_PACKAGE = __name__.rpartition(".")[0]
_ORDER = (
    "projector",
    "mlp_scale",
    "depth_scales",
    "row_norms",
    "symmetry_drift",
    "width_mup",
    "width_scales",
    "grad_clip",
    "head_rows",
    "long_run",
    "log_scale",
    "placement",
    "noise",
    "initialization",
    # Last: its claim needs a sweep that is longer than most experiments.
    "tuning_ablation",
)
MODULES = {name: f"{_PACKAGE}.{name}" for name in _ORDER}
"""Name -> module, of what `all` stands for."""
BEYOND = {"headline": f"{_PACKAGE}.headline"}
"""Those of hours, which must be named."""


class Experiment(Protocol):
    """What the module of an experiment holds."""

    TITLE: str
    FIGURE: str
    CLAIMS: tuple[Claim, ...]

    @staticmethod
    def runs(preset: Preset) -> list[Run]:
        """Return the runs, the most telling first, whole seeds together."""
        ...

    @staticmethod
    def analyse(records: Sequence[Labelled]) -> Mapping[str, BySeed]:
        """Return the statistic of each test, by its name, for each seed that is complete.

        Missing in an experiment without claims.
        """
        ...

    @staticmethod
    def plot(records: Sequence[Labelled]) -> list[Any]:
        """Return the plots that these records allow."""
        ...


def every() -> list[str]:
    """Return the names of all experiments."""
    return [*MODULES, *BEYOND]


def load(name: str) -> Experiment:
    """Return the module of an experiment."""
    return cast("Experiment", importlib.import_module((MODULES | BEYOND)[name]))


def is_adaptive(name: str) -> bool:
    """Return whether some runs of an experiment follow from the records of others."""
    return hasattr(load(name), "follow_up")


def runs_of(
    name: str, preset: Preset, records: Mapping[str, Record], failed: Container[str] | None = ()
) -> list[Run]:
    """Return the runs of an experiment, with those that follow from the records so far.

    A module has the latter in a function `follow_up` of preset, records and failed.

    Args:
        failed: Keys of runs that will have no record: what follows does not wait for them. With
            None these are all runs without a record: failures are not recorded.
    """
    experiment = load(name)
    follow_up = getattr(experiment, "follow_up", None)
    more = [] if follow_up is None else follow_up(preset, records, failed)
    return [*experiment.runs(preset), *more]


def labelled_records(name: str, preset: Preset, records: Mapping[str, Record]) -> list[Labelled]:
    """Return the records of an experiment, also those made after runs that failed."""
    return labelled(runs_of(name, preset, records, failed=None), records)


def benchmarks_of(names: Iterable[str]) -> list[str]:
    """Return the tasks on which experiments score some of their runs."""
    tasks = (task for name in names for task in getattr(load(name), "BENCHMARKS", ()))
    return list(dict.fromkeys(tasks))


def claim_hashes() -> dict[str, str]:
    """Return claim -> hash of its definition, of all experiments.

    A record carries them all: an experiment of later may ask for a run that others were made for.
    """
    return {claim.id: claim.hash for name in every() for claim in load(name).CLAIMS}

"""All experiments by name, in the order of the paper; a module is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from learnable_multipliers.experiments.claim import BySeed, Claim
from learnable_multipliers.experiments.record import Labelled
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
    "tuning_ablation",
    "long_run",
    "log_scale",
    "placement",
    "noise",
    "initialization",
)
MODULES = {name: f"{_PACKAGE}.{name}" for name in _ORDER}
"""Name -> module."""


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
        """Return the statistic of each test, by its name, for each seed that is complete."""
        ...

    @staticmethod
    def plot(records: Sequence[Labelled]) -> list[Any]:
        """Return the plots that these records allow."""
        ...


def load(name: str) -> Experiment:
    """Return the module of an experiment."""
    return cast("Experiment", importlib.import_module(MODULES[name]))


def ledgers(preset: Preset) -> dict[str, dict[str, str]]:
    """Return claim -> hash for every run, by key: of all experiments that would ask for it.

    A run serves each of them, whichever experiment it was trained for.
    """
    found: dict[str, dict[str, str]] = {}
    for name in MODULES:
        experiment = load(name)
        hashes = {claim.id: claim.hash for claim in experiment.CLAIMS}
        for run in experiment.runs(preset):
            found.setdefault(run.key, {}).update(hashes)
    return found

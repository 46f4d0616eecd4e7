"""The headline: multipliers against a tuned baseline and the optimizers of other papers.

The protocol is written down in docs/headline.md. `program` implements it: every stage follows from
the records of the stages before it, so the same command resumes until the comparison is complete.
All tuning is at half the length, with one seed and by one rule (`search`); what is reported are
runs of other seeds at full length, on text that tuning did not see.
"""

from learnable_multipliers.experiments.claim import Claim
from learnable_multipliers.experiments.headline.plots import plot
from learnable_multipliers.experiments.headline.program import follow_up
from learnable_multipliers.experiments.headline.report import tables
from learnable_multipliers.experiments.run import Preset, Run

__all__ = ["BENCHMARKS", "CLAIMS", "FIGURE", "GPU_JOBS", "TITLE"]
__all__ += ["follow_up", "plot", "runs", "tables"]

TITLE = "Against a tuned baseline and other papers"
FIGURE = "not in the paper"
CLAIMS: tuple[Claim, ...] = ()
BENCHMARKS = ("lambada", "blimp", "arc_easy", "sciq", "piqa", "openbookqa", "winogrande")
"""Those that small models can answer; reported runs are scored on them."""
GPU_JOBS = 1
"""Runs at a time: more gain nothing at this size, and times are compared."""


def runs(preset: Preset) -> list[Run]:
    """Return nothing: even the first runs depend on records, of those that came before."""
    return []

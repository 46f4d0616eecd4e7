"""Where multipliers sit: everywhere, without redundancy, or not on the embedding (app. C).

Without redundancy no scale of the model has two multipliers, and the weights of norms are the
columns of the matrices behind them. Frozen norms leave the columns to the matrices themselves, each
its own: a placement that the paper proposes and has not tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from learnable_multipliers.experiments import loss_difference
from learnable_multipliers.experiments.claim import BySeed, Claim
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.loss_difference import SEEDS
from learnable_multipliers.experiments.presets import with_optimizer
from learnable_multipliers.experiments.record import Labelled
from learnable_multipliers.experiments.run import Labels, Preset, Run, with_seeds

TITLE = "Placement of multipliers"
FIGURE = "App. C"
_FULL: Labels = {"arm": "full"}
_LEGEND: dict[str, Labels] = {
    "without redundancy": {"arm": "symmetry-aware"},
    "not on the embedding": {"arm": "no embedding"},
    "columns, frozen norms": {"arm": "columns"},
    "no multipliers": {"arm": "plain"},
}

CLAIMS = (
    Claim(
        id="C19",
        statement="Multipliers without redundancy are slightly worse than row and column "
        "multipliers everywhere, and so is an embedding without multipliers.",
        where="App. C, sec. 4.1",
        tests=(
            loss_difference.hurts("C19.symmetry", "no redundancy minus all multipliers"),
            loss_difference.hurts("C19.embedding", "all but the embedding's minus all multipliers"),
        ),
        note="Columns of the matrices in place of the weights of norms are drawn, not judged: the "
        "paper has not tried them.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return hybrids with each placement, and a plain one."""
    plain = loss_difference.plain(preset, "hybrid")
    full = with_optimizer(plain, placement="full")
    aware = with_optimizer(plain, placement="symmetry-aware")
    arms = {
        "full": full,
        "symmetry-aware": aware,
        "no embedding": with_optimizer(full, rules=(". only=embedding kind=none",)),
        # The placement gives columns to matrices that no learnable norm scales.
        "columns": replace(aware, model=replace(aware.model, freeze_norms=True)),
        "plain": plain,
    }
    return with_seeds([({"arm": arm}, config) for arm, config in arms.items()], SEEDS[preset])


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return what it costs to leave multipliers out."""
    return {
        "C19.symmetry": loss_difference.between(records, {"arm": "symmetry-aware"}, _FULL),
        "C19.embedding": loss_difference.between(records, {"arm": "no embedding"}, _FULL),
    }


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw the loss of each placement against that of all multipliers."""
    return loss_difference.plot(
        records,
        _LEGEND,
        _FULL,
        against="all multipliers",
        title="Loss by placement",
        caption="Mean and range over seeds. The paper finds both left ones slightly worse than "
        "row and column multipliers everywhere, and has not tried columns of the matrices in "
        "place of the weights of norms.",
    )

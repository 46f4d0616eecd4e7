"""Multipliers on the head: columns, rows and columns, or none (sec. 4.4).

The standard head has the weight of the final norm as its columns. Rows added to it scale single
logits; the paper suspects them of fitting the frequencies of tokens in place of features. Without
columns, a fixed number on the logits decides how far features must move.

The number is swept for every head, and each is judged at its own best: in a short run columns that
start at 1 do not get to where the logits want them, so a number that is right from the start would
beat them for that reason alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from learnable_multipliers.experiments import drawing, loss_difference, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.loss_difference import CLEAR, GAIN, SEEDS
from learnable_multipliers.experiments.presets import with_optimizer
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds

TITLE = "Multipliers on the head"
FIGURE = "Sec. 4.4"
SCALES: dict[Preset, tuple[float, ...]] = {
    "cpu": (1.0, 4.0),
    "gpu": (1.0, 4.0, 16.0),
    "paper": (1 / 16, 1 / 4, 1.0),
}
"""Fixed numbers on the logits: Falcon-H1 has 0.04 at a width of 1,024, and less at larger ones."""
_HEADS = {"columns": "columns", "rows": "rows and columns", "none": "neither"}

CLAIMS = (
    Claim(
        id="C12",
        statement="Row multipliers on the head hurt; leaving out its columns too, for a fixed "
        "number on the logits, brings no improvement at any value of it.",
        where="Sec. 4.4",
        tests=(
            loss_difference.hurts("C12.rows", "rows and columns on the head minus columns alone"),
            Test(
                name="C12.fixed",
                what="no multipliers on the head minus columns: held-out loss, nats",
                bound=-CLEAR,
                # Half of what multipliers gain as a whole would be an improvement to speak of.
                opposite=-GAIN / 2,
                effect=GAIN / 2,
            ),
        ),
        note="All other matrices have row and column multipliers. Each head is judged with the "
        "number on the logits that gives it the lowest mean loss over seeds.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return each head with each number on the logits, and a plain run."""
    plain = loss_difference.plain(preset, "llama")
    full = with_optimizer(plain, placement="full")
    heads = {
        "columns": full,
        # From 1: the number stays fixed, and is not what rows start from.
        "rows": with_optimizer(full, rules=(". only=head kind=row init=1",)),
        "none": replace(full, model=replace(full.model, freeze_final_norm=True)),
    }
    arms = [
        (
            {"arm": arm, "scale": scale},
            replace(config, model=replace(config.model, mup_head=scale)),
        )
        for scale in SCALES[preset]
        for arm, config in heads.items()
    ]
    return with_seeds([*arms, ({"arm": "plain"}, plain)], SEEDS[preset])


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return what rows cost, and what leaving out columns costs."""
    columns, rows, none = (_at_best(records, arm) for arm in _HEADS)
    return {
        "C12.rows": readings.paired(loss_difference.of, rows, columns),
        "C12.fixed": readings.paired(loss_difference.of, none, columns),
    }


def _at_best(records: Sequence[Labelled], arm: str) -> Mapping[int, Record]:
    """Return the records of a head, by seed, with its best number on the logits."""
    losses = readings.sweep(records, "scale", readings.loss, arm=arm)
    if not losses:
        return {}
    return readings.by_seed(
        records, arm=arm, scale=min(losses, key=lambda scale: fmean(losses[scale]))
    )


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw the loss of each head over the number on the logits."""
    losses = {
        name: readings.sweep(records, "scale", readings.loss, arm=arm)
        for arm, name in _HEADS.items()
    }
    plots: list[Plot] = []
    with drawing.canvas(
        plots,
        "Loss by what the head carries",
        "Mean and range over seeds; all other matrices have row and column multipliers. The "
        "paper finds that rows hurt, and that a head without multipliers is not better at any "
        "number.",
        x="fixed number on the logits",
        y="held-out loss, nats",
    ) as axes:
        drawing.scan(axes, losses)
        if plain := [readings.loss(one.record) for one in readings.select(records, arm="plain")]:
            drawing.level(axes, fmean(plain), "no multipliers at all")
    return plots

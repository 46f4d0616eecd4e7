"""Gradient clipping with multipliers in and out of the clip norm (sec. 4.3).

A scalar multiplier adds up the gradients of a whole matrix, so its own can be large at the start of
a run. In the clip norm it shrinks the updates of everything else.

Scalars start at the model's fixed factors, as Falcon-H1's would: from 1, none of them is so far off
that its gradient shows in the norm.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from learnable_multipliers.experiments import drawing, loss_difference, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.loss_difference import SEEDS
from learnable_multipliers.experiments.presets import with_optimizer
from learnable_multipliers.experiments.readings import Curve, Number
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Labels, Preset, Run, with_seeds

TITLE = "Multipliers in the clip norm"
FIGURE = "Fig. 6"
EARLY = 0.2
"""Part of the steps that is the start of a run: its warmup, and as many again."""
_HEAD = 40.0
"""Falcon-H1's factor on the logits times the width: 0.039 at 1,024, and as one over it."""
_OUT: Labels = {"arm": "out"}
_IN: Labels = {"arm": "in"}
_PLAIN: Labels = {"arm": "none"}
_ARMS: dict[str, Labels] = {"no multipliers": _PLAIN, "scalars out": _OUT, "scalars in": _IN}

CLAIMS = (
    Claim(
        id="C11",
        statement="Gradients of scalar multipliers are large at the start: counted in the clip "
        "norm they have steps clipped that would not be, and the loss ends higher.",
        where="Sec. 4.3, Fig. 6",
        tests=(
            # The paper's axis goes to 7, with norms well below the threshold of 1 where
            # multipliers are left out.
            Test(
                name="C11.norm",
                what="gradient norm over the first fifth of the steps, scalars in it over scalars "
                "out of it, log of the ratio",
                bound=math.log(2),
                opposite=-0.1,
                effect=math.log(2),
            ),
            Test(
                name="C11.clipped",
                what="share of steps clipped in the first fifth of the run, scalars in the norm "
                "minus scalars out of it",
                bound=0.5,
                opposite=-0.25,
                effect=0.5,
            ),
            # The paper's axis goes from -0.010 to 0.025: about 0.01, and twice that here.
            loss_difference.hurts(
                "C11.loss", "scalars in the clip norm minus scalars out of it", effect=0.02
            ),
        ),
        note="Scalars are on every matrix with the head, start at Falcon-H1's factors on embedding "
        "and logits, and train with the 1e-2 of the paper's MLP experiment; for these runs the "
        "paper gives neither. Matrices train with Muon, whose losses scatter less.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return scalar multipliers out of the norm and in it, and a plain run."""
    plain = loss_difference.plain(preset, "llama")
    if preset != "paper":
        factor = _HEAD / plain.model.hidden_size
        plain = replace(plain, model=replace(plain.model, mup_head=factor))
    out = with_optimizer(
        plain, placement="scalar", rules=(". only=head kind=scalar",), multiplier_lr=1e-2
    )
    arms = {"out": out, "in": with_optimizer(out, clip_multipliers=True), "none": plain}
    return with_seeds([({"arm": arm}, config) for arm, config in arms.items()], SEEDS[preset])


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return what scalars in the norm do to it, to clipping and to the loss."""
    arms = [readings.by_seed(records, **labels) for labels in (_IN, _OUT)]
    norms = [readings.paired(early_norm, arm) for arm in arms]
    shares = [readings.paired(clipped, arm) for arm in arms]
    return {
        "C11.norm": readings.paired(operator.sub, *norms),
        "C11.clipped": readings.paired(operator.sub, *shares),
        "C11.loss": loss_difference.between(records, _IN, _OUT),
    }


def early_norm(record: Record) -> Number:
    """Return the mean log of the gradient norm at the start of a run."""
    logs = [math.log(norm) for norm in _early_norms(record) if norm > 0]
    return fmean(logs) if logs else None


def clipped(record: Record) -> Number:
    """Return the share of logged steps at the start of a run that are clipped."""
    threshold = record.config["optimizer"]["max_grad_norm"]
    over = [norm > threshold for norm in _early_norms(record)]
    return fmean(over) if over else None


def _early_norms(record: Record) -> list[float]:
    data = record.config["data"]
    tokens = data["sequence_length"] * data["batch_sequences"]
    # Not of the last step there is: a run that diverged has fewer.
    last = EARLY * record.config["schedule"]["tokens"] / tokens
    return [norm for step, norm in readings.trained(record, "grad_norm").items() if step <= last]


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw norm and loss at the start, and how losses differ during the run and at its end."""
    plots: list[Plot] = []
    with drawing.canvas(
        plots,
        "Gradient norm at the start",
        "Norm that is compared with the threshold, before it is clipped. The paper finds norms "
        "far above the threshold with scalars in, and well below it with scalars out.",
        x="step",
        y="gradient norm",
    ) as axes:
        drawing.curves(axes, _start(records, "grad_norm"))
        drawing.level(axes, 1.0, "threshold")
        # Single steps have norms of 100.
        drawing.log_limits(axes, "y")
    with drawing.canvas(
        plots,
        "Loss at the start",
        "Training loss. The paper finds a slower start with scalars in the norm.",
        x="step",
        y="training loss, nats",
    ) as axes:
        drawing.curves(axes, _start(records, "loss"))
    with drawing.canvas(
        plots,
        "Loss difference over the run",
        "Training loss with multipliers in the norm minus that with them out of it. The paper "
        "finds that it stays above zero for scalars.",
        x="step",
        y="training loss, in minus out of the norm, nats",
    ) as axes:
        drawing.curves(axes, {"scalars": _differences(records)}, early=EARLY)
        drawing.level(axes, 0.0, "no difference")
    plots += loss_difference.plot(
        records,
        {name: labels for name, labels in _ARMS.items() if labels != _PLAIN},
        _PLAIN,
        against="no multipliers",
        title="Loss at the end",
        caption="Mean and range over seeds. The paper finds that scalars in the norm gain "
        "nothing over a run without multipliers, and scalars out of it do.",
    )
    return plots


def _start(records: Sequence[Labelled], name: str) -> dict[str, list[Curve]]:
    """Return a curve of every arm over the first steps: twice as many as the statistics read."""
    curves = {
        arm: [readings.trained(one.record, name) for one in readings.select(records, **labels)]
        for arm, labels in _ARMS.items()
    }
    last = max((step for seeds in curves.values() for seed in seeds for step in seed), default=0)
    return {
        arm: [{s: v for s, v in seed.items() if s <= 2 * EARLY * last} for seed in seeds]
        for arm, seeds in curves.items()
    }


def _differences(records: Sequence[Labelled]) -> list[Curve]:
    """Return the training loss with multipliers in the norm minus that with them out of it."""
    arms = (readings.by_seed(records, **labels) for labels in (_IN, _OUT))
    losses = (readings.paired(lambda record: readings.trained(record, "loss"), arm) for arm in arms)
    return list(readings.paired(readings.difference, *losses).values())

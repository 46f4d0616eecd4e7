"""Norms of outputs over training at every width (appendix); the runs are those of `width_mup`."""

from __future__ import annotations

from collections.abc import Sequence

from learnable_multipliers.experiments import drawing, readings, width_mup
from learnable_multipliers.experiments.claim import Claim
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.readings import Curve
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run

TITLE = "Output norms over training, by width"
FIGURE = "Fig. 10"
CLAIMS: tuple[Claim, ...] = ()

_OUTPUTS = {
    "embedding": (
        "embedding output",
        "The paper sees it grow with the outputs of the blocks.",
    ),
    "attention_out": (
        "attention output",
        "Geometric mean over layers. The paper sees growth late in training with another offset at "
        "each width: the residual stream is normalized, so its scale is arbitrary.",
    ),
    "mlp_out": (
        "MLP output",
        "Geometric mean over layers. The paper sees the same as for attention.",
    ),
    "logits": (
        "logits",
        "The paper sees growth to a plateau that is the same at every width.",
    ),
}


def runs(preset: Preset) -> list[Run]:
    """Return the runs of `width_mup`."""
    return width_mup.runs(preset)


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw the norm of each output over steps, for each family and width."""
    plots: list[Plot] = []
    for family in ("llama", "hybrid"):
        of_family = readings.select(records, family=family)
        for name, (title, caption) in _OUTPUTS.items() if of_family else ():
            arms = {
                f"width {width:g}": [
                    _curve(one.record, name) for one in readings.select(of_family, width=width)
                ]
                for width in readings.distinct(of_family, "width")
            }
            heading = f"{title[0].upper()}{title[1:]}, {family}"
            y = f"rms of the {title}"
            with drawing.canvas(plots, heading, caption, x="step", y=y) as axes:
                drawing.curves(axes, arms)
                drawing.log_limits(axes, "y")
    return plots


def _curve(record: Record, name: str) -> Curve:
    return readings.over_steps(
        record.signals, lambda signals: readings.activation(record, name, signals=signals)
    )

"""How other blocks follow a larger MLP, by what noise does not hold (app. B); runs of `mlp_scale`.

Without multipliers, blocks grow with the MLP through conv1d, D, and value and output of grouped
queries. The paper proposes two changes of the model that close these ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.degradation import Sweep, exponent
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.readings import Number
from learnable_multipliers.experiments.record import Labelled, Record

GROUPED, MULTI_HEAD, INNER_NORM = "grouped queries", "multi-head", "inner norm"
MODELS = (GROUPED, MULTI_HEAD, INNER_NORM)

_GROWTH = "AdamW without scalars: a in rms ~ S^a of"

CLAIM = Claim(
    id="C23",
    statement="Without multipliers the other blocks follow a larger MLP by what noise does not "
    "hold: conv1d, D, and value and output of grouped-query attention. Multi-head attention "
    "and an inner norm close these ways.",
    where="App. B",
    tests=(
        # The paper shows growth without a number. 0.05 is 15% over the factor of 16 in S, ten
        # times the scatter between seeds; a curve that visibly rises has 0.2, 75%.
        *(
            Test(
                name=f"C23.{name}",
                what=f"{_GROWTH} {what}",
                bound=0.05,
                opposite=0.0,
                effect=0.2,
            )
            for name, what in (
                ("conv1d", "conv1d"),
                ("D", "D"),
                ("attention", "value and attention output matrices, grouped queries"),
            )
        ),
        Test(
            name="C23.ssm",
            what=f"{_GROWTH} what state-space mixers add to the residual stream",
            bound=0.2,
            opposite=0.0,
            effect=0.5,
        ),
        # Proposed in the paper, not measured: most of the growth above is to go away.
        Test(
            name="C23.multi_head",
            what="what a of value and attention output matrices loses with multi-head attention",
            bound=0.025,
            opposite=0.0,
            effect=0.1,
        ),
        Test(
            name="C23.inner_norm",
            what="what a of the mixers' outputs loses with the inner norm",
            bound=0.1,
            opposite=0.0,
            effect=0.5,
        ),
    ),
    note="The two changes of the model are proposed in the paper, not tried.",
)

Read = Callable[[Record], Number]


def output(name: str) -> Read:
    """Return how the rms of a block's output is read."""
    return lambda record: readings.activation(record, name)


def parameter(name: str) -> Read:
    """Return how the rms of a parameter that is no matrix is read."""
    return lambda record: readings.activation(record, name, "parameters")


def matrices(*roles: str) -> Read:
    """Return how the rms of the raw matrices of some roles is read."""
    return lambda record: readings.role_rms(record, *roles)


_ATTENTION = matrices("value", "attention-out")
_SSM = output("ssm_out")


def analyse(sweeps: Mapping[str, Mapping[int, Sweep]]) -> dict[str, BySeed]:
    """Return the statistics of C23 by seed.

    Args:
        sweeps: Model -> its runs without scalars, by seed and scale.
    """
    grouped, multi_head, inner_norm = (sweeps[model] for model in MODELS)
    return {
        "C23.conv1d": readings.paired(growth(parameter("conv1d")), grouped),
        "C23.D": readings.paired(growth(parameter("D")), grouped),
        "C23.attention": readings.paired(growth(_ATTENTION), grouped),
        "C23.ssm": readings.paired(growth(_SSM), grouped),
        "C23.multi_head": readings.paired(_loses(_ATTENTION), grouped, multi_head),
        "C23.inner_norm": readings.paired(_loses(_SSM), grouped, inner_norm),
    }


def growth(read: Read) -> Callable[[Sweep], Number]:
    """Return the exponent of a number of each run over S."""
    return lambda sweep: exponent({scale: read(record) for scale, record in sweep.items()})


def _loses(read: Read) -> Callable[[Sweep, Sweep], Number]:
    """Return by how much an exponent is smaller in another model, over the scales of both."""

    def loses(one: Sweep, other: Sweep) -> Number:
        shared = one.keys() & other.keys()
        before, after = (
            growth(read)({scale: sweep[scale] for scale in shared}) for sweep in (one, other)
        )
        return None if before is None or after is None else before - after

    return loses


def draw(plots: list[Plot], records: Sequence[Labelled], x: str) -> None:
    """Draw what multi-head attention and the inner norm change."""
    for model, what, read, caption in (
        (
            MULTI_HEAD,
            "rms of value and output matrices",
            _ATTENTION,
            "Raw weights of attention with one key and value for several queries, and with one "
            "for each, which the paper expects to hold their norms.",
        ),
        (
            INNER_NORM,
            "rms of the mixers' output",
            _SSM,
            "Output of the state-space mixers without and with a norm inside, which makes conv1d "
            "and D unable to scale it.",
        ),
    ):
        points = {
            name: [
                (scale, value)
                for scale, values in readings.sweep(records, "scale", read, model=name).items()
                for value in values
            ]
            for name in (GROUPED, model)
        }
        if not all(points.values()):
            continue
        with drawing.canvas(plots, f"Changed model: {model}", caption, x=x, y=what) as axes:
            labels = {GROUPED: "as it is", model: f"with {model}"}
            drawing.power_laws(axes, {labels[name]: points[name] for name in points})

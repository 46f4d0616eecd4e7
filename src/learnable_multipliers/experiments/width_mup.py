"""Width at fixed depth, learning rate and decay: what scalar multipliers make of muP (sec. 4.2).

Every matrix, the head too, carries one scalar, and all norms are frozen, so that the input of every
projection has rms 1 and a scalar is the only learned scale of its matrix. Heads keep their size and
grow in number. Exponents are slopes of log(quantity) over log(width), one for each seed, with the
geometric mean over layers as the quantity of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from learnable_multipliers.experiments import drawing, readings
from learnable_multipliers.experiments.claim import BySeed, Claim, Test
from learnable_multipliers.experiments.drawing import Plot
from learnable_multipliers.experiments.presets import (
    SEEDS,
    Family,
    base,
    with_scalars,
    with_signals,
)
from learnable_multipliers.experiments.readings import Number
from learnable_multipliers.experiments.record import Labelled, Record
from learnable_multipliers.experiments.run import Preset, Run, with_seeds
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]

TITLE = "Scaling of norms, activations and multipliers with width"
FIGURE = "Fig. 5"

WIDTHS: dict[Preset, tuple[int, ...]] = {
    "cpu": (16, 32, 64, 128),
    "gpu": (64, 256, 512),
    "paper": (128, 256, 512, 1024, 2048, 4096),
}
FAMILIES: dict[Preset, tuple[Family, ...]] = {
    "cpu": ("llama", "hybrid"),
    "gpu": ("llama", "hybrid"),
    "paper": ("hybrid",),
}
# Features of an attention head, of which the narrowest model has one, and of a state-space head.
_HEAD_DIMS: dict[Preset, tuple[int, int]] = {"cpu": (16, 16), "gpu": (64, 32), "paper": (64, 64)}
_PAPER_LAYERS = 12

_BLOCKS = {
    "attention": ("query", "key", "value", "attention-out"),
    "MLP": ("gate", "up", "down"),
    "SSM": ("ssm-z", "ssm-out"),
    "embedding": ("embedding",),
    "head": ("head",),
}
_LINEAR = ("attention", "MLP", "SSM", "head")
_SCALARS = {"head": ("head",), "query x key": ("query", "key"), "dt": ("ssm-dt",)}
MUP = {"head": -1.0, "query x key": -2.0, "dt": -1.0}
"""Exponents of the multipliers that keep activations constant where alignment is."""
_ACTIVATIONS = {
    "logits": "logits",
    "query x key": "query_key",
    "dt": "dt",
    "gate": "gate",
    "embedding": "embedding",
    "attention out": "attention_out",
    "SSM out": "ssm_out",
    "MLP out": "mlp_out",
}


def _power(name: str, what: str, mup: float) -> Test:
    """Return the test of a multiplier that should follow width^mup.

    The paper sees all three fall "only slightly slower" than muP. The bound is half way from muP,
    whose input and weight stay aligned, to weights that are random to their input, for which half
    of muP's exponent keeps activations constant. A multiplier that grows with width contradicts.
    """
    return Test(
        name=name,
        what=f"exponent of the {what} over width (muP: {mup:g})",
        bound=0.75 * mup,
        side="at most",
        opposite=-0.1 * mup,
        effect=-0.5 * mup,
    )


def _stable(name: str, what: str, factors: int) -> Test:
    """Return the test of an activation that should not depend on width.

    With fixed multipliers it would grow as width^(1/2) for each of its factors at random
    alignment: that contradicts, and two fifths of it is the bound.
    """
    return Test(
        name=name,
        what=f"size of the exponent of the {what} over width",
        bound=0.2 * factors,
        side="at most",
        opposite=0.5 * factors,
        effect=0.5 * factors,
    )


def _falls(name: str, what: str) -> Test:
    """Return the test of an alignment that should fall with width.

    Fixed alignment, muP's assumption, is 0 and random weights are -1/2; "slightly slower" than muP
    is read as -0.05 or less.
    """
    return Test(
        name=name,
        what=f"exponent of the alignment of input and weight over width, {what}",
        bound=-0.05,
        side="at most",
        opposite=0.05,
        effect=0.15,
    )


CLAIMS = (
    Claim(
        id="C10",
        statement="At fixed learning rate and decay, norms of raw matrices do not depend on width; "
        "scalar multipliers keep the norms of logits, of query times key and of dt constant by "
        "falling almost as muP asks: as 1/width for head and dt, as 1/width^2 for query and key "
        "together.",
        where="Sec. 4.2, Fig. 5",
        tests=(
            # The paper's axis of norms spans 0.050 to 0.075 over a factor of 32 in width, an
            # exponent of 0.12 at most, with growth at the narrowest; ours are narrower. Norms that
            # kept activations constant by themselves would fall at least as 1/sqrt(width).
            Test(
                name="C10.raw",
                what="largest size of the exponent of raw norms over width, of attention, MLP, SSM "
                "and head",
                bound=0.15,
                side="at most",
                opposite=0.5,
                effect=0.5,
            ),
            _stable("C10.logits", "rms of the logits", 1),
            _stable("C10.qk", "rms of queries times that of keys", 2),
            _stable("C10.dt", "rms of dt before its bias (hybrid)", 1),
            _power("C10.s_head", "head's multiplier", -1),
            _power("C10.s_qk", "product of the query's and the key's multiplier", -2),
            _power("C10.s_dt", "multiplier of dt (hybrid)", -1),
        ),
        note="Judged on the Llama, dt and SSM on the hybrid. Multipliers start at 1 at every "
        "width. In short runs they are learned in logarithms, at a rate that lets them reach any "
        "scale: in linear form their start would decide, and raw norms of narrow models make up "
        "for it.",
    ),
    Claim(
        id="C24",
        statement="The alignment between the input of a matrix and its weight falls with width, "
        "against muP's assumption that it is constant.",
        where="Sec. 4.2",
        tests=(
            _falls("C24.head", "head"),
            _falls("C24.qk", "query and key (geometric mean)"),
            _falls("C24.dt", "dt (hybrid)"),
        ),
        note="The paper infers it from the multipliers; here it is measured as |W x| / "
        "(width |W| |x|) on held-out text.",
    ),
)


def runs(preset: Preset) -> list[Run]:
    """Return a run with scalars for each seed, family and width."""
    arms = [
        ({"family": family, "width": width}, _config(preset, family, width))
        for family in FAMILIES[preset]
        for width in WIDTHS[preset]
    ]
    return with_seeds(arms, SEEDS[preset])


def _config(preset: Preset, family: Family, width: int) -> TrainConfig:
    config = base(preset, family)
    model = at_width(config.model, width, *_HEAD_DIMS[preset])
    if preset == "paper":
        model = replace(model, num_layers=_PAPER_LAYERS)
    model = replace(model, freeze_norms=True, freeze_final_norm=True)
    return with_signals(with_scalars(replace(config, model=model), preset, head=True))


def at_width(model: ModelConfig, width: int, head_dim: int, ssm_head_dim: int) -> ModelConfig:
    """Return a shape whose sizes are in the same ratio to another width; heads keep their size."""

    def scaled(size: int) -> int:
        return size * width // model.hidden_size

    heads = scaled(model.num_heads * model.head_dim) // head_dim
    shared = model.num_heads // model.num_kv_heads
    return replace(
        model,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=max(1, heads // shared),
        head_dim=head_dim,
        intermediate_size=scaled(model.intermediate_size),
        ssm_size=scaled(model.ssm_size),
        ssm_head_dim=ssm_head_dim if model.has_ssm else model.ssm_head_dim,
    )


def analyse(records: Sequence[Labelled]) -> dict[str, BySeed]:
    """Return the exponents of every test, by seed."""
    records = readings.finished(records)
    # The paper's own runs are hybrids alone.
    family = "llama" if readings.select(records, family="llama") else "hybrid"
    of_llama = partial(_exponents, readings.select(records, family=family))
    of_hybrid = partial(_exponents, readings.select(records, family="hybrid"))
    families = {"SSM": of_hybrid}
    raw = [families.get(block, of_llama)(partial(raw_rms, block=block)) for block in _LINEAR]
    return {
        "C10.raw": readings.paired(lambda *exponents: max(map(abs, exponents)), *raw),
        "C10.logits": _sizes(of_llama(partial(activation, what="logits"))),
        "C10.qk": _sizes(of_llama(partial(activation, what="query x key"))),
        "C10.dt": _sizes(of_hybrid(partial(activation, what="dt"))),
        "C10.s_head": of_llama(partial(scalar, what="head")),
        "C10.s_qk": of_llama(partial(scalar, what="query x key")),
        "C10.s_dt": of_hybrid(partial(scalar, what="dt")),
        "C24.head": of_llama(partial(alignment, what="head")),
        "C24.qk": of_llama(partial(alignment, what="query x key")),
        "C24.dt": of_hybrid(partial(alignment, what="dt")),
    }


def _exponents(
    records: Sequence[Labelled], quantity: Callable[[Record], Number]
) -> dict[int, float]:
    """Return slopes of log(quantity) over log(width), of seeds with all widths of a preset."""
    by_seed = {}
    for seed in readings.distinct(records, "seed"):
        points = {
            width: values[0]
            for width, values in readings.sweep(records, "width", quantity, seed=seed).items()
            if values[0] > 0
        }
        if any(set(widths) == set(points) for widths in WIDTHS.values()):
            slopes = readings.exponents([[width] for width in points], list(points.values()))
            if slopes is not None:
                by_seed[int(seed)] = slopes[0]
    return by_seed


def _sizes(by_seed: BySeed) -> BySeed:
    return {seed: abs(value) for seed, value in by_seed.items()}


def raw_rms(record: Record, block: str) -> Number:
    """Return the rms of the raw matrices of a block."""
    return readings.role_rms(record, *_BLOCKS[block])


def scalar(record: Record, what: str) -> Number:
    """Return the multiplier on an activation: for query x key the product of both."""
    means = [
        readings.geometric_mean(readings.layer_scalars(record, r) or []) for r in _SCALARS[what]
    ]
    mean = readings.geometric_mean(means)
    return None if mean is None else mean ** len(means)


def activation(record: Record, what: str) -> Number:
    """Return the rms of an activation."""
    return readings.activation(record, _ACTIVATIONS[what])


def alignment(record: Record, what: str) -> Number:
    """Return the alignment of the matrices behind an activation and their input."""
    return readings.geometric_mean(
        readings.activation(record, role, group="alignment") for role in _SCALARS[what]
    )


def plot(records: Sequence[Labelled]) -> list[Plot]:
    """Draw norms, activations, multipliers and alignment over width, for each family."""
    records = readings.finished(records)
    plots: list[Plot] = []
    for family in ("llama", "hybrid"):
        if of_family := readings.select(records, family=family):
            _draw_family(plots, of_family, family)
    return plots


def _draw_family(plots: list[Plot], records: Sequence[Labelled], family: str) -> None:
    x = f"width of the {family}"
    with drawing.canvas(
        plots,
        f"Matrix norms, {family}",
        "Raw weights, geometric mean over layers and the matrices of a block. The paper sees "
        "almost no dependence on width, with slight growth at the narrowest.",
        x=x,
        y="rms of raw matrices",
    ) as axes:
        drawing.scan(axes, _over_width(records, raw_rms, _BLOCKS), log_y=True)
    with drawing.canvas(
        plots,
        f"Activations, {family}",
        "Geometric mean over layers. The paper sees constant logits, query times key and dt; "
        "embedding and block outputs may grow together, because the residual stream is "
        "normalized.",
        x=x,
        y="rms of activations",
    ) as axes:
        drawing.scan(axes, _over_width(records, activation, _ACTIVATIONS), log_y=True)
    with drawing.canvas(
        plots,
        f"Multipliers, {family}",
        "Learned scalars, each seed a point. Dotted: muP's 1/width for head and dt, 1/width^2 "
        "for query times key. The paper sees them fall only slightly slower.",
        x=x,
        y="scalar multipliers, with exponents",
    ) as axes:
        arms = _over_width(records, scalar, _SCALARS)
        drawing.power_laws(axes, _points(arms))
        for name, points in arms.items():
            _guide(axes, points, MUP[name])
    with drawing.canvas(
        plots,
        f"Alignment, {family}",
        "|W x| / (width |W| |x|) on held-out text: constant in muP, 1/sqrt(width) for weights "
        "that are random to their input (dotted). The paper infers that it falls slowly.",
        x=x,
        y="alignment of input and weight, with exponents",
    ) as axes:
        arms = _over_width(records, alignment, _SCALARS)
        drawing.power_laws(axes, _points(arms))
        _guide(axes, next(iter(arms.values()), {}), -0.5)


def _over_width(
    records: Sequence[Labelled], quantity: Callable[[Record, str], Number], names: Iterable[str]
) -> dict[str, dict[float, list[float]]]:
    """Return a quantity by name and width, of each seed; names that no run has are left out."""
    arms = {n: readings.sweep(records, "width", lambda r, n=n: quantity(r, n)) for n in names}
    return {name: points for name, points in arms.items() if points}


def _points(arms: Mapping[str, Mapping[float, Sequence[float]]]) -> dict[str, list[Point]]:
    return {name: [(x, y) for x in at for y in at[x]] for name, at in arms.items()}


def _guide(axes: Axes, points: Mapping[float, Sequence[float]], exponent: float) -> None:
    """Draw a power law of a given exponent through the narrowest models."""
    start = readings.geometric_mean(points.get(min(points, default=0.0), ()))
    if start is not None:
        ends = [min(points), max(points)]
        line = [start * (x / ends[0]) ** exponent for x in ends]
        axes.plot(ends, line, color=style.COLOURS["muted"], linestyle="dotted", linewidth=1.2)
        drawing.log_limits(axes, "y")

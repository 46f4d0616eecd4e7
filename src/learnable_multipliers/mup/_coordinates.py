"""The coordinate check: train at several widths and measure the quantities of the recipes.

For every measured layer y = s W x, |.| being rms over all entries, on a batch not yet trained on:
|x|, |W|, |y|, the |dW| of one optimizer step and |dy| = |s dW x|, and the alignments of sec. 4.2,

    |y| = s d alpha |W| |x|,        |dy| = s d alpha_update |dW| |x|.

A W of rank one along x has alignment 1, a random W has d^(-1/2). Training sets it, so the check
trains. Logarithms are averaged, so that these products hold for the averages too. `compare` and
`table` fit powers of the width and show them beside those that a recipe expects.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._formats import first_of
from learnable_multipliers._names import named_parameters, unwrap
from learnable_multipliers.equilibrium import SETTLED
from learnable_multipliers.equilibrium._readings import rms
from learnable_multipliers.mup._recipes import Recipe
from learnable_multipliers.optim import multipliers, raw_weights
from learnable_multipliers.optim._base import MultiplierOptimizer

_HEADINGS = {
    "multiplier": "s",
    "input": "|x|",
    "weight": "|W|",
    "update": "|dW|",
    "output": "|y|",
    "relative_update": "|dy|/|y|",
    "alignment": "alpha",
    "update_alignment": "alpha dy",
}
QUANTITIES = tuple(_HEADINGS)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A linear layer to measure."""

    weight: str
    """Name of its parameter, (out, in)."""
    reads: str = ""
    """Module whose output is x; empty if x is the input of the weight's own module."""
    multiplier: float = 1.0
    """The fixed s after it; a learned scalar multiplier is found and multiplied in."""
    label: str = ""
    """Name in results; probes that share one are averaged (the layers of a model)."""

    @property
    def name(self) -> str:
        """The label, or else the module's name."""
        return self.label or self.weight.removesuffix(".weight")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train a model, and the layers to measure."""

    optimizer: Optimizer
    loss: Callable[[Any], Tensor]
    """Returns the loss of a batch; runs the model."""
    batches: Iterator[Any]
    """Endless new batches; some are only for measurements."""
    probes: Sequence[Probe]


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Geometric means of one layer, over measurements and over the probes of a label."""

    label: str
    fan_in: float
    """d."""
    multiplier: float
    """s."""
    input: float
    """`|x|`."""
    weight: float
    """`|W|`, of the raw weight if a multiplier is learned."""
    update: float
    """`|dW|` of one step."""
    output: float
    """`|y|`."""
    relative_update: float
    """`|dy| / |y|`."""
    alignment: float
    update_alignment: float
    relaxations: float
    """2 wd sum(lr): the weight is in its equilibrium from about 4 on."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One width, trained once."""

    width: int
    seed: int
    loss: float
    """Mean over the last quarter of the steps."""
    coordinates: tuple[Coordinates, ...]


def coordinate_check(
    build: Callable[[int], nn.Module],
    prepare: Callable[[nn.Module, int], Training],
    widths: Sequence[int],
    *,
    steps: int,
    measurements: int = 16,
    seeds: Sequence[int] = (0,),
) -> list[Run]:
    """Train `build(width)` as `prepare(model, width)` says, and measure late in training.

    Measurements are taken in the last quarter of the steps. torch's seed is set before `build`,
    once for each of `seeds`, so that runs are repeatable.
    """
    if len(set(widths)) < 2:
        raise ValueError(f"exponents need at least two widths, five to be worth it; got {widths}")
    if not 1 <= measurements <= max(1, steps // 4):
        raise ValueError(
            f"{measurements} measurements do not fit into the last quarter of {steps} steps: take "
            f"1 to {max(1, steps // 4)}, or more steps"
        )
    runs = []
    for width in widths:
        for seed in seeds:
            torch.manual_seed(seed)
            model = build(width)
            runs.append(_train(model, prepare(model, width), steps, measurements, width, seed))
    return runs


def _train(
    model: nn.Module, training: Training, steps: int, measurements: int, width: int, seed: int
) -> Run:
    measured = [_Measured(model, training.optimizer, probe) for probe in training.probes]
    quarter = max(1, steps // 4)
    measured_at = {steps - 1 - i * quarter // measurements for i in range(measurements)}
    losses = []
    for step in range(steps):
        if step in measured_at:
            # On a batch that is not trained on.
            with torch.no_grad(), ExitStack() as hooks:
                for probe in measured:
                    hooks.enter_context(probe.listen())
                training.loss(next(training.batches))
            for probe in measured:
                probe.start()
        loss = training.loss(next(training.batches))
        if not loss.isfinite():
            raise ValueError(f"the loss is {loss.item()} at width {width}, step {step}: lower lr")
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        for probe in measured:
            probe.count_step()
            if step in measured_at:
                probe.finish()
        losses.append(loss.item())
    late = losses[-quarter:]
    coordinates = tuple(
        _averaged(label, [probe for probe in measured if probe.probe.name == label])
        for label in dict.fromkeys(probe.name for probe in training.probes)
    )
    return Run(width=width, seed=seed, loss=sum(late) / len(late), coordinates=coordinates)


class _Measured:
    """One probe on one model, with its measurements."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, probe: Probe):
        self.probe, self.optimizer = probe, optimizer
        parameters = dict(named_parameters(model))
        if probe.weight not in parameters or parameters[probe.weight].ndim != 2:
            matrices = [name for name, p in parameters.items() if p.ndim == 2]
            raise ValueError(
                f"a probe measures {probe.weight!r}, which is no matrix of this model; its "
                f"matrices are {', '.join(matrices[:8])}"
            )
        self.parameter = parameter = parameters[probe.weight]
        self.fan_in = parameter.shape[1]
        self.module = unwrap(model).get_submodule(probe.reads or probe.weight.rpartition(".")[0])
        groups = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
        if not groups:
            raise ValueError(f"the optimizer does not train the measured {probe.weight!r}")
        self.group = groups[0]
        self.relaxations = 0.0
        self.logs: list[dict[str, float]] = []
        self.x: Tensor | None = None

    def count_step(self) -> None:
        """Add one step to 2 wd sum(lr)."""
        lr = float(self.group["lr"]) * self.group.get("raw_lr_scale", 1.0)
        self.relaxations += 2 * lr * self.group.get("weight_decay", 0.0)

    def listen(self) -> Any:
        """Capture x at the next forward pass."""
        self.x = None
        if self.probe.reads:
            return self.module.register_forward_hook(lambda _m, _a, out: self._capture(out))
        return self.module.register_forward_pre_hook(lambda _m, args: self._capture(args[0]))

    def _capture(self, x: Any) -> None:
        if not isinstance(x, Tensor) or x.shape[-1] != self.fan_in:
            captured = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{self.probe.weight} reads {self.fan_in} features, but what was captured for it "
                f"is {captured}: name the module whose output it reads in Probe(reads=...)"
            )
        self.x = x.detach()

    def start(self) -> None:
        """Keep the layer as it is before a step."""
        if self.x is None:
            raise ValueError(
                f"{self.probe.weight} was not called: its module takes no part in the loss, or "
                "the weight is used without it; name the module whose output it reads in "
                "Probe(reads=...)"
            )
        raw, learned = self._raw()
        self.before, self.multiplier = raw.clone(), self.probe.multiplier * learned

    def finish(self) -> None:
        """Measure the layer before the step, and the change by the step."""
        x, before, s = self.x, self.before, self.multiplier
        assert x is not None
        change = self._raw()[0] - before
        inputs, weight, update = rms(x), rms(before), rms(change)
        output, moved = rms(s * F.linear(x, before)), rms(s * F.linear(x, change))
        log = {
            "multiplier": s,
            "input": inputs,
            "weight": weight,
            "update": update,
            "output": output,
            "relative_update": moved / output,
            "alignment": output / (s * self.fan_in * weight * inputs),
            "update_alignment": moved / (s * self.fan_in * update * inputs),
        }
        self.logs.append(log)
        self.x = None

    @torch.no_grad()
    def _raw(self) -> tuple[Tensor, float]:
        """Return W and the learned factor of s."""
        if not isinstance(self.optimizer, MultiplierOptimizer):
            return self.parameter.detach(), 1.0
        name = self.probe.weight
        learned = multipliers(self.optimizer).get(name, {})
        if set(learned) - {"scalar"} or any(value.numel() > 1 for value in learned.values()):
            raise ValueError(
                f"{name} learns {' and '.join(learned)}: the check measures one s for a matrix; "
                "plan it with the scalar placement"
            )
        s = learned["scalar"].item() if learned else 1.0
        return raw_weights(self.optimizer).get(name, self.parameter).detach(), s


def _averaged(label: str, measured: Sequence[_Measured]) -> Coordinates:
    """Return geometric means, as the paper aggregates layers (sec. 4.2)."""
    logs = [log for probe in measured for log in probe.logs]
    zero = [name for name in QUANTITIES if any(log[name] <= 0 for log in logs)]
    if zero:
        raise ValueError(f"{label}: {', '.join(zero)} is 0 or below: it has no exponent")
    means = {name: statistics.geometric_mean(log[name] for log in logs) for name in QUANTITIES}
    fan_in = statistics.geometric_mean(probe.fan_in for probe in measured)
    relaxations = min(probe.relaxations for probe in measured)
    return Coordinates(label=label, fan_in=fan_in, relaxations=relaxations, **means)


@dataclass(frozen=True)
class Exponent:
    """A least-squares slope in log-log."""

    value: float
    error: float
    """Standard error from the residuals, assumed independent."""


@dataclass(frozen=True)
class Comparison:
    """One quantity of one layer: the exponent a recipe expects, and the measured one."""

    label: str
    quantity: str
    expected: float
    measured: Exponent

    @property
    def deviation(self) -> float:
        """Measured minus expected."""
        return self.measured.value - self.expected

    def differs(self, tolerance: float = 0.15) -> bool:
        """Return whether the error exceeds `tolerance` and two standard errors."""
        return abs(self.deviation) > max(tolerance, 2 * self.measured.error)


def fit_exponent(widths: Sequence[float], values: Sequence[float]) -> Exponent:
    """Fit values ~ width^exponent: `value` and its standard `error`."""
    x, y = ([math.log(number) for number in numbers] for numbers in (widths, values))
    slope, intercept = statistics.linear_regression(x, y)
    residual = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    # Two points lie on a line: there are no residuals to estimate an error from.
    error = math.sqrt(residual / (len(x) - 2) / spread) if len(x) > 2 else math.inf
    return Exponent(slope, error)


def exponents(runs: Sequence[Run]) -> dict[str, dict[str, Exponent]]:
    """Return layer -> quantity -> exponent over all runs.

    Slopes of products add up: output = multiplier + fan_in + alignment + weight + input, and
    relative_update = update + update_alignment - weight - alignment.
    """
    widths = [run.width for run in runs]
    measured = [row for run in runs for row in run.coordinates]
    result = {}
    for label in dict.fromkeys(row.label for row in measured):
        rows = [row for row in measured if row.label == label]
        if len(rows) != len(runs):
            raise ValueError(
                f"{label} was measured in {len(rows)} of {len(runs)} runs: measure it in all"
            )
        result[label] = {
            name: fit_exponent(widths, [getattr(row, name) for row in rows])
            for name in ("fan_in", *QUANTITIES)
        }
    return result


def compare(runs: Sequence[Run], recipe: Recipe) -> list[Comparison]:
    """Return every quantity of every layer, expected and measured.

    Each has `label`, `quantity`, `expected`, `measured`, and `differs(tolerance)`.
    """
    expected = recipe.expected
    return [
        Comparison(label, name, expected[name], fits[name])
        for label, fits in exponents(runs).items()
        for name in QUANTITIES
    ]


def table(runs: Sequence[Run], recipe: Recipe, tolerance: float = 0.15) -> str:
    """Return the comparison as text: a row for each layer, `*` where it differs from the recipe.

    -0.36(9) is -0.36 with a standard error of 0.09.
    """
    lines = [("power of width", *_HEADINGS.values())]
    lines.append(("expected", *(f"{recipe.expected[name]:+.2f}" for name in QUANTITIES)))
    comparisons = compare(runs, recipe)
    for start in range(0, len(comparisons), len(QUANTITIES)):
        row = comparisons[start : start + len(QUANTITIES)]
        lines.append((row[0].label, *(_cell(comparison, tolerance) for comparison in row)))
    wide = max(len(line[0]) for line in lines)
    text = [f"{first:{wide}}" + "".join(f" {cell:10}" for cell in cells) for first, *cells in lines]
    early = [
        f"{row.label} at width {run.width} ({row.relaxations:.1f})"
        for run in runs
        for row in run.coordinates
        if row.relaxations < SETTLED
    ]
    if early:
        text.append(f"not yet in equilibrium, 2 wd sum(lr) < {SETTLED:g}: {first_of(early, 4)}")
    losses = ", ".join(f"{run.loss:.3f} ({run.width})" for run in runs)
    return "\n".join([*(line.rstrip() for line in text), f"loss (width): {losses}"])


def _cell(comparison: Comparison, tolerance: float) -> str:
    value, error = comparison.measured.value, comparison.measured.error
    digits = f"{100 * error:.0f}" if math.isfinite(error) else "?"
    # No negative zero.
    shown = f"{round(value, 2) + 0.0:+.2f}({digits})"
    return f"{shown}{'*' if comparison.differs(tolerance) else ''}"

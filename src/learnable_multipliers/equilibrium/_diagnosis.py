"""What each tensor of a run shows of the equilibrium of noise and decay.

Measured rms, the rms that noise would have given, how noisy the gradients are, and the verdict of
`verdict.py`: for raw weights, multipliers and vectors, and for embeddings row by row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from learnable_multipliers.equilibrium._closed_forms import SETTLED
from learnable_multipliers.equilibrium._diagnosis_table import render, summarize
from learnable_multipliers.equilibrium._indicator import noise_indicator
from learnable_multipliers.equilibrium._introspection import Part, Trained, trained_tensors
from learnable_multipliers.equilibrium._prediction import (
    Expectation,
    Expectations,
    Pace,
    has_sparse_rows,
    pace_of,
    steady_expectation,
)
from learnable_multipliers.equilibrium._token_rows import TokenRows, read_rows
from learnable_multipliers.equilibrium._verdict import Verdict, verdict_of
from learnable_multipliers.optim._base import MultiplierOptimizer


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one tensor shows."""

    name: str
    """Of the parameter."""
    part: Part
    """`weight` (the raw weight where there are multipliers), `row`, `col` or `scalar`."""
    kind: Literal["matrix", "multiplier", "vector"]
    role: str
    size: int
    """Numbers in it."""
    steps: int
    measured: float
    """RMS now."""
    predicted: float | None
    """RMS that noise would have given it."""
    error: float | None
    """Standard deviation of log(measured / predicted) on noise."""
    settling: float | None
    """2 wd sum(lr) so far; from 4 on the start is forgotten."""
    indicator: float | None
    """Noise indicator: 1 for pure noise."""
    verdict: Verdict
    note: str = ""
    """Why something is missing."""

    @property
    def log_ratio(self) -> float | None:
        """log(measured / predicted)."""
        if not self.predicted or not self.measured or math.isinf(self.predicted):
            return None
        return math.log(self.measured / self.predicted)


@dataclass(frozen=True)
class Diagnosis:
    """Readings of every tensor of an optimizer; `print` shows a table, layers on one line."""

    readings: tuple[Reading, ...]
    rows: Mapping[str, TokenRows]
    """The rows of each embedding, by parameter name."""

    def __getitem__(self, key: str | tuple[str, str]) -> Reading:
        name, part = (key, "weight") if isinstance(key, str) else key
        for reading in self.readings:
            if (reading.name, reading.part) == (name, part):
                return reading
        raise KeyError(f"no {part} of {name!r}")

    def __str__(self) -> str:
        return render(self.readings, self.rows)

    def measured(self) -> dict[tuple[str, str], float]:
        """Return the rms of each tensor, by parameter name and part."""
        return {(reading.name, reading.part): reading.measured for reading in self.readings}

    def verdicts(self) -> dict[str, dict[Verdict, int]]:
        """Return how many tensors are trapped, free and open: matrices, multipliers, vectors."""
        return count_verdicts(self.readings)

    def summary(self) -> str:
        """Return the verdicts in a line: `trapped: 12 of 14 matrices (86%, 1 free, 1 open)`."""
        return summarize(self.verdicts())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: every reading, and the rows of embeddings by frequency."""
        return {
            "readings": [
                {**dataclasses.asdict(reading), "log_ratio": reading.log_ratio}
                for reading in self.readings
            ],
            "rows": {name: rows.to_dict() for name, rows in self.rows.items()},
        }


def count_verdicts(readings: Iterable[Reading]) -> dict[str, dict[Verdict, int]]:
    """Return the number of tensors with each verdict, by kind."""
    counts: dict[str, dict[Verdict, int]] = {}
    for reading in readings:
        of = counts.setdefault(reading.kind, dict.fromkeys(get_args(Verdict), 0))
        of[reading.verdict] += 1
    return counts


@torch.no_grad()
def diagnose(
    optimizer: MultiplierOptimizer,
    *,
    lrs: Iterable[float] | None = None,
    start: Diagnosis | None = None,
    frequency: Tensor | None = None,
) -> Diagnosis:
    """Read every tensor that an optimizer trains: rms, the rms of noise, indicator, verdict.

    Args:
        lrs: The base learning rate of every step taken, in order. An optimizer does not remember
            them. Without them predictions are the equilibrium at the present rate, for tensors
            that the steps so far would have brought there: right if the rate has not changed for
            some 2 / (lr wd) steps.
        start: A diagnosis from before the first step. Without it a start counts as zero where
            decay has wiped it out, and there is no prediction where it has not.
        frequency: For each row of the embedding, in what share of the steps it has had a gradient
            (`row_frequency` makes it from counts). Rows are simulated by it; it cannot be told from
            the moments, which know how long ago a token came last, not how often it comes.
    """
    if not isinstance(optimizer, MultiplierOptimizer):
        raise TypeError(
            f"diagnose reads lrm.AdamW, lrm.Muon and lrm.LearnableMultipliers, not "
            f"{type(optimizer).__name__}; wrap it: lrm.LearnableMultipliers(optimizer, model, plan)"
        )
    tensors = list(trained_tensors(optimizer))
    history = None if lrs is None else [float(lr) for lr in lrs]
    taken = max((tensor.steps for tensor in tensors), default=0)
    if history is not None and len(history) != taken:
        raise ValueError(
            f"lrs has {len(history)} learning rates, but the optimizer has taken {taken} steps: "
            "give the rate of each step taken, without those of steps it skipped"
        )
    paces = {tensor.key: pace_of(optimizer, tensor) for tensor in tensors}
    expectations = None
    if history is not None:
        expectations = Expectations(pace for pace in paces.values() if pace is not None)
        for lr in history:
            expectations.step(lr)
    starts = None if start is None else start.measured()
    readings, rows = [], {}
    for tensor in tensors:
        expected, note = _expectation(optimizer, tensor, paces[tensor.key], expectations, taken)
        readings.append(read_tensor(tensor, expected, starts, note))
        if tensor.part == "weight" and has_sparse_rows(tensor.matrix):
            before = start.rows[tensor.name].rms if start is not None else None
            rows[tensor.name] = read_rows(tensor, history, before, frequency)
    if frequency is not None and not rows:
        raise ValueError("frequency is given, but the optimizer trains no embedding")
    return Diagnosis(tuple(readings), rows)


def expectation_so_far(
    tensor: Trained, pace: Pace | None, expectations: Expectations, taken: int
) -> tuple[Expectation | None, str]:
    """Return what noise would have made of a tensor in a run that was followed; or why not."""
    note = _not_told(tensor, pace)
    if note or pace is None:
        return None, note
    if tensor.steps < taken:
        return None, f"had a gradient in {tensor.steps} of {taken} steps"
    if tensor.weight_decay != pace.weight_decay:
        return None, "its decay was changed during the run"
    return expectations.of(pace), ""


def _not_told(tensor: Trained, pace: Pace | None) -> str:
    """Return why no walk tells anything of a tensor, if none does."""
    if pace is None:
        return "its optimizer's walk on noise is not known"
    if tensor.steps == 0:
        return "no step yet"
    if tensor.part == "weight" and has_sparse_rows(tensor.matrix):
        return "row by row: see the rows"
    return ""


def _expectation(
    optimizer: MultiplierOptimizer,
    tensor: Trained,
    pace: Pace | None,
    expectations: Expectations | None,
    taken: int,
) -> tuple[Expectation | None, str]:
    """Return what noise would have made of a tensor; with a reason, if that says too little."""
    if expectations is not None:
        return expectation_so_far(tensor, pace, expectations, taken)
    note = _not_told(tensor, pace)
    if note or pace is None:
        return None, note
    lr = tensor.lr_scale * float(optimizer.param_groups[0]["lr"])
    if lr * tensor.weight_decay == 0:
        return None, "no decay or no rate, so no equilibrium: give lrs"
    expected = steady_expectation(pace.walk, lr, tensor.weight_decay, tensor.steps)
    early = "too early for the equilibrium at the present rate: give lrs"
    return expected, "" if expected.settling >= SETTLED else early


def read_tensor(
    tensor: Trained,
    expected: Expectation | None,
    starts: Mapping[tuple[str, str], float] | None,
    note: str,
) -> Reading:
    """Return what a tensor shows beside what was expected, given the rms of all at the start."""
    size = tensor.value.numel()
    measured = tensor.value.double().square().mean().sqrt().item() if size else 0.0
    indicator = _indicator(tensor)
    predicted = error = None
    settling = None if expected is None else expected.settling
    if expected is not None and not note:
        start_rms = tensor.start_rms
        if starts is not None:
            start_rms = starts[tensor.key]
        elif start_rms is None and expected.settling >= SETTLED:
            start_rms = 0.0
        if start_rms is None:
            note = "its start is not forgotten: give start"
        else:
            predicted, error = expected.rms(start_rms), expected.log_error(start_rms, size)
    reading = Reading(
        name=tensor.name,
        part=tensor.part,
        kind=tensor.kind,
        role=_role(tensor),
        size=size,
        steps=tensor.steps,
        measured=measured,
        predicted=predicted,
        error=error,
        settling=settling,
        indicator=indicator,
        verdict="open",
        note=note,
    )
    verdict = verdict_of(reading.log_ratio, error, settling, indicator, size)
    return dataclasses.replace(reading, verdict=verdict)


def _indicator(tensor: Trained) -> float | None:
    if tensor.first is None or tensor.second is None or tensor.steps == 0:
        return None
    found = noise_indicator(
        tensor.first, tensor.second, tensor.beta1, tensor.beta2, tensor.steps
    ).item()
    return None if math.isnan(found) else found


def _role(tensor: Trained) -> str:
    if tensor.matrix is None:
        return tensor.kind
    return "/".join(dict.fromkeys(block.role for block in tensor.matrix.blocks))

"""What each tensor of a run shows of the equilibrium of noise and decay.

Measured rms, the rms that noise would have given, how noisy the gradients are, and the verdict of
`_verdict.py`: for raw weights, multipliers and vectors, and for embeddings row by row.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from learnable_multipliers._names import layer_template
from learnable_multipliers.equilibrium._introspection import Part, Trained, trained_tensors
from learnable_multipliers.equilibrium._prediction import (
    Expectation,
    Expectations,
    TensorWalk,
    has_sparse_rows,
    steady_expectation,
    tensor_walk,
)
from learnable_multipliers.equilibrium._random_walk import SETTLED
from learnable_multipliers.equilibrium._token_rows import TokenRows, read_rows
from learnable_multipliers.equilibrium._verdict import (
    Verdict,
    indicator_of,
    log_ratio,
    verdict_of,
)
from learnable_multipliers.optim._base import MultiplierOptimizer

_HEADER = ("tensor", "n", "rms", "noise gives", "log ratio", "2 wd sum lr", "indicator", "verdict")
_BANDS = ("rows by frequency", "n", "rms", "noise gives", "log ratio", "indicator", "verdict")


@dataclass(frozen=True, kw_only=True)
class TensorReading:
    """Measurements of one tensor, and the verdict on it."""

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
        return log_ratio(self.measured, self.predicted)


@dataclass(frozen=True)
class Diagnosis:
    """Readings of every tensor of an optimizer; `print` shows a table, layers on one line."""

    readings: tuple[TensorReading, ...]
    rows: Mapping[str, TokenRows]
    """The rows of each embedding, by parameter name."""

    def __getitem__(self, key: str | tuple[str, str]) -> TensorReading:
        name, part = (key, "weight") if isinstance(key, str) else key
        for reading in self.readings:
            if (reading.name, reading.part) == (name, part):
                return reading
        raise KeyError(f"no {part} of {name!r}")

    def __str__(self) -> str:
        return _render(self.readings, self.rows)

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


def count_verdicts(readings: Iterable[TensorReading]) -> dict[str, dict[Verdict, int]]:
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
            (`row_frequency` makes it from counts). Rows are simulated by it; the moments do not
            contain it: they depend on how long ago a token came last, not on how often it comes.
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
    walks = {tensor.key: tensor_walk(optimizer, tensor) for tensor in tensors}
    expectations = None
    if history is not None:
        expectations = Expectations(walks.values())
        for lr in history:
            expectations.step(lr)
    starts = None if start is None else start.measured()
    readings, rows = [], {}
    for tensor in tensors:
        expected, note = _expectation(optimizer, tensor, walks[tensor.key], expectations, taken)
        readings.append(read_tensor(tensor, expected, starts, note))
        if tensor.part == "weight" and has_sparse_rows(tensor.matrix):
            before = start.rows[tensor.name].rms if start is not None else None
            rows[tensor.name] = read_rows(tensor, history, before, frequency)
    if frequency is not None and not rows:
        raise ValueError("frequency is given, but the optimizer trains no embedding")
    return Diagnosis(tuple(readings), rows)


def expectation_so_far(
    tensor: Trained, walk: TensorWalk | None, expectations: Expectations, taken: int
) -> tuple[Expectation | None, str]:
    """Return the expected effect of noise on a tensor in a run that was followed; or why not."""
    note = _why_unknown(tensor, walk)
    if note or walk is None:
        return None, note
    if tensor.steps < taken:
        return None, f"had a gradient in {tensor.steps} of {taken} steps"
    if tensor.weight_decay != walk.weight_decay:
        return None, "its decay was changed during the run"
    return expectations.of(walk), ""


def _why_unknown(tensor: Trained, walk: TensorWalk | None) -> str:
    """Return why no random walk predicts a tensor's rms; empty where one does."""
    if walk is None:
        return "its optimizer's random walk on noise is not known"
    if tensor.steps == 0:
        return "no step yet"
    if tensor.part == "weight" and has_sparse_rows(tensor.matrix):
        return "row by row: see the rows"
    return ""


def _expectation(
    optimizer: MultiplierOptimizer,
    tensor: Trained,
    walk: TensorWalk | None,
    expectations: Expectations | None,
    taken: int,
) -> tuple[Expectation | None, str]:
    """Return the expected effect of noise on a tensor; with a reason, if there is no prediction."""
    if expectations is not None:
        return expectation_so_far(tensor, walk, expectations, taken)
    note = _why_unknown(tensor, walk)
    if note or walk is None:
        return None, note
    lr = tensor.lr_scale * float(optimizer.param_groups[0]["lr"])
    if lr * tensor.weight_decay == 0:
        return None, "no decay or no rate, so no equilibrium: give lrs"
    expected = steady_expectation(walk.walk, lr, tensor.weight_decay, tensor.steps)
    early = "too early for the equilibrium at the present rate: give lrs"
    return expected, "" if expected.settling >= SETTLED else early


def read_tensor(
    tensor: Trained,
    expected: Expectation | None,
    starts: Mapping[tuple[str, str], float] | None,
    note: str,
) -> TensorReading:
    """Measure a tensor and compare it with what was expected, given the rms of all at the start."""
    size = tensor.value.numel()
    measured = tensor.value.double().square().mean().sqrt().item() if size else 0.0
    indicator = indicator_of(tensor.first, tensor.second, tensor.beta1, tensor.beta2, tensor.steps)
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
    return TensorReading(
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
        verdict=verdict_of(log_ratio(measured, predicted), error, settling, indicator, size),
        note=note,
    )


def _role(tensor: Trained) -> str:
    if tensor.matrix is None:
        return tensor.kind
    return "/".join(dict.fromkeys(block.role for block in tensor.matrix.blocks))


def _render(readings: Sequence[TensorReading], rows: Mapping[str, TokenRows]) -> str:
    """Return the table: medians over the layers of a line, then the rows of embeddings."""
    lines: dict[tuple[str, str, str], list[TensorReading]] = {}
    for reading in readings:
        key = (reading.kind, layer_template(reading.name), reading.part)
        lines.setdefault(key, []).append(reading)
    table: list[tuple[str, ...]] = [_HEADER]
    for kind in ("matrix", "multiplier", "vector"):
        for (of, name, part), alike in lines.items():
            if of == kind:
                shown = name if part == "weight" else f"{name} {part}"
                table.append(_line(shown, alike))
    text = _aligned(table)
    for name, found in rows.items():
        bands: list[tuple[str, ...]] = [_BANDS]
        for band in found.bands:
            label = "none" if band.high == 0 else f"{band.low:.0e} to {band.high:.0e}"
            bands.append(
                (
                    label,
                    str(band.num_rows),
                    _number(band.measured),
                    _number(band.predicted),
                    _signed(band.log_ratio),
                    _number(band.indicator),
                    band.verdict,
                )
            )
        text += ["", name, *_aligned(bands)]
    return "\n".join(text)


def summarize(verdicts: Mapping[str, Mapping[Verdict, int]]) -> str:
    """Return the share of trapped tensors of each kind, in one line."""
    plural = {"matrix": "matrices", "multiplier": "multipliers", "vector": "vectors"}
    shares = []
    for kind, counts in verdicts.items():
        total = sum(counts.values())
        others = ", ".join(f"{counts[word]} {word}" for word in ("free", "open") if counts[word])
        rest = f": {others}" if others else ""
        share = counts["trapped"] / total
        shares.append(f"{counts['trapped']} of {total} {plural[kind]} ({share:.0%}{rest})")
    return f"trapped are {', '.join(shares)}" if shares else "there is nothing to read"


def _line(name: str, readings: list[TensorReading]) -> tuple[str, ...]:
    verdicts = Counter(reading.verdict for reading in readings)
    verdict = ", ".join(
        word if count == len(readings) else f"{count} {word}" for word, count in verdicts.items()
    )
    notes = {reading.note for reading in readings} - {""}
    if notes:
        verdict += f" ({'; '.join(sorted(notes))})"
    return (
        name,
        str(len(readings)),
        _number(_median(reading.measured for reading in readings)),
        _number(_median(reading.predicted for reading in readings)),
        _signed(_median(reading.log_ratio for reading in readings)),
        _number(_median(reading.settling for reading in readings)),
        _number(_median(reading.indicator for reading in readings)),
        verdict,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]

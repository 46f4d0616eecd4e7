"""What each tensor of a run shows of the equilibrium of noise and decay.

Measured rms, the rms that noise would have given, how noisy the gradients are, and the verdict of
`_verdict.py`: for raw weights, multipliers and vectors, and for embeddings row by row.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from learnable_multipliers._names import layer_template
from learnable_multipliers.equilibrium._prediction import (
    Expectation,
    Expectations,
    Part,
    TensorWalk,
    Trained,
    check_optimizer,
    has_sparse_rows,
    steady_expectation,
    tensor_walk,
    trained_tensors,
)
from learnable_multipliers.equilibrium._random_walk import SETTLED
from learnable_multipliers.equilibrium._token_rows import Band, TokenRows, read_rows
from learnable_multipliers.equilibrium._verdict import (
    Verdict,
    indicator_of,
    log_ratio,
    verdict_of,
)
from learnable_multipliers.optim._base import MultiplierOptimizer

PLURAL = {"matrix": "matrices", "multiplier": "multipliers", "vector": "vectors"}
_COLUMNS = {
    "measured": "rms",
    "predicted": "noise gives",
    "log_ratio": "log ratio",
    "settling": "2 wd sum lr",
    "indicator": "indicator",
}


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
    check_optimizer("diagnose", optimizer)
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
    starts = None
    if start is not None:
        starts = {(reading.name, reading.part): reading.measured for reading in start.readings}
    readings, rows = [], {}
    for tensor in tensors:
        expected, note = expectation_of(optimizer, tensor, walks[tensor.key], expectations, taken)
        readings.append(read_tensor(tensor, expected, starts, note))
        if tensor.part == "weight" and has_sparse_rows(tensor.matrix):
            before = start.rows[tensor.name].rms if start is not None else None
            rows[tensor.name] = read_rows(tensor, history, before, frequency)
    if frequency is not None and not rows:
        raise ValueError("frequency is given, but the optimizer trains no embedding")
    return Diagnosis(tuple(readings), rows)


def expectation_of(
    optimizer: MultiplierOptimizer,
    tensor: Trained,
    walk: TensorWalk | None,
    expectations: Expectations | None,
    taken: int,
) -> tuple[Expectation | None, str]:
    """Return the expected effect of noise on a tensor; with a reason, if there is no prediction.

    Without `expectations`, those of a run that was followed, it is that of a constant rate.
    """
    if walk is None:
        return None, "its optimizer's random walk on noise is not known"
    if tensor.steps == 0:
        return None, "no step yet"
    if tensor.part == "weight" and has_sparse_rows(tensor.matrix):
        return None, "row by row: see the rows"
    if expectations is not None:
        if tensor.steps < taken:
            return None, f"had a gradient in {tensor.steps} of {taken} steps"
        if tensor.weight_decay != walk.weight_decay:
            return None, "its decay was changed during the run"
        return expectations.of(walk), ""
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
    matrix, size = tensor.matrix, tensor.value.numel()
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
        role="/".join(dict.fromkeys(block.role for block in matrix.blocks))
        if matrix
        else tensor.kind,
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


def _render(readings: Sequence[TensorReading], rows: Mapping[str, TokenRows]) -> str:
    """Return the table: medians over the layers of a line, then the rows of embeddings."""
    lines: dict[tuple[str, str, str], list[TensorReading]] = {}
    for reading in readings:
        key = (reading.kind, layer_template(reading.name), reading.part)
        lines.setdefault(key, []).append(reading)
    table = [("tensor", "n", *_COLUMNS.values(), "verdict")]
    for kind in PLURAL:
        for (of, name, part), alike in lines.items():
            if of == kind:
                shown = name if part == "weight" else f"{name} {part}"
                numbers = _medians(alike, _COLUMNS)
                table.append((shown, str(len(alike)), *numbers, _joined_verdicts(alike)))
    text = _aligned(table)
    columns = {field: heading for field, heading in _COLUMNS.items() if field != "settling"}
    for name, found in rows.items():
        bands = [("rows by frequency", "n", *columns.values(), "verdict")]
        for band in found.bands:
            label = "none" if band.high == 0 else f"{band.low:.0e} to {band.high:.0e}"
            bands.append((label, str(band.num_rows), *_medians([band], columns), band.verdict))
        text += ["", name, *_aligned(bands)]
    return "\n".join(text)


def summarize(verdicts: Mapping[str, Mapping[Verdict, int]]) -> str:
    """Return the share of trapped tensors of each kind, in one line."""
    shares = []
    for kind, counts in verdicts.items():
        total = sum(counts.values())
        others = ", ".join(f"{counts[word]} {word}" for word in ("free", "open") if counts[word])
        rest = f": {others}" if others else ""
        share = counts["trapped"] / total
        shares.append(f"{counts['trapped']} of {total} {PLURAL[kind]} ({share:.0%}{rest})")
    return f"trapped are {', '.join(shares)}" if shares else "there is nothing to read"


def _joined_verdicts(readings: Sequence[TensorReading]) -> str:
    verdicts = Counter(reading.verdict for reading in readings)
    verdict = ", ".join(
        word if count == len(readings) else f"{count} {word}" for word, count in verdicts.items()
    )
    notes = {reading.note for reading in readings} - {""}
    return f"{verdict} ({'; '.join(sorted(notes))})" if notes else verdict


def _medians(readings: Sequence[TensorReading | Band], fields: Iterable[str]) -> Iterator[str]:
    """Yield the median of each field over the readings that have it, as text."""
    for field in fields:
        values = (getattr(reading, field) for reading in readings)
        known = [value for value in values if value is not None]
        digits = "+.3f" if field == "log_ratio" else ".3g"
        yield f"{statistics.median(known):{digits}}" if known else "-"


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]

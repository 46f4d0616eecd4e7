"""What the tensors of a run show of the equilibrium of noise and decay, as data and as a table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from learnable_multipliers._names import layer_template
from learnable_multipliers.equilibrium._prediction import (
    Expectations,
    steady_expectation,
    trained_tensors,
)
from learnable_multipliers.equilibrium._readings import (
    Band,
    TensorReading,
    TokenRows,
    Verdict,
    read_rows,
    read_tensor,
)

PLURAL = {"matrix": "matrices", "multiplier": "multipliers", "vector": "vectors"}
_COLUMNS = {
    "measured": "rms",
    "predicted": "noise gives",
    "log_ratio": "log ratio",
    "settling": "2 wd sum lr",
    "indicator": "indicator",
}


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
        """Return the verdicts in a line: `trapped are 12 of 14 matrices (86%: 1 free, 1 open)`."""
        return summarize(self.verdicts())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: every reading, and the rows of embeddings by frequency."""
        bands = {
            name: {"bands": [asdict(band) for band in rows.bands]}
            for name, rows in self.rows.items()
        }
        return {"readings": [asdict(reading) for reading in self.readings], "rows": bands}


def count_verdicts(readings: Iterable[TensorReading]) -> dict[str, dict[Verdict, int]]:
    """Return the number of tensors with each verdict, by kind."""
    counts: dict[str, dict[Verdict, int]] = {}
    for reading in readings:
        of = counts.setdefault(reading.kind, dict.fromkeys(get_args(Verdict), 0))
        of[reading.verdict] += 1
    return counts


@torch.no_grad()
def diagnose(
    optimizer: Optimizer,
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
    tensors = list(trained_tensors(optimizer))
    history = None if lrs is None else [float(lr) for lr in lrs]
    taken = max((tensor.steps for tensor in tensors), default=0)
    expectations = None
    if history is not None:
        if len(history) != taken:
            raise ValueError(
                f"lrs has {len(history)} learning rates, but the optimizer has taken {taken} "
                "steps: give the rate of each step taken, without those of steps it skipped"
            )
        expectations = Expectations({tensor.key: tensor.walk for tensor in tensors}, history)
    starts = {} if start is None else {(r.name, r.part): r.measured for r in start.readings}
    readings, rows = [], {}
    for tensor in tensors:
        if expectations is None:
            expected, note = steady_expectation(tensor, float(optimizer.param_groups[0]["lr"]))
        else:
            expected, note = expectations.of(tensor, taken)
        readings.append(read_tensor(tensor, expected, note, starts))
        if tensor.is_embedding:
            before = start.rows[tensor.name].rms if start is not None else None
            rows[tensor.name] = read_rows(tensor, history, before, frequency)
    if frequency is not None and not rows:
        raise ValueError("frequency is given, but the optimizer trains no embedding")
    return Diagnosis(tuple(readings), rows)


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
    text = aligned(table, (0, len(table[0]) - 1))
    columns = {field: heading for field, heading in _COLUMNS.items() if field != "settling"}
    for name, found in rows.items():
        bands = [("rows by frequency", "n", *columns.values(), "verdict")]
        for band in found.bands:
            label = "none" if band.high == 0 else f"{band.low:.0e} to {band.high:.0e}"
            bands.append((label, str(band.num_rows), *_medians([band], columns), band.verdict))
        text += ["", name, *aligned(bands, (0, len(bands[0]) - 1))]
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


def aligned(table: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table; columns align to the right, but for those at these places."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        for i in left:
            cells[i] = row[i].ljust(widths[i])
        lines.append("  ".join(cells).rstrip())
    return lines

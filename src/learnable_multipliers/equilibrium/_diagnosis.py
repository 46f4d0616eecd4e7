"""Diagnose the tensors of a run against the equilibrium of noise and decay, as data and table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._formats import aligned
from learnable_multipliers._names import layer_template
from learnable_multipliers.equilibrium._prediction import Expectations, steady_expectation
from learnable_multipliers.equilibrium._random_walk import SETTLED
from learnable_multipliers.equilibrium._readings import (
    WITHIN,
    Band,
    TensorReading,
    TokenRows,
    Verdict,
    read_rows,
    read_tensor,
    verdict_of,
)
from learnable_multipliers.equilibrium._sources import Source

PLURAL = {"matrix": "matrices", "multiplier": "multipliers", "vector": "vectors"}
_COLUMNS = {
    "measured": "rms",
    "predicted": "predicted rms",
    "log_ratio": "log ratio",
    "settling": "2 wd sum lr",
    "indicator": "indicator",
}
_BY_SIGNAL = "signal in gradients"
"""Reason why a tensor is free if its rms alone would not make it free."""


@dataclass(frozen=True)
class Diagnosis:
    """Readings of every tensor of an optimizer. Prints as a table with repeated layers on one line.

    `diagnosis[name]` is the reading of a weight, `diagnosis[name, "row"]` that of its multipliers.
    """

    readings: tuple[TensorReading, ...]
    """With `name`, `part`, `role`, rms `measured` and `predicted`, `indicator` and `verdict`."""
    rows: Mapping[str, TokenRows]
    """The rows of each embedding, by parameter name."""
    assumptions: tuple[str, ...] = ()
    """Assumptions about a run, in words."""

    def __getitem__(self, key: str | tuple[str, str]) -> TensorReading:
        name, part = (key, "weight") if isinstance(key, str) else key
        for reading in self.readings:
            if (reading.name, reading.part) == (name, part):
                return reading
        raise KeyError(f"no {part} of {name!r}")

    def __str__(self) -> str:
        lines = _render(self.readings, self.rows)
        lines += ["", *(f"assumed: {text}" for text in self.assumptions)] * bool(self.assumptions)
        return "\n".join(lines)

    def verdicts(self) -> dict[str, dict[Verdict, int]]:
        """Return the number of trapped, free and open matrices, multipliers and vectors."""
        return count_verdicts(self.readings)

    def summary(self) -> str:
        """Return the verdicts in a line: `12 of 14 matrices trapped (86%: 1 free, 1 open)`."""
        return summarize(self.verdicts())

    def table(self) -> list[tuple[str, ...]]:
        """Return the cells of the printed table, headings first: medians over layers."""
        return _table(self.readings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: every reading, and the rows of embeddings by frequency."""
        bands = {
            name: {"bands": [asdict(band) for band in rows.bands]}
            for name, rows in self.rows.items()
        }
        data: dict[str, Any] = {"readings": [asdict(r) for r in self.readings], "rows": bands}
        if self.assumptions:
            data["assumptions"] = list(self.assumptions)
        return data


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
    model: nn.Module | None = None,
    *,
    lrs: Iterable[float] | float | None = None,
    start: Diagnosis | None = None,
    frequency: Tensor | None = None,
) -> Diagnosis:
    """Read every tensor that an optimizer trains: rms, rms on noise, indicator, verdict.

    Also for plain `torch.optim.AdamW`, `Adam` and `Muon`, given their model.

    Args:
        model: What a plain optimizer of torch trains, for the names of its parameters.
        lrs: The base learning rate of every step taken, in order, or one rate for all steps. An
            optimizer does not remember them. Without them predictions are the equilibrium at the
            present rate, for tensors that the steps so far would have brought there: right if the
            rate has not changed for some 2 / (lr wd) steps.
        start: A diagnosis from before the first step. Without it a start counts as zero where
            decay has wiped it out, and there is no prediction where it has not.
        frequency: For each row of the embedding, in what share of the steps it has had a gradient
            (`row_frequency` makes it from counts). Rows are simulated by it; the moments do not
            contain it: they depend on how long ago a token came last, not on how often it comes.
    """
    source = Source(optimizer, model)
    history, constant = _history(lrs)
    if not source.counts_steps and history is None:
        raise ValueError(
            f"{type(source.optimizer).__name__} does not count its steps: give lrs, the learning "
            "rate of each step it has taken"
        )
    tensors = list(source.tensors(0 if history is None else len(history)))
    taken = max((tensor.steps for tensor in tensors), default=0)
    if source.is_plain and taken == 0:
        raise ValueError(
            f"{type(source.optimizer).__name__} has taken no step, so there is nothing to read "
            "yet: lrm.Monitor(optimizer, model=model), made now, follows a run from its start"
        )
    if constant is not None:
        history = [constant] * taken
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
            expected, note = steady_expectation(tensor, source.lr)
        else:
            expected, note = expectations.of(tensor, taken)
        reading = read_tensor(tensor, expected, note, starts)
        readings.append(_with_age(reading) if source.is_plain else reading)
        if tensor.is_embedding:
            before = start.rows[tensor.name].rms if start is not None else None
            rows[tensor.name] = read_rows(tensor, history, before, frequency)
    if frequency is not None and not rows:
        raise ValueError("frequency is given, but the optimizer trains no embedding")
    assumptions = tuple(_assumptions(source, history)) if source.is_plain else ()
    return Diagnosis(tuple(readings), rows, assumptions)


def _with_age(reading: TensorReading) -> TensorReading:
    """Note on an open verdict that the tensor is too young for another one."""
    age = reading.settling
    if reading.verdict != "open" or age is None or age >= SETTLED:
        return reading
    note = f"young: 2 wd sum(lr) is {age:.2g}, below {SETTLED:g}" if age else "no decay"
    return replace(reading, note=note)


def _history(lrs: Iterable[float] | float | None) -> tuple[list[float] | None, float | None]:
    """Return the rates one by one, or the one rate of all steps."""
    if isinstance(lrs, float | int):
        return None, float(lrs)
    return None if lrs is None else [float(lr) for lr in lrs], None


def _assumptions(source: Source, history: Sequence[float] | None) -> Iterator[str]:
    """Yield the assumptions of a prediction about a plain optimizer's past."""
    if history is None:
        yield f"the learning rate has always been {source.lr:g}, as it is now: give lrs otherwise"
    groups = source.optimizer.param_groups
    if any(g["weight_decay"] and not g.get("decoupled_weight_decay", True) for g in groups):
        yield (
            "gradients have always had the rms they have now, by which Adam divides its decay; "
            "AdamW's does not depend on it"
        )


def _table(readings: Sequence[TensorReading]) -> list[tuple[str, ...]]:
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
    return table


def _render(readings: Sequence[TensorReading], rows: Mapping[str, TokenRows]) -> list[str]:
    """Return the table: medians over the layers of a line, then the rows of embeddings."""
    table = _table(readings)
    text = aligned(table, (0, len(table[0]) - 1))
    columns = {key: heading for key, heading in _COLUMNS.items() if key != "settling"}
    for name, token_rows in rows.items():
        bands = [("rows by frequency", "n", *columns.values(), "verdict")]
        for band in token_rows.bands:
            label = "none" if band.high == 0 else f"{band.low:.0e} to {band.high:.0e}"
            by_signal = band.verdict == "free" and abs(band.log_ratio or 0.0) <= WITHIN
            verdict = f"free ({_BY_SIGNAL})" if by_signal else band.verdict
            bands.append((label, str(band.num_rows), *_medians([band], columns), verdict))
        text += ["", name, *aligned(bands, (0, len(bands[0]) - 1))]
    return text


def summarize(verdicts: Mapping[str, Mapping[Verdict, int]]) -> str:
    """Return the share of trapped tensors of each kind, in one line."""
    shares = []
    for kind, counts in verdicts.items():
        total = sum(counts.values())
        others = ", ".join(f"{counts[word]} {word}" for word in ("free", "open") if counts[word])
        rest = f": {others}" if others else ""
        share = counts["trapped"] / total
        shares.append(f"{counts['trapped']} of {total} {PLURAL[kind]} trapped ({share:.0%}{rest})")
    return ", ".join(shares) or "there is nothing to read"


def _joined_verdicts(readings: Sequence[TensorReading]) -> str:
    verdicts = Counter(reading.verdict for reading in readings)
    verdict = ", ".join(
        word if count == len(readings) else f"{count} {word}" for word, count in verdicts.items()
    )
    notes = {reading.note for reading in readings} - {""}
    if any(_is_free_by_signal(reading) for reading in readings):
        notes.add(_BY_SIGNAL)
    return f"{verdict} ({'; '.join(sorted(notes))})" if notes else verdict


def _is_free_by_signal(reading: TensorReading) -> bool:
    """Return whether a tensor is free only because of its gradients, not its rms."""
    by_rms = verdict_of(reading.log_ratio, reading.error, reading.settling, None, reading.size)
    return reading.verdict == "free" and by_rms != "free"


def _medians(readings: Sequence[TensorReading | Band], fields: Iterable[str]) -> Iterator[str]:
    """Yield the median of each field over the readings that have it, as text."""
    for name in fields:
        values = (getattr(reading, name) for reading in readings)
        known = [value for value in values if value is not None]
        digits = "+.3f" if name == "log_ratio" else ".3g"
        yield f"{statistics.median(known):{digits}}" if known else "-"
